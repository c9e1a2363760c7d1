"""Recompute: log-probs from an alternative forward pass, with the decoder's own gradients. In: a
Decoder, a micro-batch, a ChunkForward. Out: (logprobs_N, entropy_N) of the micro-batch's targets.

The forward pass keeps only each layer's input. The backward pass recomputes the layer from that
input by the decoder's definition, and differentiates it. The result is the ordinary gradient at the
alternative activations, with the memory of full activation checkpointing (Chen et al. 2016, arXiv
1604.06174).
"""

# T tokens, N targets, E hidden size, H heads, K kv heads, D head dim, X of any shape

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre.kernels.attention import varlen_attention
from gyre.kernels.logprobs import logprobs_by
from gyre.kernels.norm import rms_norm
from gyre.kernels.rope import rope_tables
from gyre.models.decoder import Decoder
from gyre.models.layers.tensor_parallel import padded_rows, selected_rows, whole_rows
from gyre.models.layers.vocabulary_logprobs import vocabulary_logprobs_by
from gyre.trainer.batching.microbatch import MicroBatch

Step = Callable[[Tensor], Tensor]


class ChunkForward(Protocol):
    """The forward pass of one decoder over one micro-batch, without autograd. Results are new
    tensors. Over tensor ranks a layer and the final norm take and give this rank's rows, log-probs
    are of all targets."""

    def layer(self, index: int, x_TE: Tensor) -> Tensor:
        """Return the residual stream after a layer."""
        ...

    def final_norm(self, x_NE: Tensor) -> Tensor: ...

    def logprobs(self, hidden_NE: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logprobs_N, the log of each softmax's sum of exponentials (of logits after
        temperature), entropy_N."""
        ...


def recomputed_logprobs(
    decoder: Decoder, chunk: MicroBatch, forward: ChunkForward
) -> tuple[Tensor, Tensor]:
    """Return (logprobs_N, entropy_N) as `forward` computes them. The micro-batch has no
    truncation."""
    assert chunk.support is None, "runconfig refuses truncation together with this"
    x_TE, tensor = decoder.embedded(chunk.tokens_T), decoder.tensor
    cos_T1D, sin_T1D = rope_tables(chunk.layout.positions_T, decoder.inv_freq_F, x_TE.dtype)

    def attend(index: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return varlen_attention(q_THD, k_TKD, v_TKD, chunk.layout, decoder.spec.window_of(index))

    def plain(index: int, x_TE: Tensor) -> Tensor:
        return decoder.layers[index](index, x_TE, cos_T1D, sin_T1D, attend, None)

    for index, layer in enumerate(decoder.layers):
        x_TE = _recomputed(
            partial(forward.layer, index), partial(plain, index), x_TE, *layer.parameters()
        )
    norm_E, eps = decoder.final_norm.weight, decoder.spec.norm_eps
    x_NE = selected_rows(x_TE, padded_rows(chunk.rows_N, tensor), tensor)
    hidden_NE = _recomputed(
        forward.final_norm, lambda x_NE: rms_norm(x_NE, norm_E, eps), x_NE, norm_E
    )
    hidden_NE = whole_rows(hidden_NE, len(chunk.rows_N), tensor)
    given = hidden_NE, decoder.head_weight, chunk.targets_N, chunk.temperature_N
    if tensor is None:
        return logprobs_by(forward.logprobs, *given)
    vocab_size = decoder.whole_spec.vocab_size
    return vocabulary_logprobs_by(forward.logprobs, *given, vocab_size=vocab_size, tensor=tensor)


def _recomputed(run: Step, plain: Step, x_X: Tensor, *parameters: Tensor) -> Tensor:
    """Return run(x) with the gradients of plain(x) with respect to x and `parameters`."""
    return Recomputed.apply(run, plain, x_X, *parameters)


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Step, plain: Step, x_X: Tensor, *parameters: Tensor) -> Tensor:
        ctx.plain, ctx.parameters = plain, parameters
        ctx.save_for_backward(x_X)
        return run(x_X)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x_X = ctx.saved_tensors[0].detach().requires_grad_()
            y_X = ctx.plain(x_X)
        wanted = [tensor for tensor in (x_X, *ctx.parameters) if tensor.requires_grad]
        found = iter(torch.autograd.grad(y_X, wanted, grads[0]))
        return (
            None,
            None,
            *(next(found) if tensor.requires_grad else None for tensor in (x_X, *ctx.parameters)),
        )
