"""Attention of a step on the GPU: which kernel serves which tokens. In: staged work lists, chunks.
Out: `attend` for models.fused_forward.

Decoding tokens go through the split kernel, prompt chunks through the tiled one. In batch-invariant
mode every token, prompt or not, is a query of the split kernel with pieces of one size. So each
token is computed in one way only.
"""

# T tokens, B decoding rows, C chunks, H heads, K kv heads, D head dim

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyre.core.events import Emit
from gyre.engine.kv_cache.pool import KvPool
from gyre.engine.runners.gpu_work import cut_tiles, most_pieces
from gyre.engine.scheduler.step import PrefillChunk
from gyre.kernels.gpu.decode_attention import (
    PROGRAMS_PER_SM,
    SLAB_ITEMS,
    DecodeScratch,
    DecodeWork,
    cut_slabs,
    decode_attention,
    send,
)
from gyre.kernels.gpu.flash4 import HEAD_DIMS, Flash4, find_flash4
from gyre.kernels.gpu.flash4 import PAGE_TOKENS as FLASH4_PAGE
from gyre.kernels.gpu.prefill_attention import (
    TILE_QUERIES,
    PrefillWork,
    describe_pages,
    prefill_attention,
)
from gyre.models.fused_forward import Attend

PROBE_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkArrays:
    """A step's prompt chunks on the host, int64, and the positions of their tokens after the
    decoding ones."""

    row_C: np.ndarray
    start_C: np.ndarray
    count_C: np.ndarray
    first_C: np.ndarray

    @staticmethod
    def of(chunks: tuple[PrefillChunk, ...], num_decode: int) -> ChunkArrays:
        count_C = np.asarray([chunk.count for chunk in chunks], dtype=np.int64)
        return ChunkArrays(
            row_C=np.asarray([chunk.row for chunk in chunks], dtype=np.int64),
            start_C=np.asarray([chunk.start for chunk in chunks], dtype=np.int64),
            count_C=count_C,
            first_C=num_decode + np.cumsum(count_C) - count_C,
        )

    def rows_and_positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the row and the position of every chunk token, in order."""
        chunk_T = np.repeat(np.arange(len(self.row_C)), self.count_C)
        within_T = np.arange(len(chunk_T)) - (np.cumsum(self.count_C) - self.count_C)[chunk_T]
        return self.row_C[chunk_T], self.start_C[chunk_T] + within_T


class GpuAttention:
    """Kernels, scratch and page descriptors of one engine."""

    def __init__(
        self,
        pool: KvPool,
        table_RP: Tensor,
        *,
        num_heads: int,
        max_running: int,
        context_tokens: int,
        invariant: bool,
    ) -> None:
        self.pool = pool
        self.invariant = invariant
        self._table_RP = table_RP
        self._num_heads = num_heads
        device = pool.tensor.device
        self._programs = (
            PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        )
        num_kv = pool.num_kv_heads
        head_dim = pool.tensor.shape[-1]
        self.pool_tokens = pool.num_pages * pool.page_tokens
        self._context_tokens = context_tokens
        bound_tokens = max_running * context_tokens if invariant else self.pool_tokens
        items = self.max_items = max_running + most_pieces(
            bound_tokens, num_kv, invariant=invariant
        )
        self._scratch = DecodeScratch.make(
            max(items, SLAB_ITEMS) if invariant else items, num_heads, head_dim, device
        )
        self._flash4: Flash4 | None = None
        self.refresh()

    @property
    def measures_prefill(self) -> bool:
        """Return whether the choice measures, so that nothing else should run beside it."""
        return not self.invariant and self._why_tiles() is None

    def _why_tiles(self) -> str | None:
        """Return why FlashAttention-4 is not to be tried, or None."""
        page_tokens, head_dim = self.pool.page_tokens, self.pool.tensor.shape[-1]
        if find_flash4() is None:
            return "flash-attn-4 is not installed"
        if page_tokens != FLASH4_PAGE or head_dim not in HEAD_DIMS:
            return (
                f"flash-attn-4 wants pages of {FLASH4_PAGE} tokens and head dims {HEAD_DIMS}; "
                f"here {page_tokens} and {head_dim}"
            )
        return None

    def choose_prefill(self, emit: Emit) -> None:
        """Take FlashAttention-4 for prompt chunks where it is installed, fits and is faster;
        measured once. What is taken is compiled afterwards; in invariant mode it is the decode
        kernel, which the graphs compile."""
        if self.invariant:
            return
        begun_s = time.monotonic()

        def tell(**fields: Any) -> None:
            emit("engine.prefill_kernel", seconds=time.monotonic() - begun_s, **fields)

        flash4, reason = find_flash4(), self._why_tiles()
        if flash4 is None or reason is not None:
            self._probe(self._tiles, tokens=1)
            tell(kernel="triton", reason=reason)
            return
        ours_s, theirs_s = (
            self._probe(self._tiles),
            self._probe(lambda chunks: self._flash4_chunks(flash4, 0, chunks)),
        )
        self._flash4 = flash4 if theirs_s < ours_s else None
        kernel = "flash-attn-4" if self._flash4 is not None else "triton"
        tell(kernel=kernel, reason="measured", triton_s=ours_s, flash4_s=theirs_s)

    def _probe(self, make: Callable[[ChunkArrays], Attend], *, tokens: int = PROBE_TOKENS) -> float:
        """Return the seconds for one prompt of the given length, over arbitrary page contents.
        Compiles the kernel if needed."""
        count = min(tokens, self._table_RP.shape[1] * self.pool.page_tokens)
        one, zero = np.array([count]), np.array([0])
        chunks = ChunkArrays(row_C=zero, start_C=zero, count_C=one, first_C=zero)
        shape = (count, self._num_heads, self.pool.tensor.shape[-1])
        q_THD = torch.zeros(shape, device=self.pool.tensor.device, dtype=self.pool.tensor.dtype)
        attend, out_THD = make(chunks), torch.empty_like(q_THD)
        for _ in range(3):
            begun, ended = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
            begun.record()
            attend(0, q_THD, out_THD)
            ended.record()
            ended.synchronize()
        return begun.elapsed_time(ended) / 1e3

    def refresh(self) -> None:
        """Describe the pages anew, which may have moved."""
        self._descriptors = [
            describe_pages(self.pool.layer(index)) for index in range(len(self.pool.tensor))
        ]

    def decode(self, layer: int, q_BHD: Tensor, out_BHD: Tensor, work: DecodeWork) -> None:
        decode_attention(
            q_BHD,
            self.pool.layer(layer),
            self._table_RP,
            work,
            self._scratch,
            out_BHD,
            num_programs=self._programs,
        )

    def mixed(self, work: DecodeWork, num_decode: int, chunks: ChunkArrays) -> Attend:
        """Return `attend` for decoding tokens followed by chunks."""
        if self.invariant:
            prefill = self._slabs(num_decode, chunks)
        elif self._flash4 is not None:
            prefill = self._flash4_chunks(self._flash4, num_decode, chunks)
        else:
            prefill = self._tiles(chunks)

        def attend(layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
            if num_decode:
                self.decode(layer, q_THD[:num_decode], out_THD[:num_decode], work)
            prefill(layer, q_THD, out_THD)

        return attend

    def _tiles(self, chunks: ChunkArrays) -> Attend:
        tiles_I = cut_tiles(chunks.start_C, chunks.count_C, TILE_QUERIES)
        sent = self._send(chunks.row_C, chunks.first_C, chunks.start_C, chunks.count_C, tiles_I)
        work = PrefillWork(
            row_C=sent[0], first_C=sent[1], start_C=sent[2], count_C=sent[3], item_I=sent[4]
        )
        num_kv = self.pool.num_kv_heads

        def attend(layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
            prefill_attention(
                q_THD, self._descriptors[layer], self._table_RP, work, out_THD, num_kv_heads=num_kv
            )

        return attend

    def _flash4_chunks(self, flash4: Flash4, num_decode: int, chunks: ChunkArrays) -> Attend:
        bounds_C1 = np.concatenate([[0], np.cumsum(chunks.count_C)])
        row_C, bounds, lengths_C = self._send(
            chunks.row_C, bounds_C1, chunks.start_C + chunks.count_C
        )
        table_CP, longest = self._table_RP.index_select(0, row_C), int(chunks.count_C.max())

        def attend(layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
            pages = self.pool.layer(layer)
            out_THD[num_decode:] = flash4(
                q_THD[num_decode:], pages, table_CP, bounds, lengths_C, longest
            )

        return attend

    def _slabs(self, num_decode: int, chunks: ChunkArrays) -> Attend:
        row_T, position_T = chunks.rows_and_positions()
        slabs = cut_slabs(
            row_T, position_T, longest_tokens=self._context_tokens, device=self._table_RP.device
        )

        def attend(layer: int, q_THD: Tensor, out_THD: Tensor) -> None:
            for slab in slabs:
                span = slice(num_decode + slab.span.start, num_decode + slab.span.stop)
                self.decode(layer, q_THD[span], out_THD[span], slab.work)

        return attend

    def _send(self, *arrays: np.ndarray) -> list[Tensor]:
        return send(self._table_RP.device, *arrays)
