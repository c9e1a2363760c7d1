"""The decoder's inference pass on a CUDA device with fused kernels. In: tokens, positions, rows, the decoder's weights,
KV pages. Out: the residual stream, logits. Callers: engine.gpu_runner, trainer.invariant. Oracle:
models.decoder.Decoder, whose roundings it repeats.

Per layer four matrix products, and between them: norm; per-head norm, rotation and KV write; attention; gated
activation. Residuals are added by the products themselves. With `invariant` the products are those of
kernels.gpu.matmul, so that no bit of a token depends on the tokens beside it; else they are the library's.
"""

# T tokens, N rows that choose, E hidden size, H heads, K kv heads, D head dim, F = D / 2, M mlp size, V vocabulary

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.kernels.gpu import pointwise
from gyre.kernels.gpu.matmul import invariant_linear
from gyre.kernels.rope import rope_tables
from gyre.models.decoder import Decoder, Layer

Attend = Callable[[int, Tensor, Tensor], None]  # (layer, q_THD, out_THD to fill)
PagesOf = Callable[[int], Tensor]  # a layer's pages, [page, 2, K, page_tokens, D]


class FusedForward:
    """Bound to one decoder, one set of pages and one block table, which keep their tensors' identity."""

    def __init__(self, decoder: Decoder, pages_of: PagesOf, table_RP: Tensor, *, invariant: bool) -> None:
        self.decoder, self.invariant = decoder, invariant
        self._pages_of, self._table_RP = pages_of, table_RP
        spec = decoder.spec
        position_P = torch.arange(spec.context_tokens, device=decoder.device)
        cos_P1D, sin_P1D = rope_tables(position_P, decoder.inv_freq_F, decoder.dtype)
        half = spec.head_dim // 2
        self._cos_PF = cos_P1D[:, 0, :half].contiguous()
        self._sin_PF = sin_P1D[:, 0, half:].contiguous()  # the second half is the one that is not negated

    def residual(self, token_T: Tensor, position_T: Tensor, row_T: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream after the last layer. Keys and values are in their pages afterwards."""
        x_TE = F.embedding(token_T, self.decoder.embed.weight)
        for index in range(self.decoder.spec.num_layers):
            x_TE = self.layer(index, x_TE, position_T, row_T, attend)
        return x_TE

    def logits(self, x_NE: Tensor) -> Tensor:
        """Return logits_NV of rows of the residual stream, in the compute dtype."""
        return self.project(self.normed(x_NE, self.decoder.final_norm.weight))

    def project(self, hidden_NE: Tensor) -> Tensor:
        """Return logits_NV of rows that the final norm has seen."""
        return self._linear(hidden_NE, self.decoder.head_weight, None)

    def normed(self, x_TE: Tensor, weight_E: Tensor) -> Tensor:
        out_TE = torch.empty_like(x_TE)
        pointwise.rms_norm(x_TE, weight_E, self.decoder.spec.norm_eps, out_TE)
        return out_TE

    def layer(self, index: int, x_TE: Tensor, position_T: Tensor, row_T: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream after a layer. `x_TE` is left alone if invariant, else overwritten."""
        spec, layer, num_tokens = self.decoder.spec, self.decoder.layers[index], len(x_TE)
        assert isinstance(layer, Layer)
        qkv_TJD = self._linear(self.normed(x_TE, layer.attn_norm.weight), layer.qkv.weight, layer.qkv.bias)
        qkv_TJD = qkv_TJD.view(num_tokens, -1, spec.head_dim)
        pointwise.turn_and_write(
            qkv_TJD,
            layer.q_norm.weight if spec.qk_norm else None,
            layer.k_norm.weight if spec.qk_norm else None,
            self._cos_PF,
            self._sin_PF,
            row_T,
            position_T,
            self._table_RP,
            self._pages_of(index),
            num_heads=spec.num_heads,
            eps=spec.norm_eps,
        )
        attended_THD = torch.empty(num_tokens, spec.num_heads, spec.head_dim, device=x_TE.device, dtype=x_TE.dtype)
        attend(index, qkv_TJD[:, : spec.num_heads], attended_THD)
        x_TE = self._add_linear(x_TE, attended_THD.view(num_tokens, -1), layer.out.weight)
        gate_up_T2M = self._linear(self.normed(x_TE, layer.mlp_norm.weight), layer.gate_up.weight, None)
        product_TM = torch.empty(num_tokens, spec.mlp_size, device=x_TE.device, dtype=x_TE.dtype)
        pointwise.silu_mul(gate_up_T2M, product_TM)
        return self._add_linear(x_TE, product_TM, layer.down.weight)

    def _linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self.invariant:
            return invariant_linear(x_TI, weight_OI, bias_O)
        return F.linear(x_TI, weight_OI, bias_O)

    def _add_linear(self, x_TE: Tensor, y_TI: Tensor, weight_EI: Tensor) -> Tensor:
        """Return x + y · weightᵀ. The library's is in place, since out of place it copies first."""
        if self.invariant:
            return invariant_linear(y_TI, weight_EI, None, residual_MN=x_TE)
        return x_TE.addmm_(y_TI, weight_EI.t())
