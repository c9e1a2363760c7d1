"""Layer: one decoder layer, its parameters and what is around attention. In: the residual stream,
rotary tables, `attend`. Out: the residual stream after the layer.
"""

# T tokens, E hidden size, N rows, R rows of a weight, D head dim

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from gyre.core.records import Projection
from gyre.kernels.float8 import Amax
from gyre.kernels.recompute import RecomputeLayer, RecomputeQK
from gyre.models.layers.blocks import attention_inputs, attention_output
from gyre.models.layers.mlp import mlp
from gyre.models.layers.tensor_parallel import TensorParallel, selected_rows
from gyre.models.spec import ModelSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
NOTHING: frozenset[Projection] = frozenset()


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


MakeWeights = Callable[..., Weights]


class Layer(nn.Module):
    """A decoder layer with the dense MLP. One with another MLP overrides `make_mlp` and `mlp`."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        tensor: TensorParallel | None = None,
    ) -> None:
        """Make the parameters. `spec` is of the local model where `tensor` joins several ranks."""
        super().__init__()
        self.spec = spec
        self.tensor = tensor
        hidden = spec.hidden_size
        q_rows = spec.num_heads * spec.head_dim
        kv_rows = spec.num_kv_heads * spec.head_dim
        make = partial(Weights, device=device, dtype=dtype)
        self.attn_norm = make(hidden)
        self.qkv = make(q_rows + 2 * kv_rows, hidden, bias=spec.qkv_bias)
        if spec.qk_norm:
            self.q_norm = make(spec.head_dim)
            self.k_norm = make(spec.head_dim)
        self.out = make(hidden, q_rows)
        self.mlp_norm = make(hidden)
        self.make_mlp(make)

    def make_mlp(self, make: MakeWeights) -> None:
        """Make the parameters of the MLP."""
        self.gate_up = make(2 * self.spec.mlp_size, self.spec.hidden_size)
        self.down = make(self.spec.hidden_size, self.spec.mlp_size)

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
        """Return the residual stream after the layer, of `rows_N` only where given: as many as
        divide over ranks that split them. `selective`, `recompute` and `float8` as in blocks."""
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
            tensor=self.tensor,
        )
        with turned.hooks(q_THD, k_TKD) if turned else contextlib.nullcontext():
            attended_TA = attend(index, q_THD, k_TKD, v_TKD).flatten(1)
        if rows_N is not None:
            x_TE = selected_rows(x_TE, rows_N, self.tensor)
            attended_TA = attended_TA.index_select(0, rows_N)
        amax = Amax() if "out" in float8 else None
        x_TE = attention_output(
            x_TE,
            attended_TA,
            self.out.weight,
            float8=float8,
            grad_amax=amax,
            tensor=self.tensor,
        )
        return self.mlp(
            x_TE, selective=selective, recompute=recompute, float8=float8, grad_amax=amax
        )

    def mlp(
        self,
        x_TE: Tensor,
        *,
        selective: bool,
        recompute: bool,
        float8: frozenset[Projection],
        grad_amax: Amax | None,
    ) -> Tensor:
        """Return the residual stream after the layer, of the one after attention."""
        return mlp(
            x_TE,
            self.mlp_norm.weight,
            self.gate_up.weight,
            self.down.weight,
            eps=self.spec.norm_eps,
            selective=selective,
            recompute=recompute,
            float8=float8,
            grad_amax=grad_amax,
            tensor=self.tensor,
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
