"""Decoder: one definition of Llama 3, Qwen2.5 and Qwen3 for trainer and engine. In: token ids and
positions, flat over tokens, and `attend`. Out: hidden states and logits.

The caller provides attention: `attend(layer, q_THD, k_TKD, v_TKD) -> out_THD` gets rotated heads
and knows the sequence boundaries. Everything else is per token, so the same code serves a packed
micro-batch and a decoding batch.
"""

# T tokens, E hidden size, H heads, K kv heads, D head dim, A = H·D, N rows, V vocabulary

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gyre.core.records import Checkpointing, Projection
from gyre.kernels.norm import rms_norm
from gyre.kernels.recompute import RecomputeLayer, RecomputeQK
from gyre.kernels.rope import rope_frequencies, rope_tables
from gyre.models.layers.blocks import attention_inputs, layer_output
from gyre.models.spec import ModelSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
NOTHING: frozenset[Projection] = frozenset()


Out = TypeVar("Out")


class Weights(nn.Module):
    """A named weight, with a bias where the family has one. A checkpoint or an initializer fills
    it."""

    bias: nn.Parameter | None

    def __init__(
        self, *shape: int, bias: bool = False, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        bias_R = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", bias_R)


class Head(Weights):
    """The projection to the vocabulary, where it is not tied to the embedding."""

    def forward(self, hidden_NE: Tensor, run: Callable[[Tensor, Tensor], Out]) -> Out:
        """Return run(hidden_NE, weight). Here the weight is whole, also where ranks hold shards of
        it."""
        return run(hidden_NE, self.weight)


class Layer(nn.Module):
    """One decoder layer: its parameters, and its two halves around attention."""

    def __init__(self, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        hidden, q_rows = spec.hidden_size, spec.num_heads * spec.head_dim
        kv_rows = spec.num_kv_heads * spec.head_dim
        make = partial(Weights, device=device, dtype=dtype)
        self.attn_norm = make(hidden)
        self.qkv = make(q_rows + 2 * kv_rows, hidden, bias=spec.qkv_bias)
        if spec.qk_norm:
            self.q_norm = make(spec.head_dim)
            self.k_norm = make(spec.head_dim)
        self.out = make(hidden, q_rows)
        self.mlp_norm = make(hidden)
        self.gate_up = make(2 * spec.mlp_size, hidden)
        self.down = make(hidden, spec.mlp_size)

    def forward(
        self,
        index: int,
        x_TE: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        attend: Attend,
        rows_N: Tensor | None,
        *,
        selective: bool = False,
        recompute: bool = False,
        float8: frozenset[Projection] = NOTHING,
    ) -> Tensor:
        """Return the residual stream after the layer, of `rows_N` only where given. `selective`,
        `recompute` and `float8` as in blocks."""
        spec, turned = self.spec, RecomputeQK() if selective else None
        x_TE, q_THD, k_TKD, v_TKD = attention_inputs(
            x_TE,
            self.attn_norm.weight,
            self.qkv.weight,
            self.qkv.bias,
            self.q_norm.weight if spec.qk_norm else None,
            self.k_norm.weight if spec.qk_norm else None,
            cos_T1D,
            sin_T1D,
            heads=(spec.num_heads, spec.num_kv_heads),
            eps=spec.norm_eps,
            recompute_qk=turned,
            float8=float8,
        )
        with turned.hooks(q_THD, k_TKD) if turned else contextlib.nullcontext():
            attended_TA = attend(index, q_THD, k_TKD, v_TKD).flatten(1)
        if rows_N is not None:
            x_TE, attended_TA = x_TE.index_select(0, rows_N), attended_TA.index_select(0, rows_N)
        return layer_output(
            x_TE,
            attended_TA,
            self.out.weight,
            self.mlp_norm.weight,
            self.gate_up.weight,
            self.down.weight,
            eps=spec.norm_eps,
            selective=selective,
            recompute=recompute,
            float8=float8,
        )

    def replayed(
        self,
        index: int,
        x_TE: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        attend: Attend,
        rows_N: Tensor | None,
        *,
        float8: frozenset[Projection] = NOTHING,
    ) -> Tensor:
        """Run like `forward`, but keep only x_TE; the backward pass recomputes the rest."""
        input_TE = x_TE.detach().requires_grad_(x_TE.requires_grad)
        rest = cos_T1D, sin_T1D, attend, rows_N
        with RecomputeLayer(
            lambda: self(index, input_TE, *rest, recompute=True, float8=float8)
        ).hooks():
            return self(index, x_TE, *rest, float8=float8)


class Decoder(nn.Module):
    """The whole model. Parameter names are those of `ModelSpec.parameter_shapes`; weights are
    uninitialized until `init_weights` or `load_hub`."""

    def __init__(self, spec: ModelSpec, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Weights(spec.vocab_size, spec.hidden_size, device=device, dtype=dtype)
        self.layers = nn.ModuleList(
            Layer(spec, device=device, dtype=dtype) for _ in range(spec.num_layers)
        )
        self.final_norm = Weights(spec.hidden_size, device=device, dtype=dtype)
        if not spec.tied:
            self.head = Head(spec.vocab_size, spec.hidden_size, device=device, dtype=dtype)
        # A float32 constant and no buffer, so that a change of dtype or a move of the weights
        # leaves it alone.
        self.inv_freq_F = rope_frequencies(
            spec.head_dim, spec.rope_theta, spec.rope_scaling, device
        )

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
        projection and MLP for the others. `checkpointing` selects what autograd keeps of each
        layer: everything the backward pass reads, only what is expensive to recompute, or the input
        alone. `float8` names the projections with 8-bit operands.
        """
        x_TE = F.embedding(tokens_T, self.embed.weight)
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
        return rms_norm(x_TE, self.final_norm.weight, self.spec.norm_eps)

    def through_head(self, hidden_NE: Tensor, run: Callable[[Tensor, Tensor], Out]) -> Out:
        """Return run(hidden_NE, head_weight_VE), after `hidden` has run. The result is a tensor or
        a tuple of tensors."""
        return run(hidden_NE, self.embed.weight) if self.spec.tied else self.head(hidden_NE, run)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits_NV in the compute dtype."""
        return F.linear(hidden_NE, self.head_weight)
