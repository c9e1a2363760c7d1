"""Vocabulary: embedding and logits where each rank holds some rows of the vocabulary. In: tokens,
this rank's rows of the embedding; its logits. Out: rows of the residual stream; logits, this rank's
or whole.
"""

# T tokens, E hidden size, N rows, V vocabulary: a rank's own, or the whole

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.models.layers.tensor_parallel import TensorParallel, reduced_rows


def embedded(tokens_T: Tensor, weight_VE: Tensor, tensor: TensorParallel | None) -> Tensor:
    """Return the tokens' rows of the embedding. A rank contributes zeros for tokens of others, so
    the sum over ranks is exact."""
    if tensor is None:
        return F.embedding(tokens_T, weight_VE)
    own_T = tokens_T - tensor.group.rank * len(weight_VE)
    elsewhere_T = (own_T < 0) | (own_T >= len(weight_VE))
    rows_TE = F.embedding(own_T.masked_fill(elsewhere_T, 0), weight_VE)
    return reduced_rows(rows_TE.masked_fill(elsewhere_T[:, None], 0.0), tensor)


def without_padding(own_NV: Tensor, vocab_size: int, tensor: TensorParallel | None) -> Tensor:
    """Return this rank's logits, in place -inf where they are the last ranks' padding."""
    if tensor is not None:
        first = tensor.group.rank * own_NV.shape[1]
        own_NV[:, max(0, vocab_size - first) :] = -torch.inf
    return own_NV


def joined_logits(own_NV: Tensor, vocab_size: int, tensor: TensorParallel | None) -> Tensor:
    """Return the logits of all ranks side by side, without the last ranks' padding. Not
    differentiable."""
    if tensor is None:
        return own_NV
    (rows, own), ranks = own_NV.shape, tensor.group.size
    gathered_SNV = own_NV.new_empty(ranks, rows, own)
    tensor.group.all_gather(gathered_SNV.view(ranks * rows, own), own_NV.contiguous())
    return gathered_SNV.transpose(0, 1).reshape(rows, ranks * own)[:, :vocab_size].contiguous()
