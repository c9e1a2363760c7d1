"""FlashAttention-4 for prompt chunks, where the package flash-attn-4 is installed. In: queries, a layer's pages, a
block table. Out: attended heads. Callers: engine.gpu_attention, bench. It reads pages fastest when they are its key
tiles.
"""

# T tokens, C chunks, H heads, K kv heads, D head dim, P pages per row

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from torch import Tensor

PAGE_TOKENS = 128  # the kernel's key tile at head dims up to 128
HEAD_DIMS = (64, 128)

# (q_THD, pages, table_CP, bounds_C1, lengths_C, longest_chunk) → out_THD
Flash4 = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]


def find_flash4() -> Flash4 | None:
    """Return the kernel, or None where it is not installed. It compiles on its first call."""
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return None
    from flash_attn.cute import flash_attn_varlen_func  # an optional package

    def attend(
        q_THD: Tensor, pages: Tensor, table_CP: Tensor, bounds_C1: Tensor, lengths_C: Tensor, longest_chunk: int
    ) -> Tensor:
        """Chunk c holds the last queries of a sequence of lengths_C[c] keys."""
        result = flash_attn_varlen_func(
            q_THD,
            pages[:, 0].transpose(1, 2),
            pages[:, 1].transpose(1, 2),
            cu_seqlens_q=bounds_C1,
            seqused_k=lengths_C,
            page_table=table_CP,
            max_seqlen_q=longest_chunk,
            causal=True,
        )
        return result[0] if isinstance(result, tuple) else result

    return attend
