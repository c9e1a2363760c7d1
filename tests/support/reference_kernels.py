"""Reference: the plain PyTorch version of every kernel. Slow and obvious; the oracle in tests. Any
dtype, float64 too."""

# T packed tokens, E hidden, M mlp, H heads, K kv heads, D head dim, F = D/2, N rows, V vocabulary

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    return x_TE * (x_TE.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight_E


def rope(x_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Rotate the pairs (d, d + D/2) of each head, the hub's convention."""
    first, second = x_THD.chunk(2, dim=-1)
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def silu_mul(gate_up_T2M: Tensor) -> Tensor:
    gate_TM, up_TM = gate_up_T2M.chunk(2, dim=-1)
    return F.silu(gate_TM) * up_TM


def varlen_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Attend causally within each of the packed sequences, one at a time."""
    group = q_THD.shape[1] // k_TKD.shape[1]
    outs = []
    for q, k, v in zip(*(x.split(list(lengths)) for x in (q_THD, k_TKD, v_TKD)), strict=True):
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        outs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), v)
        )
    return torch.cat(outs) if outs else torch.empty_like(q_THD)


def token_logprobs(
    hidden_NE: Tensor,
    head_weight_VE: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    support: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (log-prob of each target, entropy), both of the distribution after temperature and
    truncation."""
    logits_NV = (hidden_NE @ head_weight_VE.t()) / temperature_N[:, None]
    if support is not None:
        offsets, ids = support
        allowed_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
        rows = torch.repeat_interleave(torch.arange(len(logits_NV)), offsets.diff())
        allowed_NV[rows, ids.long()] = True
        logits_NV = logits_NV.masked_fill(~allowed_NV, float("-inf"))
    logprobs_NV = logits_NV.log_softmax(-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV.masked_fill(logprobs_NV.isinf(), 0.0)).sum(-1)
    return logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1), entropy_N


def paged_attention(
    q_THD: Tensor,
    pages: Tensor,
    table_RP: Tensor,
    row_C: Sequence[int],
    start_C: Sequence[int],
    count_C: Sequence[int],
) -> Tensor:
    """Attend chunk by chunk: query i of a chunk stands at position start + i and sees the row's
    keys up to there. `pages` is [page, 2, K, page_tokens, D]."""
    outs, first = [], 0
    group = q_THD.shape[1] // pages.shape[2]
    for row, start, count in zip(row_C, start_C, count_C, strict=True):
        q = q_THD[first : first + count]
        first += count
        held = pages[table_RP[row, : -(-(start + count) // pages.shape[3])].long()]
        k, v = (
            held.permute(1, 0, 3, 2, 4)
            .flatten(1, 2)[:, : start + count]
            .repeat_interleave(group, dim=2)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        position = torch.arange(start, start + count, device=q.device)
        hidden = torch.arange(start + count, device=q.device) > position[:, None]
        outs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        )
    return torch.cat(outs)
