"""Decoder: one definition of Llama 3, Qwen2.5 and Qwen3 for trainer and engine. In: token ids and
positions, flat over tokens, and `attend`. Out: hidden states; logits, or a critic's values.

The caller provides attention: `attend(layer, q_THD, k_TKD, v_TKD) -> out_THD` gets rotated heads
and knows the sequence boundaries. Everything else is per token, so the same code serves a packed
micro-batch and a decoding batch.
"""

# T tokens, E hidden size, H heads, K kv heads, D head dim, N rows, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre.core.records import Checkpointing, Projection
from gyre.kernels.norm import rms_norm
from gyre.kernels.rope import rope_frequencies, rope_tables
from gyre.models.layers.layer import NOTHING, Attend, Layer, Weights
from gyre.models.layers.tensor_parallel import TensorParallel, padded_rows, whole_rows
from gyre.models.layers.vocabulary import embedded, joined_logits, without_padding
from gyre.models.layout import local_spec
from gyre.models.spec import ModelSpec

Out = TypeVar("Out")


class Head(Weights):
    """The projection to the vocabulary, where it is not tied to the embedding."""

    def forward(self, hidden_NE: Tensor, run: Callable[[Tensor, Tensor], Out]) -> Out:
        """Return run(hidden_NE, weight). Here the weight is whole, also where ranks hold shards of
        it."""
        return run(hidden_NE, self.weight)


class ScalarHead(nn.Module):
    """The head of a critic or a reward model: a [1, E] projection in float32. It is zero at first,
    so a new one returns 0."""

    def __init__(self, hidden_size: int, *, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=device, dtype=torch.float32))

    def forward(self, hidden_NE: Tensor) -> Tensor:
        """Return one number per row, values_N in float32."""
        return (hidden_NE.float() @ self.weight.t()).squeeze(-1)


class Decoder(nn.Module):
    """The whole model, or what one rank of the tensor axis holds of it. Parameter names are those
    of `ModelSpec.parameter_shapes`; weights are uninitialized until `init_weights` or `load_hub`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        tensor: TensorParallel | None = None,
    ) -> None:
        """Make the parameters. `spec` is of the whole model, of which `tensor` joins the ranks."""
        super().__init__()
        self.whole_spec = spec
        self.tensor = tensor
        self.spec = spec if tensor is None else local_spec(spec, tensor.group.size)
        spec = self.spec  # of what this rank holds
        self.embed = Weights(spec.vocab_size, spec.hidden_size, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            Layer(spec, device=device, dtype=dtype, tensor=tensor) for _ in range(spec.num_layers)
        )
        self.final_norm = Weights(spec.hidden_size, device=device, dtype=dtype)
        if not spec.tied:
            self.head = Head(spec.vocab_size, spec.hidden_size, device=device, dtype=dtype)
        # A float32 constant and no buffer, so that a change of dtype or a move of the weights
        # leaves it alone.
        # Arithmetic on the meta device would import torch's compiler.
        made_on = torch.device("cpu") if device.type == "meta" else device
        self.inv_freq_F = rope_frequencies(
            spec.head_dim, spec.rope_theta, spec.rope_scaling, made_on
        ).to(device)

    def sharing(self, tensor: TensorParallel) -> Decoder:
        """Return a decoder of the same parameters, with another division of rows over the ranks."""
        assert self.tensor is not None and self.tensor.group.size == tensor.group.size
        other = Decoder(
            self.whole_spec, device=torch.device("meta"), dtype=self.dtype, tensor=tensor
        )
        for name, module in other.named_modules():
            own = self.get_submodule(name)
            for key in dict(module.named_parameters(recurse=False)):
                module.register_parameter(key, own.get_parameter(key))
        other.inv_freq_F = self.inv_freq_F
        return other

    @property
    def head_weight(self) -> nn.Parameter:
        """[V, E] projection to the vocabulary; the embedding itself when tied."""
        return self.embed.weight if self.spec.tied else self.head.weight

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    def embedded(self, tokens_T: Tensor) -> Tensor:
        """Return the residual stream before the first layer, this rank's rows of it."""
        return embedded(tokens_T, self.embed.weight, self.tensor)

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        rows_N: Tensor | None = None,
        *,
        checkpointing: Checkpointing = "none",
        float8: frozenset[Projection] = NOTHING,
    ) -> Tensor:
        """Return hidden_TE with the final norm applied.

        With `rows_N`, returns hidden_NE of these tokens only and skips the last layer's output
        projection and MLP for the others. Every rank of `tensor` gets all rows, and must give them
        the same gradient; where ranks split the rows, the tokens must divide. `checkpointing`
        selects what autograd keeps of each layer: everything the backward pass reads, only what is
        expensive to recompute, or the input alone. `float8` names the projections with 8-bit
        operands.
        """
        num_rows = len(tokens_T if rows_N is None else rows_N)
        rows_N = None if rows_N is None else padded_rows(rows_N, self.tensor)
        x_TE = self.embedded(tokens_T)
        cos_T1D, sin_T1D = rope_tables(positions_T, self.inv_freq_F, x_TE.dtype)
        last, full = len(self.layers) - 1, checkpointing == "full" and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            inputs = index, x_TE, cos_T1D, sin_T1D, attend, rows_N if index == last else None
            selective = checkpointing == "selective"
            x_TE = (
                layer.replayed(*inputs, float8=float8)
                if full
                else layer(*inputs, selective=selective, float8=float8)
            )
        hidden_NE = rms_norm(x_TE, self.final_norm.weight, self.spec.norm_eps)
        return whole_rows(hidden_NE, num_rows, self.tensor)

    def through_head(self, hidden_NE: Tensor, run: Callable[[Tensor, Tensor], Out]) -> Out:
        """Return run(hidden_NE, head_weight_VE), after `hidden` has run. The result is a tensor or
        a tuple of tensors."""
        return run(hidden_NE, self.embed.weight) if self.spec.tied else self.head(hidden_NE, run)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits_NV of the whole vocabulary in the compute dtype."""
        return self.joined_logits(F.linear(hidden_NE, self.head_weight))

    def own_logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits_NV of this rank's part of the vocabulary; padding is -inf."""
        return self.without_padding(F.linear(hidden_NE, self.head_weight))

    def without_padding(self, own_NV: Tensor) -> Tensor:
        """Return logits of this rank's part, in place -inf where they are padding."""
        return without_padding(own_NV, self.whole_spec.vocab_size, self.tensor)

    def joined_logits(self, own_NV: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary, of those of this rank's part."""
        return joined_logits(own_NV, self.whole_spec.vocab_size, self.tensor)
