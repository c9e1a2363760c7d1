"""VMM import: moves torch-allocated storages into virtual memory once, so that their addresses are
stable afterwards.

In: a component's storages and the tensors on them. Out: the same tensors, same identity, new
addresses.

Each storage is inside one slab. A slab is copied and its old storages freed before the next, so the
import needs extra memory for the largest slab only.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from gyre.core.errors import MemoryBudgetError
from gyre.core.rounding import round_up
from gyre.memory.pools.cuda_vmm import Driver, VirtualMemory, memory_under

ALIGN_BYTES = 512  # as torch's allocator aligns
SLAB_BYTES = 1 << 30  # a larger storage has a slab of its own


def plan_slabs(sizes: Sequence[int], *, limit: int) -> list[list[tuple[int, int]]]:
    """Place storages in slabs of at most `limit` bytes, in order: (index, offset) by slab. Empty
    storages are omitted."""
    slabs: list[list[tuple[int, int]]] = []
    end = limit
    for index, size in enumerate(sizes):
        if size == 0:
            continue
        if not slabs or end + size > limit:
            slabs.append([])
            end = 0
        slabs[-1].append((index, end))
        end += round_up(size, ALIGN_BYTES)
    return slabs


def adopt(
    name: str,
    storages: list[torch.UntypedStorage],
    sharers: Sequence[Sequence[Tensor]],
    driver: Driver | None,
) -> list[VirtualMemory]:
    """Replace each storage, in the list and under the tensors, by an equal one in virtual memory;
    return that memory.

    Virtual storages stay; without a driver the others do too. On an error the completed
    replacements remain: every tensor is valid at any moment.
    """
    memories = _take_over(name, storages)
    if driver is None:
        assert not memories or all(
            memory_under(storage) for storage in storages if storage.nbytes()
        ), name
        return memories
    sizes = [storage.nbytes() if memory_under(storage) is None else 0 for storage in storages]
    for slab in plan_slabs(sizes, limit=SLAB_BYTES):
        last, offset = slab[-1]
        memory = VirtualMemory(offset + sizes[last], driver, owner=f"component {name}")
        memory.map()
        for index, offset in slab:
            _replace(name, storages, index, sharers[index], memory.storage(offset, sizes[index]))
        memories.append(memory)
    return memories


def _take_over(name: str, storages: Sequence[torch.UntypedStorage]) -> list[VirtualMemory]:
    """Return the virtual memory that already contains the storages. Its owner must own everything
    in it."""
    under = (memory_under(storage) for storage in storages)
    memories = list(dict.fromkeys(memory for memory in under if memory is not None))
    own = {id(storage) for storage in storages}
    assert all(id(storage) in own for memory in memories for storage in memory.storages()), (
        f"{name} shares virtual memory with tensors that it was not given"
    )
    return memories


def _replace(
    name: str,
    storages: list[torch.UntypedStorage],
    index: int,
    tensors: Sequence[Tensor],
    to: torch.UntypedStorage,
) -> None:
    """Replace a storage. Refused when another tensor references the old one, since it would see
    stale bytes."""
    old = weakref.ref(storages[index])
    as_bytes(to).copy_(as_bytes(storages[index]))
    storages[index] = to
    point(tensors, to)
    if (held := old()) is not None:
        storages[index] = held
        point(tensors, held)
        raise MemoryBudgetError(
            f"component {name}: {to.nbytes()} bytes cannot get an address that stays, since "
            "something outside the "
            "component holds them",
            hint="give the pool the Parameters themselves and every other tensor that shares "
            "their storage",
        )


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore


@torch.no_grad()
def point(tensors: Sequence[Tensor], storage: torch.UntypedStorage) -> None:
    for tensor in tensors:
        offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
        tensor.set_(storage, offset, size, stride)  # pyright: ignore
