"""Token by token: the decoder's inference pass in torch, one token at a time. In: tokens and
positions, flat over tokens, and `attend`. Out: the residual stream, hidden states, logits. Oracle:
models.decoder.Decoder.

A token's bits depend neither on other tokens nor on which rank holds its row. Engine and trainer
run it where they must agree to the bit and the fused pass cannot run: over several ranks on a CPU
(docs/parallel.md). The engine's ranks hold all rows of the residual stream, the trainer's an equal
run each. What is between the sums is per token, and these add in rank order.
"""

# T tokens, E hidden size, R rows of qkv, N rows, M mlp size

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gyre.kernels.norm import rms_norm_forward
from gyre.kernels.rope import rope_tables
from gyre.kernels.silu import silu_mul_forward
from gyre.kernels.tokenwise import by_token, linear_by_token
from gyre.models.decoder import Decoder
from gyre.models.layers.layer import Attend, Layer
from gyre.models.layers.qk_norm_rope import turn_heads
from gyre.models.layers.tensor_parallel import gathered, summed_in_rank_order


class TokenwiseForward:
    """Bound to one decoder over several ranks."""

    def __init__(self, decoder: Decoder) -> None:
        assert decoder.tensor is not None, "one rank has kernels of a fixed order"
        self.decoder = decoder
        self._tensor = decoder.tensor

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Return hidden_TE with the final norm applied, of this rank's rows."""
        x_TE = self.decoder.embedded(tokens_T)
        for index in range(self.decoder.spec.num_layers):
            x_TE = self.layer(index, x_TE, positions_T, attend)
        return self.normed(x_TE, self.decoder.final_norm.weight)

    def layer(self, index: int, x_TE: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Return the residual stream after a layer, of this rank's rows. Positions are of all
        tokens."""
        layer, tensor = self.decoder.layers[index], self._tensor
        assert isinstance(layer, Layer)
        normed_TE = gathered(self.normed(x_TE, layer.attn_norm.weight), tensor)
        attended_TA = self._attended(index, layer, normed_TE, positions_T, attend)
        x_TE = x_TE + summed_in_rank_order(linear_by_token(attended_TA, layer.out.weight), tensor)
        normed_TE = gathered(self.normed(x_TE, layer.mlp_norm.weight), tensor)
        gate_up_T2M = linear_by_token(normed_TE, layer.gate_up.weight)
        product_TM = by_token(lambda row_12M: silu_mul_forward(row_12M)[0], gate_up_T2M)
        return x_TE + summed_in_rank_order(linear_by_token(product_TM, layer.down.weight), tensor)

    def normed(self, x_TE: Tensor, weight_E: Tensor) -> Tensor:
        eps = self.decoder.spec.norm_eps
        return (
            by_token(lambda x_1E: rms_norm_forward(x_1E, weight_E, eps)[0], x_TE)
            if len(x_TE)
            else x_TE.clone()
        )

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return logits_NV of the whole vocabulary in the compute dtype."""
        decoder = self.decoder
        return decoder.joined_logits(linear_by_token(hidden_NE, decoder.head_weight))

    def _attended(
        self, index: int, layer: Layer, normed_TE: Tensor, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        spec, decoder = self.decoder.spec, self.decoder
        qkv_TR = linear_by_token(normed_TE, layer.qkv.weight, layer.qkv.bias)
        turn = partial(
            turn_heads,
            q_norm_D=layer.q_norm.weight if spec.qk_norm else None,
            k_norm_D=layer.k_norm.weight if spec.qk_norm else None,
            heads=(spec.num_heads, spec.num_kv_heads),
            eps=spec.norm_eps,
        )

        def heads_of(qkv_1R: Tensor, position_1: Tensor) -> Tensor:
            cos_11D, sin_11D = rope_tables(position_1, decoder.inv_freq_F, qkv_1R.dtype)
            return torch.cat(turn(qkv_1R, cos_T1D=cos_11D, sin_T1D=sin_11D)[:3], dim=1)

        counts = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        q_THD, k_TKD, v_TKD = by_token(heads_of, qkv_TR, positions_T).split(counts, dim=1)
        return attend(index, q_THD, k_TKD, v_TKD).flatten(1)
