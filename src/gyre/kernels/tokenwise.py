"""Token by token: products, attention and log-probs in torch whose bits for a token do not depend
on other tokens. In: rows of activations, a weight; a token's query with the keys that it sees;
logits. Out: what torch's own give, added in one order. Oracle: torch.nn.functional.linear, softmax.

A library's product may add in another order for another number of rows, another address or another
number of threads. Here a row is multiplied number by number and summed by torch's reduction, which
does not: it never splits a sum over threads. That reads each weight once per row. So this serves
where no kernel of ours has a fixed order: several ranks on a CPU.
"""

# T tokens, I input features, O output features, K kv heads, G query heads of each, L keys, D head
# dim, N rows of logits, V vocabulary

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def by_token(function: Callable[..., Tensor], *tensors_T: Tensor) -> Tensor:
    """Return the rows of function(…), called with one row of each tensor at a time: each call has
    the same shapes, whatever the other rows are."""
    assert len(tensors_T[0]), "no row says how wide the result is"
    rows = zip(*(x_T.split(1) for x_T in tensors_T), strict=True)
    return torch.cat([function(*(row.contiguous() for row in each)) for each in rows])


def linear_by_token(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ (+ bias), summed in float32 and rounded once."""
    wide_OI = weight_OI.float()
    more_O = None if bias_O is None else bias_O.float()

    def product(x_1I: Tensor) -> Tensor:
        y_O = (wide_OI * x_1I.float()).sum(1)
        return (y_O if more_O is None else y_O + more_O).to(x_1I.dtype)[None]

    return by_token(product, x_TI) if len(x_TI) else x_TI.new_empty(0, len(weight_OI))


def attend_one(q_HD: Tensor, k_KLD: Tensor, v_KLD: Tensor) -> Tensor:
    """Return the attended values of one token, which sees all keys; in float32, rounded once."""
    k_KLD, v_KLD = k_KLD.float().contiguous(), v_KLD.float().contiguous()
    q_KGD = q_HD.float().contiguous().view(len(k_KLD), -1, q_HD.shape[1])
    scores_KGL = (q_KGD[:, :, None] * k_KLD[:, None]).sum(-1) * q_HD.shape[1] ** -0.5
    weights_KGL = torch.softmax(scores_KGL, -1)
    return (weights_KGL[..., None] * v_KLD[:, None]).sum(2).to(q_HD.dtype).view(q_HD.shape)


def drawn_logprobs(
    logits_NV: Tensor, inverse_temperature_N: Tensor, targets_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return float32 logprobs_N of given tokens as the engine's sampler gives those that it draws
    without truncation; log of the sum of exponentials, and entropy."""
    scaled_NV = logits_NV.float() * inverse_temperature_N[:, None]
    best_N1 = scaled_NV.amax(dim=-1, keepdim=True)
    weights_NV = torch.exp(scaled_NV - best_N1)
    total_N1 = weights_NV.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    logprobs_N1 = torch.log(weights_NV.gather(-1, targets_N[:, None]) / total_N1)
    log_total_N1 = torch.log(total_N1) + best_N1
    below_NV = scaled_NV - log_total_N1
    entropy_N = -(below_NV.exp() * below_NV).sum(-1)
    return logprobs_N1[:, 0].float(), log_total_N1[:, 0].float(), entropy_N.float()
