"""Paged attention: the KV pool, and attention of one step over it. In: a StepLayout. Out: `attend`
for the decoder.

Writes the step's keys and values to their slots, gathers each bucket's pages once, and attends by
two batched products. The mask and the scale are inside the first. Long prompts go through the fused
SDPA instead, which never materializes the scores. The same code serves CPU and CUDA.
"""

# T tokens, B sequences of a bucket, Q queries and L keys per sequence, H heads, K kv heads, G = H /
# K, D head dim

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.engine.kv_cache.pool import KvPool, to_device
from gyre.engine.runners.batch_layout import AttentionBucket, StepLayout
from gyre.kernels.tokenwise import attend_one

FUSED_QUERIES = 128  # from this many queries per sequence the scores are not held but fused


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketPlan:
    """One bucket's tensors, the same for every layer."""

    bucket: AttentionBucket
    gather: Tensor  # int64
    # int64, the token at each place (the bucket's first where padded); None when nothing is padded
    pad_BQ: Tensor | None
    unpad_T: Tensor | None  # int64, the place of each token
    # added to the scores: [B·K, Q or 1, L] for batched products, [B, 1, Q, L] for fused
    mask: Tensor | None
    window_mask: Tensor | None  # the same for windowed layers


def plan_bucket(
    bucket: AttentionBucket,
    *,
    group: int,
    num_kv_heads: int,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None = None,
) -> BucketPlan:
    pad_BQ = unpad_T = None
    if bucket.is_padded:
        place_Q = np.arange(bucket.queries)
        real_BQ = place_Q < bucket.counts_B[:, None]
        first_B = np.cumsum(bucket.counts_B) - bucket.counts_B
        pad_BQ = to_device(np.where(real_BQ, first_B[:, None] + place_Q, 0), device)
        unpad_T = to_device(np.flatnonzero(real_BQ), device)
    mask = window_mask = _make_mask(bucket, group, num_kv_heads, device, dtype, None)
    if window is not None and int(bucket.end_B.max()) > window:
        window_mask = _make_mask(bucket, group, num_kv_heads, device, dtype, window)
    return BucketPlan(
        bucket=bucket,
        gather=to_device(bucket.gather, device),
        pad_BQ=pad_BQ,
        unpad_T=unpad_T,
        mask=mask,
        window_mask=window_mask,
    )


def _make_mask(
    bucket: AttentionBucket,
    group: int,
    num_kv_heads: int,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None,
) -> Tensor | None:
    """Return 0 where a query may look and -inf elsewhere. Padded queries see what their place
    implies; their results are unused."""
    fused = is_fused(bucket)
    if fused and window is None and not bucket.start_B.any():
        return None  # plain causal: real keys come before padded ones
    key_L = torch.arange(bucket.keys, device=device)
    start_B11 = to_device(bucket.start_B, device)[:, None, None]
    query_BQ1 = start_B11 + torch.arange(bucket.queries, device=device)[:, None]
    seen_BQL = key_L <= query_BQ1
    if window is not None:
        seen_BQL &= key_L > query_BQ1 - window
    mask_BQL = torch.zeros(seen_BQL.shape, device=device, dtype=dtype).masked_fill_(
        ~seen_BQL, float("-inf")
    )
    if fused:
        return mask_BQL[:, None]
    if bucket.queries == 1:
        return mask_BQL.repeat_interleave(num_kv_heads, dim=0)
    wide = mask_BQL[:, None, None].expand(
        bucket.batch, num_kv_heads, group, bucket.queries, bucket.keys
    )
    return wide.reshape(bucket.batch * num_kv_heads, group * bucket.queries, bucket.keys)


def is_fused(bucket: AttentionBucket) -> bool:
    return bucket.queries >= FUSED_QUERIES


def make_attend(
    pool: KvPool,
    layout: StepLayout,
    *,
    num_heads: int,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None = None,
    first_window_layer: int = 0,
) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Return `attend(layer, q_THD, k_TKD, v_TKD) -> out_THD` for one step. With `window`, tokens
    see the newest so many tokens in the layers from `first_window_layer` on."""
    group = num_heads // pool.num_kv_heads
    write_2TK = to_device(layout.write_2TK, device)
    plans = [
        plan_bucket(
            bucket,
            group=group,
            num_kv_heads=pool.num_kv_heads,
            device=device,
            dtype=dtype,
            window=window,
        )
        for bucket in layout.buckets
    ]

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        pool.write(layer, k_TKD, v_TKD, write_2TK)
        windowed = layer >= first_window_layer
        if len(plans) == 1:
            return _attend_bucket(pool, layer, plans[0], q_THD, windowed)
        out_THD = torch.empty_like(q_THD)
        for plan in plans:
            span = slice(plan.bucket.first_token, plan.bucket.first_token + plan.bucket.num_tokens)
            out_THD[span] = _attend_bucket(pool, layer, plan, q_THD[span], windowed)
        return out_THD

    return attend


def make_token_attend(
    pool: KvPool, layout: StepLayout, *, device: torch.device
) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Return what `make_attend` does without windows. Each token attends by itself to the keys that
    it sees. So its bits depend neither on its bucket nor on how its prompt was cut."""
    write_2TK = to_device(layout.write_2TK, device)
    gathers = [(bucket, to_device(bucket.gather, device)) for bucket in layout.buckets]

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        pool.write(layer, k_TKD, v_TKD, write_2TK)
        out_THD, token = torch.empty_like(q_THD), 0
        for bucket, gather in gathers:
            shape = 2, bucket.batch, pool.num_kv_heads, bucket.keys, q_THD.shape[2]
            kv_2BKLD = pool.gather(layer, gather).view(shape)
            for place in range(bucket.batch):
                keys_KLD, values_KLD = kv_2BKLD[:, place]
                start, end = int(bucket.start_B[place]), int(bucket.end_B[place])
                for seen in range(start + 1, end + 1):
                    out_THD[token] = attend_one(
                        q_THD[token], keys_KLD[:, :seen], values_KLD[:, :seen]
                    )
                    token += 1
        return out_THD

    return attend


def _attend_bucket(
    pool: KvPool, layer: int, plan: BucketPlan, q_THD: Tensor, windowed: bool
) -> Tensor:
    bucket, num_kv, (_, num_heads, head_dim) = plan.bucket, pool.num_kv_heads, q_THD.shape
    mask = plan.window_mask if windowed else plan.mask
    batch, queries, group = bucket.batch, bucket.queries, num_heads // num_kv
    kv = pool.gather(layer, plan.gather).view(2, batch * num_kv, bucket.keys, head_dim)
    padded = q_THD if plan.pad_BQ is None else q_THD[plan.pad_BQ.view(-1)]
    if queries == 1:
        q = padded.reshape(batch * num_kv, group, head_dim)
        out = _attend_products(q, kv, mask, head_dim).view(batch, num_heads, head_dim)
    elif not is_fused(bucket):
        q_BKGQD = padded.reshape(batch, queries, num_kv, group, head_dim).permute(0, 2, 3, 1, 4)
        q = q_BKGQD.reshape(batch * num_kv, group * queries, head_dim)
        out_BKGQD = _attend_products(q, kv, mask, head_dim).view(
            batch, num_kv, group, queries, head_dim
        )
        out = out_BKGQD.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_dim)
    else:
        out = _attend_fused(padded.reshape(batch, queries, num_heads, head_dim), kv, mask)
    return out if plan.unpad_T is None else out[plan.unpad_T]


def _attend_products(q: Tensor, kv: Tensor, mask: Tensor | None, head_dim: int) -> Tensor:
    """Attend from q [B·K, G·Q, D] to kv [2, B·K, L, D]: two batched products and a softmax."""
    assert mask is not None
    scores = torch.baddbmm(mask, q, kv[0].transpose(1, 2), alpha=head_dim**-0.5)
    return torch.bmm(torch.softmax(scores, dim=-1), kv[1])


def _attend_fused(q_BQHD: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    batch, queries, num_heads, head_dim = q_BQHD.shape
    keys_BKLD, values_BKLD = kv.view(2, batch, -1, kv.shape[2], head_dim)
    if mask is None:
        keys_BKLD, values_BKLD = keys_BKLD[:, :, :queries], values_BKLD[:, :, :queries]
    out_BHQD = F.scaled_dot_product_attention(
        q_BQHD.transpose(1, 2),
        keys_BKLD,
        values_BKLD,
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return out_BHQD.transpose(1, 2).reshape(-1, num_heads, head_dim)
