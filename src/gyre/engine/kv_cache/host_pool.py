"""Host KV: page slots in host memory, pinned beside a GPU. In: page and slot numbers. Out: copies,
queued on the device in the order of the calls and not waited for.
"""

# S slots, L layers, K kv heads, D head dim

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from gyre.engine.kv_cache.pool import KvPool, to_device
from gyre.memory.pools.host_buffer import HostBuffer

STAGED_PAGES = 64  # copied through device memory at once


class HostKv:
    """The other end of `KvPool.tensor`, whose dimension 1 is the page: here the slot comes first,
    so that a page of all layers is one piece. The host never reads or writes it, so the device's
    order is all that matters."""

    def __init__(self, pool: KvPool, num_slots: int, *, name: str) -> None:
        self.pool = pool
        self.num_slots = num_slots
        layers, _, *page_shape = pool.tensor.shape
        page_bytes = layers * int(np.prod(page_shape)) * pool.tensor.element_size()
        self.buffer = HostBuffer(
            num_slots * page_bytes, pin=pool.tensor.is_cuda, owner=f"component {name}"
        )
        self._slots = self.buffer.bytes.view(pool.tensor.dtype).view(num_slots, layers, *page_shape)

    @property
    def size_bytes(self) -> int:
        return self.buffer.size_bytes

    def wait(self) -> None:
        """Wait for the copies that are queued; nothing may be freed before."""
        if self.pool.tensor.is_cuda:
            torch.cuda.synchronize(self.pool.tensor.device)

    @torch.inference_mode()
    def copy_out(self, pages: np.ndarray, slots: np.ndarray) -> None:
        """Queue pages → slots."""
        device = self.pool.tensor.device
        for at in range(0, len(pages), STAGED_PAGES):
            part = to_device(pages[at : at + STAGED_PAGES].astype(np.int64), device)
            staged_SL = self.pool.tensor.index_select(1, part).transpose(0, 1).contiguous()
            for begin, slot, count in _runs(slots[at : at + STAGED_PAGES]):
                self._slots[slot : slot + count].copy_(
                    staged_SL[begin : begin + count], non_blocking=True
                )

    @torch.inference_mode()
    def copy_in(self, slots: np.ndarray, pages: np.ndarray) -> None:
        """Queue slots → pages."""
        tensor = self.pool.tensor
        for at in range(0, len(pages), STAGED_PAGES):
            part = to_device(pages[at : at + STAGED_PAGES].astype(np.int64), tensor.device)
            staged_SL = torch.empty(
                (len(part), *self._slots.shape[1:]), device=tensor.device, dtype=tensor.dtype
            )
            for begin, slot, count in _runs(slots[at : at + STAGED_PAGES]):
                staged_SL[begin : begin + count].copy_(
                    self._slots[slot : slot + count], non_blocking=True
                )
            tensor.index_copy_(1, part, staged_SL.transpose(0, 1))


def _runs(slots: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (place, first slot, count) of each run of consecutive slots."""
    if len(slots) == 0:
        return
    begins = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    for begin, end in pairwise(begins):
        yield begin, int(slots[begin]), end - begin
