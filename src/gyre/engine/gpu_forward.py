"""The decoder's inference pass on a CUDA device with fused kernels. In: tokens, positions, rows, the decoder's weights,
KV pages. Out: the residual stream. Caller: gpu_runner. Oracle: models.decoder.Decoder, whose roundings it repeats.

Per layer four matrix products, and between them: norm; per-head norm, rotation and KV write; attention; gated
activation. Residuals are added by the products themselves.
"""

# T tokens, N rows that choose, E hidden size, H heads, K kv heads, D head dim, F = D / 2, M mlp size, V vocabulary

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.engine.attention import KvPool
from gyre.kernels.gpu import pointwise
from gyre.kernels.rope import rope_tables
from gyre.models.decoder import Decoder

Attend = Callable[[int, Tensor, Tensor], None]  # (layer, q_THD, out_THD to fill)


class FusedForward:
    """Bound to one decoder and one pool; both keep their tensors' identity."""

    def __init__(self, decoder: Decoder, pool: KvPool, table_RP: Tensor) -> None:
        self.decoder, self.pool, self.table_RP = decoder, pool, table_RP
        spec = decoder.spec
        position_P = torch.arange(spec.context_tokens, device=decoder.device)
        cos_P1D, sin_P1D = rope_tables(position_P, decoder.inv_freq_F, decoder.dtype)
        half = spec.head_dim // 2
        self._cos_PF = cos_P1D[:, 0, :half].contiguous()
        self._sin_PF = sin_P1D[:, 0, half:].contiguous()  # the second half is the one that is not negated

    @property
    def size_bytes(self) -> int:
        return 2 * self._cos_PF.numel() * self._cos_PF.element_size()

    def residual(self, token_T: Tensor, position_T: Tensor, row_T: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream after the last layer. Keys and values are in their pages afterwards."""
        decoder, spec = self.decoder, self.decoder.spec
        x_TE = F.embedding(token_T, decoder.embed.weight)
        for index in range(spec.num_layers):
            x_TE = self._layer(index, x_TE, position_T, row_T, attend)
        return x_TE

    def logits(self, x_NE: Tensor) -> Tensor:
        """Return logits_NV of rows of the residual stream, in the compute dtype."""
        normed_NE = torch.empty_like(x_NE)
        pointwise.rms_norm(x_NE, self.decoder.final_norm.weight, self.decoder.spec.norm_eps, normed_NE)
        return F.linear(normed_NE, self.decoder.head_weight)

    def _layer(self, index: int, x_TE: Tensor, position_T: Tensor, row_T: Tensor, attend: Attend) -> Tensor:
        spec, layer = self.decoder.spec, self.decoder.layers[index]
        normed_TE = torch.empty_like(x_TE)
        pointwise.rms_norm(x_TE, layer.attn_norm.weight, spec.norm_eps, normed_TE)
        qkv_TJD = F.linear(normed_TE, layer.qkv.weight, layer.qkv.bias).view(len(x_TE), -1, spec.head_dim)
        pointwise.turn_and_write(
            qkv_TJD,
            layer.q_norm.weight if spec.qk_norm else None,
            layer.k_norm.weight if spec.qk_norm else None,
            self._cos_PF,
            self._sin_PF,
            row_T,
            position_T,
            self.table_RP,
            self.pool.layer(index),
            num_heads=spec.num_heads,
            eps=spec.norm_eps,
        )
        attended_THD = torch.empty(len(x_TE), spec.num_heads, spec.head_dim, device=x_TE.device, dtype=x_TE.dtype)
        attend(index, qkv_TJD[:, : spec.num_heads], attended_THD)
        x_TE.addmm_(
            attended_THD.view(len(x_TE), -1), layer.out.weight.t()
        )  # in place: out of place it would copy first
        pointwise.rms_norm(x_TE, layer.mlp_norm.weight, spec.norm_eps, normed_TE)
        gate_up_T2M = F.linear(normed_TE, layer.gate_up.weight)
        product_TM = torch.empty(len(x_TE), spec.mlp_size, device=x_TE.device, dtype=x_TE.dtype)
        pointwise.silu_mul(gate_up_T2M, product_TM)
        return x_TE.addmm_(product_TM, layer.down.weight.t())
