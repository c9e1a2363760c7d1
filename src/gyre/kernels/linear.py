"""Linear: the products of a linear layer, forward and backward, in the dtype of its operands or in
8 bits. In: rows, a weight. Out: rows, gradients.

In 8 bits the backward pass scales input and weight by the same numbers as the forward pass: it
receives their largest magnitudes. No 8-bit tensor is kept between the passes. Weights, and inputs
that attention or a norm keeps anyway, are rounded again, at the cost of one read.

Ranks that hold a matrix in parts scale by the whole operands' numbers: they exchange the
largest magnitudes of their parts. For an operand that all hold whole nothing changes.
"""

# T tokens, I input features, O output features

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.kernels.float8 import (
    E4M3,
    E5M2,
    Amax,
    Float8Weight,
    Quantized,
    largest,
    multiply,
    product,
    quantize,
    transposed,
)

# of input and weight; None for products that are not in 8 bits
Amaxes = tuple[Tensor | None, Tensor | None]
# partial products, summed over the ranks that hold them; their tensor becomes scratch
Reduce = Callable[[Tensor], Tensor]
# largest over the ranks that hold parts of the same operands, number by number, in place
Share = Callable[[Tensor], None]


def linear(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    onto_TO: Tensor | None = None,
    float8: bool,
    amax: Amax | None = None,
    reduce: Reduce | None = None,
    share: Share | None = None,
) -> tuple[Tensor, Amaxes]:
    """Return x · weightᵀ plus the bias or `onto_TO`, and the data that `OutputGradient` needs.
    `amax` is that of x, if its producer has found it; here and below it belongs to the operand
    about to be rounded. `reduce` sums the product over ranks before `onto_TO` is added; with one
    rank, None, a wide product adds it itself. `share` is of ranks that hold parts, here and below.
    """
    if not float8 and reduce is None:
        if onto_TO is not None:
            return torch.addmm(onto_TO, x_TI, weight_OI.t()), (None, None)
        return F.linear(x_TI, weight_OI, bias_O), (None, None)
    of_x, of_weight = amaxes_of(x_TI, weight_OI, float8=float8, amax=amax, share=share)
    if of_x is None or of_weight is None:
        y_TO = F.linear(x_TI, weight_OI)
    else:
        x, weight = quantize(x_TI, E4M3, rows=True, amax=of_x), _weight_rows(weight_OI, of_weight)
        y_TO = product(x, weight, over="rows", dtype=x_TI.dtype, fast=True)
    if reduce is not None:
        assert onto_TO is not None and bias_O is None
        return reduce(y_TO) + onto_TO, (of_x, of_weight)
    more = bias_O if onto_TO is None else onto_TO
    return y_TO if more is None else y_TO.add_(more), (of_x, of_weight)


def amaxes_of(
    x_TI: Tensor,
    weight_OI: Tensor,
    *,
    float8: bool,
    amax: Amax | None = None,
    share: Share | None = None,
) -> Amaxes:
    """Return the largest magnitudes that `linear` would find, without the product."""
    if not float8:
        return None, None
    of_x = _found(amax)
    of_weight = weight_OI.amax if isinstance(weight_OI, Float8Weight) else largest(weight_OI)
    of_x = largest(x_TI) if of_x is None else of_x
    if share is None:
        return of_x, of_weight
    share(both := torch.stack([of_x, of_weight]))
    return both[0], both[1].clone()  # aligned as the first is, for kernels


class OutputGradient:
    """The gradient of a linear layer's output, prepared once for both of its products."""

    def __init__(
        self,
        grad_TO: Tensor,
        amaxes: Amaxes,
        amax: Amax | None = None,
        share: Share | None = None,
    ) -> None:
        self._grad_TO = grad_TO
        self._x_amax, self._weight_amax = amaxes
        self._grad = self._x = None
        if self._x_amax is not None:
            found = _found(amax)
            if share is not None:
                share(found := (largest(grad_TO) if found is None else found.clone()))
            self._grad = quantize(grad_TO, E5M2, rows=True, columns=True, amax=found)

    def of_input(self, weight_OI: Tensor) -> Tensor:
        if self._grad is None:
            return self._grad_TO @ weight_OI
        assert self._grad.rows_NK is not None and self._weight_amax is not None
        columns_IO, inverse = _weight_columns(weight_OI, self._weight_amax)
        return multiply(
            self._grad.rows_NK, columns_IO, self._grad.inverse, inverse, dtype=self._grad_TO.dtype
        )

    def of_weight(self, x_TI: Tensor) -> Tensor:
        if self._grad is None:
            return self._grad_TO.t() @ x_TI
        x = quantize(x_TI, E4M3, columns=True, amax=self._x_amax)
        return product(self._grad, x, over="columns", dtype=self._grad_TO.dtype)

    def of_weight_rows(self, x_TI: Tensor, start: int, stop: int, out_OI: Tensor) -> None:
        """Write rows [start, stop) of the weight's gradient. All calls get the same `x_TI`."""
        if self._grad is None:
            torch.mm(self._grad_TO[:, start:stop].t(), x_TI, out=out_OI[start:stop])
            return
        if self._x is None:
            self._x = quantize(x_TI, E4M3, columns=True, amax=self._x_amax)
        assert self._grad.columns_KM is not None
        some = replace(self._grad, columns_KM=self._grad.columns_KM[start:stop])
        out_OI[start:stop] = product(some, self._x, over="columns", dtype=self._grad_TO.dtype)


def _found(amax: Amax | None) -> Tensor | None:
    return None if amax is None else amax.found


def _weight_rows(weight_OI: Tensor, amax: Tensor) -> Quantized:
    if isinstance(weight_OI, Float8Weight):
        return Quantized(weight_OI.data_OI, None, weight_OI.inverse, weight_OI.amax)
    return quantize(weight_OI, E4M3, rows=True, amax=amax)


def _weight_columns(weight_OI: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(weight_OI, Float8Weight):
        return transposed(weight_OI.data_OI), weight_OI.inverse
    weight = quantize(weight_OI, E4M3, columns=True, amax=amax)
    assert weight.columns_KM is not None
    return weight.columns_KM, weight.inverse
