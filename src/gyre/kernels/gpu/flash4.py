"""FlashAttention-4, where the package flash-attn-4 is installed. For prompt chunks: queries, a
layer's pages and a block table in, attended heads out. It is fastest when the page size is its key
tile. For training: packed sequences in, attended heads out, under autograd."""

# T tokens, C chunks, H heads, K kv heads, D head dim, P pages per row

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from torch import Tensor

PAGE_TOKENS = 128  # the kernel's key tile at head dims up to 128
HEAD_DIMS = (64, 128)
TRAINING_CAPABILITIES = (9, 10)  # major compute capabilities whose backward kernels we know

# (q_THD, pages, table_CP, bounds_C1, lengths_C, longest_chunk) → out_THD
Flash4 = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]

# (q_THD, k_TKD, v_TKD, offsets, bound of a sequence) → out_THD, under autograd
TrainingFlash4 = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def is_installed() -> bool:
    return (
        importlib.util.find_spec("flash_attn") is not None
        and importlib.util.find_spec("flash_attn.cute") is not None
    )


def find_flash4() -> Flash4 | None:
    """Return the kernel, or None where it is not installed. It compiles on its first call."""
    if not is_installed():
        return None
    from flash_attn.cute import flash_attn_varlen_func  # an optional package

    def attend(
        q_THD: Tensor,
        pages: Tensor,
        table_CP: Tensor,
        bounds_C1: Tensor,
        lengths_C: Tensor,
        longest_chunk: int,
    ) -> Tensor:
        """Attend. Chunk c holds the last queries of a sequence of lengths_C[c] keys."""
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


def make_training_flash4() -> TrainingFlash4:
    """Return causal attention within each packed sequence. It compiles on its first call."""
    from flash_attn.cute import flash_attn_varlen_func  # an optional package

    def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, offsets: Tensor, bound: int) -> Tensor:
        """Attend. No sequence is longer than `bound`."""
        found = flash_attn_varlen_func(
            q_THD,
            k_TKD,
            v_TKD,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=bound,
            max_seqlen_k=bound,
            causal=True,
        )
        return found[0] if isinstance(found, tuple) else found

    return attend
