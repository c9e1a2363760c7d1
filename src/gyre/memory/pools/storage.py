"""Storage pool: the tensors of one component, moved together between device, host, disk and none.

In: named tensors on one device. Out: the same tensors, same identity, with or without memory. A
pool frees and refills *storages* (`untyped_storage().resize_`), so Parameters, optimizer references
and views stay valid. With a virtual-memory `driver` the addresses persist too, and captured CUDA
graphs stay valid. While a pool is not on the device its tensors must not be touched. Not
thread-safe: runs on the compute thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from gyre.core.errors import InputError, MemoryBudgetError
from gyre.core.records import Component, Tier, Usage
from gyre.memory.pools.cuda_vmm import Driver, VirtualMemory, VirtualUsage, is_present
from gyre.memory.pools.disk_file import DiskFile
from gyre.memory.pools.fixed import FixedPool
from gyre.memory.pools.host_buffer import HostBuffer
from gyre.memory.pools.vmm_import import adopt

ALL_TIERS: tuple[Tier, ...] = ("device", "host", "disk", "none")


class StoragePool:
    """One component, initially on the device, made of Parameters rather than their `detach()`ed
    aliases. "none" discards the contents: they return as zeros, then `refill` runs. A `driver`
    moves the storages into virtual memory at once; every tensor that shares them must be
    included."""

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        tiers: tuple[Tier, ...] = ALL_TIERS,
        folder: Path | None = None,
        device: torch.device,
        refill: Callable[[], None] | None = None,
        driver: Driver | None = None,
    ) -> None:
        assert "device" in tiers and set(tiers) <= set(ALL_TIERS), tiers
        if "disk" in tiers and folder is None:
            tiers = tuple(tier for tier in tiers if tier != "disk")
        self.name = name
        self.tiers = tiers
        self.device = device
        self.tier: Tier = "device"
        self._refill = refill
        self._sharers = _group_by_storage(name, tensors, device)
        self._storages = [sharers[0].untyped_storage() for sharers in self._sharers]
        # under all, or none
        self._virtual: list[VirtualMemory] = adopt(name, self._storages, self._sharers, driver)
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._host: HostBuffer | None = None
        self._keeps_pages = False
        # pages of every host buffer ever made here and not known to be dead
        self._watched: list[weakref.ref] = []
        self._file = DiskFile(folder, name) if folder is not None else None
        if self._file is not None:
            self._file.remove()  # what a killed process left: a new pool has nothing on disk

    @property
    def size_bytes(self) -> int:
        """Bytes when on the device; storages shared by several tensors count once."""
        return sum(self._sizes)

    @property
    def host(self) -> HostBuffer | None:
        """Pages on the host: what was moved there, or what is kept for the next move."""
        return self._host

    def segments(self) -> list[Tensor]:
        """Return the bytes of each storage where they are, on the device or the host."""
        return self._device_segments() if self.tier == "device" else self._host_segments()

    def component(self) -> Component:
        return Component(
            name=self.name, size_bytes=self.size_bytes, tier=self.tier, tiers=self.tiers
        )

    def measure(self) -> Usage:
        """Return the bytes that exist now: of storages, of referenced host pages, of the file."""
        self._watched = [ref for ref in self._watched if ref() is not None]
        usage = Usage(
            device_bytes=sum(storage.nbytes() for storage in self._storages if is_present(storage)),
            host_bytes=sum(len(pages) for ref in self._watched if (pages := ref()) is not None),
            disk_bytes=self._file.size_bytes() if self._file is not None else 0,
        )
        if not self._virtual:
            return usage
        mapped_bytes = sum(memory.size_bytes for memory in self._virtual if memory.is_mapped)
        return VirtualUsage(**asdict(usage), mapped_bytes=mapped_bytes)

    def move(self, tier: Tier) -> None:
        """Move the whole component. The source is freed only after the destination holds
        everything."""
        if tier == self.tier:
            return
        self._check_move(tier)
        if self.device.type == "cuda":
            # no kernel of any stream may still use the storages
            torch.cuda.synchronize(self.device)
        if self.tier == "device" and not self._virtual:
            self._make_resizable()
        {
            "device": self._to_device,
            "host": self._to_host,
            "disk": self._to_disk,
            "none": lambda: None,
        }[tier]()
        left, self.tier = self.tier, tier
        self._let_go(left)
        self._settle_pages()
        if left == "none" and self._refill is not None:
            self._refill()

    def readable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors over the component's current bytes, without a move.

        These are the tensors themselves on the device, tensors over the host pages, or tensors over
        the mapped file. Valid until the component moves or changes.
        """
        assert self.tier != "none", f"{self.name} has no contents"
        if self.tier == "device":
            return {name: tensor.detach() for name, tensor in tensors.items()}
        if self.tier == "disk":
            assert self._file is not None
            segments = self._file.map()
        else:
            segments = self._host_segments()
        place = {storage._cdata: index for index, storage in enumerate(self._storages)}
        return {
            name: _lay_out(t, segments[place[t.untyped_storage()._cdata]])
            for name, t in tensors.items()
        }

    def keep_pages(self, keep: bool) -> None:
        """Set whether pinned host pages are kept when the component returns to the device. Pinning
        them again takes longer than the copy. Disabling it frees the existing ones."""
        self._keeps_pages = keep
        self._settle_pages()

    def _check_move(self, tier: Tier) -> None:
        if tier not in self.tiers:
            raise InputError(
                f"component {self.name} may not live on tier '{tier}' (accepted: "
                f"{', '.join(self.tiers)})",
                hint=""
                if tier != "disk"
                else "set memory.disk_folder to give components a disk tier",
            )
        if self.tier == "none" and tier != "device":
            raise InputError(
                f"component {self.name} was destroyed and has no contents to move to '{tier}' "
                "(accepted: device)",
                hint="instantiate it on the device first",
            )

    def _to_device(self) -> None:
        try:
            self._make_device()
            self._fill_device()
        except BaseException as error:
            self._free_device()
            # torch has no common type for a failed allocation on CPU and CUDA
            if isinstance(error, RuntimeError):
                raise MemoryBudgetError(
                    f"component {self.name} ({self.size_bytes} bytes) could not be placed on "
                    f"{self.device}: {error}",
                    hint="lower the sizes of the phase or let another component leave the device",
                ) from error
            raise

    def _make_device(self) -> None:
        if self._virtual:
            for memory in self._virtual:
                memory.map()
            return
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)

    def _fill_device(self) -> None:
        segments = self._device_segments()
        if self.tier == "none":
            for segment in segments:
                segment.zero_()
        elif self.tier == "disk":
            assert self._file is not None
            self._file.read(segments)
        else:
            self._copy(self._host_segments(), segments)

    def _to_host(self) -> None:
        if self.size_bytes == 0:
            return
        if self._host is None:
            self._host = HostBuffer(
                self.size_bytes, pin=self.device.type == "cuda", owner=f"component {self.name}"
            )
            self._watched.append(self._host.watch())
        try:
            if self.tier == "disk":
                assert self._file is not None
                self._file.read(self._host_segments())
            else:
                self._copy(self._device_segments(), self._host_segments())
        except BaseException:
            self._host = None
            raise

    def _to_disk(self) -> None:
        assert self._file is not None
        self._file.write(self.segments())

    def _let_go(self, tier: Tier) -> None:
        if tier == "device":
            self._free_device()
        elif tier == "disk":
            assert self._file is not None
            self._file.remove()

    def _settle_pages(self) -> None:
        if not (self.tier == "host" or (self.tier == "device" and self._keeps_pages)):
            self._host = None

    def _free_device(self) -> None:
        if self._virtual:
            for memory in self._virtual:
                if memory.is_mapped:
                    memory.unmap()
            return
        for storage in self._storages:
            storage.resize_(0)

    def _make_resizable(self) -> None:
        """Replace a storage that torch cannot resize by a copy under the pool's tensors.

        Torch does not resize storages that NumPy has seen (`Tensor.numpy()`) or that were mapped
        from a file. Refused when any other reference exists, since it would see stale bytes.
        """
        for index in range(len(self._storages)):
            if self._storages[index].resizable():
                continue
            old = weakref.ref(self._storages[index])
            copy = torch.UntypedStorage(self._sizes[index], device=self._storages[index].device)
            self._set_storage(index, copy.copy_(self._storages[index]))
            if (held := old()) is not None:
                self._set_storage(index, held)
                raise MemoryBudgetError(
                    f"component {self.name}: {self._sizes[index]} bytes shared with NumPy or a "
                    "file mapping are held "
                    "by something outside the component, so they cannot leave the device",
                    hint="give the pool the Parameters themselves; read bytes by "
                    "numpy.from_dlpack, not Tensor.numpy()",
                )

    def _set_storage(self, index: int, storage: torch.UntypedStorage) -> None:
        with torch.no_grad():
            for tensor in self._sharers[index]:
                offset, size, stride = tensor.storage_offset(), tensor.size(), tensor.stride()
                tensor.set_(storage, offset, size, stride)  # pyright: ignore
        self._storages[index] = storage

    def _device_segments(self) -> list[Tensor]:
        return [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in self._storages
        ]

    def _host_segments(self) -> list[Tensor]:
        if self._host is None:
            return [torch.empty(0, dtype=torch.uint8) for _ in self._sizes]
        return list(self._host.bytes.split(self._sizes))

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the caller frees the source next

    def close(self) -> None:
        """Discard the contents on any tier, and the file."""
        self._let_go(self.tier)
        self.tier = "none"
        self._settle_pages()


def _lay_out(like: Tensor, segment: Tensor) -> Tensor:
    """Return a tensor over the segment's bytes, with the shape and strides of `like`."""
    if segment.storage_offset() % like.element_size():
        segment = segment.clone()  # pages hold one segment after the other, of any sizes
    offset = int(segment.storage_offset()) // like.element_size() + int(like.storage_offset())
    bare = torch.empty(0, dtype=like.dtype)
    storage = segment.untyped_storage()
    return bare.set_(storage, offset, like.size(), like.stride())  # pyright: ignore


def _group_by_storage(
    name: str, tensors: Mapping[str, Tensor], device: torch.device
) -> list[list[Tensor]]:
    sharers: dict[int, list[Tensor]] = {}
    for key, tensor in tensors.items():
        same = tensor.device.type == device.type and device.index in (None, tensor.device.index)
        assert same, f"{name}: {key} is on {tensor.device}, its pool on {device}"
        storage = tensor.untyped_storage()
        assert is_present(storage) or not tensor.numel(), (
            f"{name}: {key} has no bytes; it is off the device already"
        )
        # the address of the storage object, not of its bytes
        sharers.setdefault(storage._cdata, []).append(tensor)
    return list(sharers.values())


class PoolTenant:
    """The MemoryTenant of an owner whose components are pools. The owner forwards the three methods
    to it."""

    def __init__(self, pools: Sequence[StoragePool | FixedPool]) -> None:
        self._pools: dict[str, StoragePool | FixedPool] = {}
        for pool in pools:
            self.add(pool)

    def __getitem__(self, name: str) -> StoragePool | FixedPool:
        return self._pools[name]

    def add(self, pool: StoragePool | FixedPool) -> None:
        assert pool.name not in self._pools, f"two components named {pool.name}"
        self._pools[pool.name] = pool

    def remove(self, name: str) -> None:
        """Remove a component and free its bytes."""
        self._pools.pop(name).close()

    def readable(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return readable tensors; see StoragePool.readable."""
        return self._pools[name].readable(tensors)

    def components(self) -> Sequence[Component]:
        return [pool.component() for pool in self._pools.values()]

    def move(self, names: Sequence[str], tier: Tier) -> None:
        for name in names:
            if name not in self._pools:
                raise InputError(f"no component '{name}' (accepted: {', '.join(self._pools)})")
        for name in names:
            self._pools[name].move(tier)

    def keep_pages(self, keep: bool) -> None:
        """Set whether components on the device keep their host pages. See
        StoragePool.keep_pages."""
        for pool in self._pools.values():
            pool.keep_pages(keep)

    def measure(self) -> Mapping[str, Usage]:
        return {name: pool.measure() for name, pool in self._pools.items()}
