"""Causal attention within each of the sequences packed into one row. In: q, k, v over packed
tokens, a PackedLayout. Out: attended values.

CPU: C kernels attend in the packed layout. Without them the scores of a padded bucket are plain
batched products and one softmax, by blocks of queries to bound their size. In bfloat16 that is
several times faster than torch's fused CPU kernel, forward and backward. CUDA: the kernels of
flash.py, or those products on unsupported devices. Padding follows its sequence, so causality hides
it from real tokens.
"""

# T packed tokens, H heads, K kv heads, G = H/K, D head dim, B sequences of a bucket, L its padded
# length, P slots, S = B·K, X = G·queries of a block, C keys that the block sees

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.core.rounding import ceil_div
from gyre.kernels.cpu.chunks import chunks_for
from gyre.kernels.dispatch import CUDA_DTYPES, WHOLE_HEAD, why_too_old
from gyre.kernels.flash import flash_attention
from gyre.kernels.layout import KEEP_TOKENS, QUERY_BLOCK, PackedLayout

__all__ = ["PackedLayout", "varlen_attention"]


def varlen_attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: PackedLayout, window: int | None = None
) -> Tensor:
    """Attend causally within each sequence; scale 1/√D. With `window` a token attends to that many
    newest tokens, including itself."""
    assert len(q_THD) == layout.num_tokens, (len(q_THD), layout.num_tokens)
    if layout.num_tokens == 0:
        return q_THD
    if q_THD.is_cuda and q_THD.dtype in CUDA_DTYPES and why_too_old(q_THD.device) is None:
        return flash_attention(q_THD, k_TKD, v_TKD, layout, window)
    sees_all = window is None or window >= max(layout.lengths)
    if (
        sees_all
        and chunks_for(q_THD, q_THD.shape[2], unit=WHOLE_HEAD)
        and q_THD.dtype == k_TKD.dtype == v_TKD.dtype
    ):
        return PackedAttention.apply(q_THD, k_TKD, v_TKD, layout)
    return BucketedAttention.apply(q_THD, k_TKD, v_TKD, layout, window)


class PackedAttention(torch.autograd.Function):
    """Attention by the C kernels, in the packed layout. Keeps one number per query and head for the
    backward pass."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: PackedLayout
    ) -> Tensor:
        kernels = chunks_for(q_THD)
        assert kernels is not None
        q_THD, k_TKD = q_THD.contiguous(), k_TKD.contiguous()
        if v_TKD.stride()[1:] != (v_TKD.shape[2], 1):
            v_TKD = v_TKD.contiguous()
        out_THD, log_total_TH = kernels.attention(
            q_THD, k_TKD, v_TKD, layout.offsets, max(layout.lengths)
        )
        ctx.layout = layout
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, log_total_TH)
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kernels = chunks_for(grads[0])
        assert kernels is not None
        q_THD, k_TKD, v_TKD, out_THD, log_total_TH = ctx.saved_tensors
        offsets, longest = ctx.layout.offsets, max(ctx.layout.lengths)
        found = kernels.attention_backward(
            grads[0], q_THD, k_TKD, v_TKD, out_THD, log_total_TH, offsets, longest
        )
        return *found, None


class BucketedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        layout: PackedLayout,
        window: int | None,
    ) -> Tensor:
        q_PHD, k_PKD, v_PKD = (into_slots(x, layout) for x in (q_THD, k_TKD, v_TKD))
        out_PHD = torch.empty_like(q_PHD)
        saved: list[Tensor] = []
        counts: list[int] = []  # of tensors saved for each bucket
        for slots, batch in bucket_slices(layout):
            q_SGLD, k_SLD, v_SLD = arrange(q_PHD[slots], k_PKD[slots], v_PKD[slots], batch)
            out_SGLD, probabilities = attend(q_SGLD, k_SLD, v_SLD, window)
            out_PHD[slots].view(batch, -1, *q_THD.shape[1:]).copy_(heads_last(out_SGLD, batch))
            saved += [q_SGLD, k_SLD, v_SLD, *probabilities]
            counts.append(3 + len(probabilities))
        ctx.layout, ctx.counts, ctx.window = layout, counts, window
        ctx.save_for_backward(*saved)
        return out_of_slots(out_PHD, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layout: PackedLayout = ctx.layout
        saved = iter(ctx.saved_tensors)
        grad_out_PHD = into_slots_or_zero(grads[0], layout)
        parts: list[list[Tensor]] = []
        for (slots, batch), count in zip(bucket_slices(layout), ctx.counts, strict=True):
            q_SGLD, k_SLD, v_SLD, *probabilities = itertools.islice(saved, count)
            grad_out_SGLD = heads_first(grad_out_PHD[slots], batch, len(k_SLD) // batch)
            grads_SLD = attend_backward(
                grad_out_SGLD, q_SGLD, k_SLD, v_SLD, probabilities, ctx.window
            )
            parts.append([heads_last(grad, batch).flatten(0, 1) for grad in grads_SLD])
        return (
            *(out_of_slots(torch.cat(columns), layout) for columns in zip(*parts, strict=True)),
            None,
            None,
        )


def attend(
    q_SGLD: Tensor, k_SLD: Tensor, v_SLD: Tensor, window: int | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the attended values of one bucket, and its probabilities by block where they are small
    enough to keep for the backward pass."""
    out_SGLD = torch.empty_like(q_SGLD)
    probabilities: list[Tensor] = []
    for start, stop in query_blocks(q_SGLD.shape[2]):
        probabilities_SXC = attention_probabilities(
            q_SGLD[:, :, start:stop], k_SLD[:, :stop], start, window
        )
        out_SXD = probabilities_SXC @ v_SLD[:, :stop]
        out_SGLD[:, :, start:stop] = out_SXD.view(len(k_SLD), q_SGLD.shape[1], stop - start, -1)
        if q_SGLD.shape[2] <= KEEP_TOKENS:
            probabilities.append(probabilities_SXC)
    return out_SGLD, probabilities


def attend_backward(
    grad_out_SGLD: Tensor,
    q_SGLD: Tensor,
    k_SLD: Tensor,
    v_SLD: Tensor,
    probabilities: list[Tensor],
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q_SGLD, k_SLD and v_SLD. Recomputes probabilities that were not
    kept."""
    grad_q_SGLD, grad_k_SLD, grad_v_SLD = (
        torch.empty_like(q_SGLD),
        torch.empty_like(k_SLD),
        torch.empty_like(v_SLD),
    )
    scale, num_keys = q_SGLD.shape[-1] ** -0.5, k_SLD.shape[1]
    # The last block sees all keys and so writes the whole of grad_k and grad_v; those before it add
    # to their keys.
    for number, (start, stop) in reversed(list(enumerate(query_blocks(num_keys)))):
        beta = 0 if stop == num_keys else 1
        q_SXD, grad_SXD = (
            q_SGLD[:, :, start:stop].flatten(1, 2),
            grad_out_SGLD[:, :, start:stop].flatten(1, 2),
        )
        k_SCD, v_SCD = k_SLD[:, :stop], v_SLD[:, :stop]
        if probabilities:
            p_SXC = probabilities[number]
        else:
            p_SXC = attention_probabilities(q_SGLD[:, :, start:stop], k_SCD, start, window)
        grad_v_SLD[:, :stop].baddbmm_(p_SXC.mT, grad_SXD, beta=beta)
        grad_s_SXC = torch.ops.aten._softmax_backward_data(
            grad_SXD @ v_SCD.mT, p_SXC, -1, p_SXC.dtype
        )
        grad_k_SLD[:, :stop].baddbmm_(grad_s_SXC.mT, q_SXD, beta=beta, alpha=scale)
        grad_q_SXD = torch.baddbmm(q_SXD, grad_s_SXC, k_SCD, beta=0, alpha=scale)
        grad_q_SGLD[:, :, start:stop] = grad_q_SXD.view_as(grad_q_SGLD[:, :, start:stop])
    return grad_q_SGLD, grad_k_SLD, grad_v_SLD


def attention_probabilities(
    q_SGQD: Tensor, k_SCD: Tensor, start: int, window: int | None
) -> Tensor:
    """Return the softmax over keys of queries that begin at position `start`."""
    group, num_queries = q_SGQD.shape[1:3]
    hidden_QC = torch.full(
        (num_queries, k_SCD.shape[1]), float("-inf"), dtype=k_SCD.dtype, device=k_SCD.device
    )
    mask_QC = hidden_QC.triu(start + 1)
    if window is not None:
        mask_QC += hidden_QC.tril_(start - window)
    mask_1XC = mask_QC.repeat(group, 1)[None]
    scores_SXC = torch.baddbmm(
        mask_1XC, q_SGQD.flatten(1, 2), k_SCD.mT, alpha=q_SGQD.shape[-1] ** -0.5
    )
    return torch.softmax(scores_SXC, -1)


def query_blocks(length: int) -> Iterator[tuple[int, int]]:
    """Yield even blocks of at most QUERY_BLOCK queries."""
    count = ceil_div(length, QUERY_BLOCK)
    size = ceil_div(length, count)
    return ((start, min(start + size, length)) for start in range(0, length, size))


def bucket_slices(layout: PackedLayout) -> Iterator[tuple[slice, int]]:
    """Yield for each bucket its slots and its number of sequences."""
    base = 0
    for batch, length in layout.buckets:
        yield slice(base, base + batch * length), batch
        base += batch * length


def into_slots(x_THD: Tensor, layout: PackedLayout) -> Tensor:
    return (
        x_THD if layout.token_of_slot_P is None else x_THD.index_select(0, layout.token_of_slot_P)
    )


def into_slots_or_zero(x_THD: Tensor, layout: PackedLayout) -> Tensor:
    """Scatter like into_slots, with zeros in the padding: padding contributes to no gradient."""
    if layout.token_of_slot_P is None or layout.slot_of_token_T is None:
        return x_THD
    return x_THD.new_zeros(len(layout.token_of_slot_P), *x_THD.shape[1:]).index_copy_(
        0, layout.slot_of_token_T, x_THD
    )


def out_of_slots(x_PHD: Tensor, layout: PackedLayout) -> Tensor:
    return (
        x_PHD if layout.slot_of_token_T is None else x_PHD.index_select(0, layout.slot_of_token_T)
    )


def arrange(
    q_PHD: Tensor, k_PKD: Tensor, v_PKD: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a bucket with heads before tokens, contiguous."""
    num_kv_heads = k_PKD.shape[1]
    k_SLD, v_SLD = (heads_first(x, batch, num_kv_heads).squeeze(1) for x in (k_PKD, v_PKD))
    return heads_first(q_PHD, batch, num_kv_heads), k_SLD, v_SLD


def heads_first(x_PHD: Tensor, batch: int, num_kv_heads: int) -> Tensor:
    """Transpose [B·L, K·G, D] to [B·K, G, L, D]."""
    x_BLKGD = x_PHD.view(batch, -1, num_kv_heads, x_PHD.shape[1] // num_kv_heads, x_PHD.shape[2])
    return x_BLKGD.permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous()


def heads_last(x_SGLD: Tensor, batch: int) -> Tensor:
    """Transpose [B·K, G, L, D] (or [B·K, L, D]) to [B, L, K·G, D]."""
    return x_SGLD.reshape(batch, -1, *x_SGLD.shape[-2:]).transpose(1, 2)
