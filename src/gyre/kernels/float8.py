"""Float8: matrix products of two 8-bit operands. In: rows in a wider dtype. Out: the rows in 8 bits
with their inverse scale; products in the wider dtype.

Each operand is scaled as a whole, so that its largest magnitude becomes the format's maximum: E4M3
for inputs and weights (3 bits of mantissa, up to 448), E5M2 for gradients (2 bits, up to 57,344).
These are the numbers of torchao's recipe "tensorwise" with dynamic scales, which the tests compare
with (Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv 2209.05433).
"""

# N rows, K features of a row, M rows padded with zeros to a multiple of 16

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gyre.core.rounding import round_up
from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.dispatch import load_triton

if TYPE_CHECKING:
    from gyre.kernels.gpu.float8 import Float8Kernels

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of both sizes of a weight, and of the axis that a product sums over
SMALLEST_AMAX = 1e-12  # as torchao's: an operand of zeros has a finite scale
CAPABILITY = (8, 9)  # of the first CUDA devices that multiply 8-bit floats


@dataclass(frozen=True, slots=True)
class Quantized:
    """An operand in 8 bits: its value is data × inverse."""

    rows_NK: Tensor | None  # where it was asked for
    columns_KM: Tensor | None  # the same, transposed
    inverse: Tensor  # float32, no axes
    amax: Tensor  # float32, no axes: the largest absolute number, of which the scale is made


class Amax:
    """The largest magnitude of an operand that is about to be computed. The kernel that writes the
    operand may find it. `found` stays None otherwise, and then the operand is read again."""

    def __init__(self, found: Tensor | None = None) -> None:
        self.found = found  # float32, no axes

    def cell(self, device: torch.device) -> Tensor:
        """Return a zeroed cell for a kernel's atomic maximum."""
        self.found = torch.zeros((), device=device)
        return self.found


class Float8Weight(torch.Tensor):
    """An 8-bit weight in place of a wider one: it reports the wider dtype for itself and its
    gradient. Only kernels.linear reads it."""

    data_OI: Tensor
    amax: Tensor
    inverse: Tensor

    @staticmethod
    def __new__(
        cls, data_OI: Tensor, amax: Tensor, inverse: Tensor, dtype: torch.dtype
    ) -> Float8Weight:
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, data_OI.size(), strides=data_OI.stride(), dtype=dtype, device=data_OI.device
        )

    def __init__(self, data_OI: Tensor, amax: Tensor, inverse: Tensor, dtype: torch.dtype) -> None:
        self.data_OI = data_OI
        self.amax = amax
        self.inverse = inverse

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Float8Weight({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle the operations of FSDP2 and autograd on a parameter; no computation uses it this
        way."""
        kept = (
            torch.ops.aten.detach.default,
            torch.ops.aten.as_strided.default,
            torch.ops.aten.view.default,
        )
        assert func in kept, f"{func} of a weight in 8 bits"
        weight, *rest = args
        return cls(
            func(weight.data_OI, *rest, **(kwargs or {})), weight.amax, weight.inverse, weight.dtype
        )


def fits(shape: tuple[int, ...]) -> bool:
    """Return whether a weight's products can use 8-bit operands."""
    return len(shape) == 2 and all(size % MULTIPLE == 0 for size in shape)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a trainer on this device cannot multiply 8-bit floats; None when it can."""
    if dtype not in (torch.bfloat16, torch.float32):
        return (
            f"the rest would be computed in {str(dtype).removeprefix('torch.')}, need "
            "bfloat16 or float32"
        )
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return (
            f"{name} has compute capability {found[0]}.{found[1]}, need "
            f"{CAPABILITY[0]}.{CAPABILITY[1]} or more"
        )
    return None


def largest(x_NK: Tensor) -> Tensor:
    """Return the largest magnitude, float32, no axes; 0 for an empty tensor."""
    if x_NK.numel() == 0:
        return torch.zeros((), device=x_NK.device)
    if kernels := _kernels(x_NK):
        return kernels.largest(x_NK)
    low, high = x_NK.aminmax()
    return torch.maximum(high, -low).float()


def quantize(
    x_NK: Tensor,
    dtype: torch.dtype,
    *,
    rows: bool = False,
    columns: bool = False,
    amax: Tensor | None = None,
) -> Quantized:
    """Scale by format's largest / amax and round, as rows, as columns or both. `amax` where it is
    known already."""
    amax = largest(x_NK) if amax is None else amax
    if (kernels := _kernels(x_NK)) and x_NK.numel():
        return Quantized(
            *kernels.quantize(x_NK.contiguous(), amax, dtype, rows=rows, columns=columns), amax
        )
    most, scale = torch.finfo(dtype).max, scale_of(amax, dtype)
    # the clamp is for torch < 2.12, whose cast does not
    x_NK = (x_NK.float() * scale).clamp_(-most, most).to(dtype)
    columns_KM = None
    if columns:
        columns_KM = x_NK.new_zeros(x_NK.shape[1], padded(len(x_NK)))
        columns_KM[:, : len(x_NK)] = x_NK.t()
    return Quantized(x_NK if rows else None, columns_KM, scale.reciprocal(), amax)


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor applied before rounding to operands with these largest magnitudes,
    float32."""
    return (torch.finfo(dtype).max / amax.double().clamp(min=SMALLEST_AMAX)).float()


def product(
    a: Quantized, b: Quantized, *, over: str, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Compute a · bᵀ over the operands' features ("rows"), or aᵀ · b over their rows ("columns").
    `fast` accumulates in fewer bits where supported, as torchao does in the forward pass."""
    left, right = (a.rows_NK, b.rows_NK) if over == "rows" else (a.columns_KM, b.columns_KM)
    assert left is not None and right is not None
    return multiply(left, right, a.inverse, b.inverse, dtype=dtype, fast=fast)


def multiply(
    left: Tensor,
    right: Tensor,
    left_inverse: Tensor,
    right_inverse: Tensor,
    *,
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """Compute left · rightᵀ of two row-major 8-bit matrices, unscaled."""
    if not (left.numel() and right.numel()):
        return torch.zeros(len(left), len(right), dtype=dtype, device=left.device)
    if left.device.type == "cpu":
        # what torch computes where it has no faster way; oneDNN, which it asks on processors with
        # AMX, multiplies 8-bit floats one by one
        wide = (left.float() * left_inverse) @ (right.t().contiguous().float() * right_inverse)
        return wide.to(dtype)
    return torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_inverse,
        scale_b=right_inverse,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def transposed(data_NK: Tensor) -> Tensor:
    """Return 8-bit rows as columns; both sizes are multiples of 16."""
    if kernels := _kernels(data_NK):
        return kernels.transposed(data_NK)
    return data_NK.t().contiguous()


def padded(count: int) -> int:
    return round_up(count, MULTIPLE)


def _kernels(x_NK: Tensor) -> type[Float8Kernels] | None:
    return _load_kernels() if x_NK.is_cuda else None


@functools.cache
def _load_kernels() -> type[Float8Kernels] | None:
    if isinstance(load_triton(), Unavailable):  # the trainer says so: trainer.torch_kernels
        return None
    from gyre.kernels.gpu.float8 import Float8Kernels  # imports Triton

    return Float8Kernels
