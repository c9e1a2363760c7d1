"""Fused forward: the decoder's inference pass on a CUDA device with fused kernels. In: tokens,
positions, rows, the decoder's weights, KV pages. Out: the residual stream, logits. Oracle:
models.decoder.Decoder, whose rounding it reproduces.

Per layer four matrix products, and between them: norm; per-head norm, rotation and KV write;
attention; gated activation. Residuals are added by the norm that follows, or at one rank by the
products themselves. With `invariant` the products are those of kernels.gpu.matmul, and ranks sum in
their order; otherwise both are the library's. A token's bits then depend neither on the other
tokens nor on which rank holds its row.
"""

# T tokens, N rows that choose, E hidden size, H heads, K kv heads, D head dim, F = D / 2, M mlp
# size, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.kernels.gpu import pointwise
from gyre.kernels.gpu.matmul import invariant_linear, is_vector_product, vector_linear
from gyre.kernels.gpu.peer_sums import add_peer_sum, add_peer_sum_rms_norm
from gyre.kernels.rope import rope_tables
from gyre.models.decoder import Decoder
from gyre.models.layers.layer import Layer
from gyre.models.layers.tensor_parallel import (
    ReplicatedRows,
    gathered,
    reducer_of,
    summed_in_rank_order,
)

Attend = Callable[[int, Tensor, Tensor], None]  # (layer, q_THD, out_THD to fill)
PagesOf = Callable[[int], Tensor]  # a layer's pages, [page, 2, K, page_tokens, D]

# rows and hidden size from which the norm's sum is no loss; measured on an H200
FEW_ROWS, WIDE = 256, 2048
# With a bias torch asks cublasLt, which has faster kernels for narrow products of so many rows;
# measured on an H200.
BIAS_ROWS = ((17, 112), (129, 224))


class PartialSum(NamedTuple):
    """An addend of the residual stream of which this rank has a part. The ranks' parts are summed
    where it is added."""

    part_TE: Tensor


class FusedForward:
    """Bound to one decoder, one set of pages and one block table, whose tensors stay the same."""

    def __init__(
        self, decoder: Decoder, pages_of: PagesOf, table_RP: Tensor, *, invariant: bool
    ) -> None:
        self.decoder = decoder
        self.invariant = invariant
        self._pages_of = pages_of
        self._table_RP = table_RP
        spec = decoder.spec
        position_P = torch.arange(spec.context_tokens, device=decoder.device)
        cos_P1D, sin_P1D = rope_tables(position_P, decoder.inv_freq_F, decoder.dtype)
        half = spec.head_dim // 2
        self._cos_PF = cos_P1D[:, 0, :half].contiguous()
        # the second half is the one that is not negated
        self._sin_PF = sin_P1D[:, 0, half:].contiguous()
        tensor = decoder.tensor
        self._reduce = reducer_of(tensor)
        self._peers = None
        if tensor is not None and invariant:
            self._reduce = partial(summed_in_rank_order, tensor=tensor)
        elif tensor is not None:
            assert isinstance(tensor, ReplicatedRows), "an engine's rows are few"
            self._peers = tensor.peers
        self._zero_E = torch.zeros(spec.hidden_size, device=decoder.device, dtype=decoder.dtype)

    def residual(
        self,
        token_T: Tensor,
        position_T: Tensor,
        row_T: Tensor,
        attend: Attend,
        source_N: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after the last layer. With `source_N`, of these tokens only,
        skipping the last output projection and MLP for the others. Writes the keys and values of
        all tokens to their pages."""
        last = self.decoder.spec.num_layers - 1
        x_TE: Tensor = self.decoder.embedded(token_T)
        y_TE: Tensor | PartialSum | None = None
        for index in range(last + 1):
            chosen_N = source_N if index == last else None
            x_TE, y_TE = self._layer(index, x_TE, y_TE, position_T, row_T, attend, chosen_N)
        if isinstance(y_TE, PartialSum):
            assert self._peers is not None
            self._count(y_TE.part_TE)
            add_peer_sum(self._peers, x_TE, y_TE.part_TE)
            return x_TE
        return x_TE if y_TE is None else x_TE.add_(y_TE)

    def logits(self, x_NE: Tensor) -> Tensor:
        """Return logits_NV of rows of the residual stream, in the compute dtype."""
        return self.project(self.normed(x_NE, self.decoder.final_norm.weight))

    def own_logits(self, x_NE: Tensor) -> Tensor:
        """Return logits_NV of this rank's part of the vocabulary; padding is -inf."""
        hidden_NE = self.normed(x_NE, self.decoder.final_norm.weight)
        own_NV = self._linear(hidden_NE, self.decoder.head_weight, None)
        return self.decoder.without_padding(own_NV)

    def project(self, hidden_NE: Tensor) -> Tensor:
        """Return logits_NV of rows after the final norm."""
        own_NV = self._linear(hidden_NE, self.decoder.head_weight, None)
        return self.decoder.joined_logits(own_NV)

    def layer(
        self, index: int, x_TE: Tensor, position_T: Tensor, row_T: Tensor, attend: Attend
    ) -> Tensor:
        """Return the residual stream after a layer, without modifying `x_TE`: of this rank's rows,
        where ranks split them. Positions and rows are of all tokens. Invariant mode only."""
        assert self.invariant
        return self._layer(index, x_TE, None, position_T, row_T, attend, None)[0]

    def normed(
        self, x_TE: Tensor, weight_E: Tensor, y_TE: Tensor | PartialSum | None = None
    ) -> Tensor:
        """Return the norm of x, or add y to x in place and return the norm of the sum."""
        out_TE, eps = torch.empty_like(x_TE), self.decoder.spec.norm_eps
        if y_TE is None:
            pointwise.rms_norm(x_TE, weight_E, eps, out_TE)
        elif isinstance(y_TE, PartialSum):
            assert self._peers is not None
            self._count(y_TE.part_TE)
            add_peer_sum_rms_norm(self._peers, x_TE, y_TE.part_TE, weight_E, eps, out_TE)
        else:
            pointwise.add_rms_norm(x_TE, y_TE, weight_E, eps, out_TE)
        return out_TE

    def _count(self, part_TE: Tensor) -> None:
        assert self.decoder.tensor is not None
        self.decoder.tensor.group.count_sum(part_TE)

    def _layer(
        self,
        index: int,
        x_TE: Tensor,
        y_TE: Tensor | PartialSum | None,
        position_T: Tensor,
        row_T: Tensor,
        attend: Attend,
        source_N: Tensor | None,
    ) -> tuple[Tensor, Tensor | PartialSum | None]:
        """Run one layer on the residual stream and its pending addend. Returns both, or those of
        `source_N` where given."""
        layer, tensor = self.decoder.layers[index], self.decoder.tensor
        assert isinstance(layer, Layer)
        assert source_N is None or tensor is None or not tensor.splits_rows
        normed_TE = gathered(self.normed(x_TE, layer.attn_norm.weight, y_TE), tensor)
        attended_TA = self._attention(index, layer, normed_TE, position_T, row_T, attend)
        if source_N is not None:
            x_TE = x_TE.index_select(0, source_N)
            attended_TA = attended_TA.index_select(0, source_N)
        x_TE, y_TE = self._to_residual(x_TE, attended_TA, layer.out.weight)
        normed_TE = gathered(self.normed(x_TE, layer.mlp_norm.weight, y_TE), tensor)
        return self._mlp(layer, x_TE, normed_TE)

    def _attention(
        self,
        index: int,
        layer: Layer,
        normed_TE: Tensor,
        position_T: Tensor,
        row_T: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Return attended_TA; keys and values go to their pages."""
        spec, num_tokens = self.decoder.spec, len(normed_TE)
        qkv_TJD = self._linear(normed_TE, layer.qkv.weight, layer.qkv.bias)
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
        attended_THD = torch.empty(
            num_tokens,
            spec.num_heads,
            spec.head_dim,
            device=normed_TE.device,
            dtype=normed_TE.dtype,
        )
        attend(index, qkv_TJD[:, : spec.num_heads], attended_THD)
        return attended_THD.view(num_tokens, -1)

    def _mlp(
        self, layer: Layer, x_TE: Tensor, normed_TE: Tensor
    ) -> tuple[Tensor, Tensor | PartialSum | None]:
        """Return the residual stream and its pending addend after the dense MLP."""
        gate_up_T2M = self._linear(normed_TE, layer.gate_up.weight, None)
        product_TM = x_TE.new_empty(len(normed_TE), self.decoder.spec.mlp_size)
        pointwise.silu_mul(gate_up_T2M, product_TM)
        return self._to_residual(x_TE, product_TM, layer.down.weight)

    def _linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self.invariant:
            return invariant_linear(x_TI, weight_OI, bias_O)
        if bias_O is None and is_vector_product(x_TI, weight_OI):
            return vector_linear(x_TI, weight_OI)
        return F.linear(x_TI, weight_OI, bias_O)

    def _to_residual(
        self, x_TE: Tensor, z_TI: Tensor, weight_EI: Tensor
    ) -> tuple[Tensor, Tensor | PartialSum | None]:
        """Return x and y, whose sum is x + z · weightᵀ. With few rows the next norm adds y. With
        many the product adds in place, which saves a pass over memory. Partial products of several
        ranks are summed first, or with few rows by the next norm, which adds them."""
        if self._reduce is not None:
            y_TE = self._linear(z_TI, weight_EI, self._no_bias(len(z_TI), weight_EI))
            if self._peers is not None and len(y_TE) <= self._peers.rows:
                return x_TE, PartialSum(y_TE)
            y_TE = self._reduce(y_TE)
            return (x_TE + y_TE, None) if self.invariant else (x_TE, y_TE)
        if self.invariant:
            return invariant_linear(z_TI, weight_EI, None, residual_MN=x_TE), None
        rows = len(z_TI)
        if rows > FEW_ROWS or len(weight_EI) < WIDE:
            return x_TE.addmm_(z_TI, weight_EI.t()), None
        return x_TE, self._linear(z_TI, weight_EI, self._no_bias(rows, weight_EI))

    def _no_bias(self, rows: int, weight_EI: Tensor) -> Tensor | None:
        """Return zeros where a bias makes the library choose a faster kernel."""
        if self.invariant or len(weight_EI) < WIDE:
            return None
        return self._zero_E if any(first <= rows <= last for first, last in BIAS_ROWS) else None
