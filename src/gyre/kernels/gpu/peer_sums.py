"""Peer sums: partial products of few rows, summed over the GPUs of one host by writing to each
other's memory. In: a rank's partial rows, the residual stream. Out: the residual stream with the
sum added, and its norm. Oracle: an all-reduce, and pointwise.add_rms_norm.

One program per row. It writes its part of the row to every peer, then the row's call number; it
waits for the peers' numbers and adds the parts in rank order, so all ranks have the same bits. Two
halves take turns by that number. A peer writes call n + 2 only after it has seen call n + 1 of this
rank. That one begins when call n has ended, so one wait per call is enough, in graphs too.
A peer that never comes is for the step's deadline to find, as in any collective of a graph.
"""

# T rows, E hidden size, S ranks, R most rows, B bytes

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gyre.kernels.gpu.work_list import peer_bytes, peer_head_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBuffers:
    """Memory of one rank that its peers write, and where theirs is."""

    rank: int
    ranks: int
    rows: int  # most of a call
    width: int
    dtype: torch.dtype
    places_S: Tensor  # int64: the address of each rank's memory, as this rank sees it
    calls_R: Tensor  # int32: calls so far, by row

    @property
    def size_bytes(self) -> int:
        """Return the bytes of this rank's memory, which torch's allocator does not count."""
        item_bytes = self.dtype.itemsize
        return peer_bytes(ranks=self.ranks, rows=self.rows, width=self.width, item_bytes=item_bytes)


def add_peer_sum(peers: PeerBuffers, x_TE: Tensor, partial_TE: Tensor) -> None:
    """Add the sum of all ranks' partial rows to x in place."""
    _launch(peers, x_TE, partial_TE, None, 0.0, x_TE)


def add_peer_sum_rms_norm(
    peers: PeerBuffers,
    x_TE: Tensor,
    partial_TE: Tensor,
    weight_E: Tensor,
    eps: float,
    out_TE: Tensor,
) -> None:
    """Add the sum of all ranks' partial rows to x in place and write the norm to `out`."""
    _launch(peers, x_TE, partial_TE, weight_E, eps, out_TE)


def _launch(
    peers: PeerBuffers,
    x_TE: Tensor,
    partial_TE: Tensor,
    weight_E: Tensor | None,
    eps: float,
    out_TE: Tensor,
) -> None:
    rows, width = x_TE.shape
    assert rows <= peers.rows and width == peers.width and x_TE.dtype == peers.dtype
    assert x_TE.is_contiguous() and partial_TE.is_contiguous() and out_TE.is_contiguous()
    block = triton.next_power_of_2(width)
    _add_peer_sum[(rows,)](
        x_TE,
        partial_TE,
        x_TE if weight_E is None else weight_E,
        out_TE,
        peers.places_S,
        peers.calls_R,
        eps,
        RANK=peers.rank,
        RANKS=peers.ranks,
        ROWS=peers.rows,
        HEAD=peer_head_bytes(peers.ranks, peers.rows),
        E=width,
        BLOCK=block,
        NORM=weight_E is not None,
        num_warps=8 if block > 2048 else 4,
    )


@triton.jit
def _add_peer_sum(
    x_ptr,
    partial_ptr,
    weight_ptr,
    out_ptr,
    places_ptr,
    calls_ptr,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    inside = offs < E
    first = row.to(tl.int64) * E
    call = tl.load(calls_ptr + row) + 1
    half = (call & 1).to(tl.int64)
    own = tl.load(partial_ptr + first + offs, mask=inside, other=0.0)
    number: tl.constexpr = x_ptr.dtype.element_ty
    for step in tl.static_range(1, RANKS):
        place = tl.load(places_ptr + (RANK + step) % RANKS)
        parts = (place + HEAD).to(tl.pointer_type(number))
        tl.store(parts + ((RANK * 2 + half) * ROWS + row) * E + offs, own, mask=inside)
    # every thread's part is written before one of them says so
    tl.debug_barrier()
    for step in tl.static_range(1, RANKS):
        place = tl.load(places_ptr + (RANK + step) % RANKS)
        told = place.to(tl.pointer_type(tl.int32)) + RANK * ROWS + row
        tl.atomic_xchg(told, call, sem="release", scope="sys")
    here = tl.load(places_ptr + RANK)
    parts = (here + HEAD).to(tl.pointer_type(number))
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for source in tl.static_range(RANKS):
        if source == RANK:
            total += own.to(tl.float32)
        else:
            told = here.to(tl.pointer_type(tl.int32)) + source * ROWS + row
            seen = tl.atomic_add(told, 0, sem="acquire", scope="sys")
            while seen - call < 0:  # numbers wrap
                seen = tl.atomic_add(told, 0, sem="acquire", scope="sys")
            tl.debug_barrier()
            at = parts + ((source * 2 + half) * ROWS + row) * E + offs
            part = tl.load(at, mask=inside, other=0.0, volatile=True)
            total += part.to(tl.float32)
    tl.store(calls_ptr + row, call)
    y = total.to(number).to(tl.float32)
    x = tl.load(x_ptr + first + offs, mask=inside, other=0.0)
    summed = (x.to(tl.float32) + y).to(number)
    tl.store(x_ptr + first + offs, summed, mask=inside)
    if NORM:
        wide = summed.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
        normed = (wide * rstd).to(number).to(tl.float32)
        weight = tl.load(weight_ptr + offs, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + first + offs, (normed * weight).to(number), mask=inside)
