"""AdamW over spans of the flat state, in place. In: weights, summed gradient and moments, the
scalars of one update. Out: the same tensors, updated."""

# N numbers of a span, B blocks of them

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from gyre.kernels.dispatch import load_adamw
from gyre.kernels.float8 import Amax
from gyre.trainer.adamw.blocks import BLOCK

# numbers per pass: five buffers of a block stay in the caches between the passes
BLOCK_CPU = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A slice of the state that this rank updates: views of equal length, at `first` of the rank's
    flat state. Moments are float32, or uint8 codes with one scale per block."""

    first: int
    weight_N: Tensor
    grad_N: Tensor
    exp_avg_N: Tensor
    exp_avg_sq_N: Tensor
    decays: bool
    exp_avg_scale_B: Tensor | None = None  # of each block: the moments are codes then
    exp_avg_sq_scale_B: Tensor | None = None
    # of the new weights, where it is asked for; the writer of the weights may find it
    amax: Amax | None = None

    @property
    def last(self) -> int:
        return self.first + len(self.weight_N)

    def part(self, first: int, last: int) -> Span:
        """Return numbers [first, last) of the state, which must be inside the span. Coded moments
        need whole blocks."""
        at = slice(first - self.first, last - self.first)
        blocks = slice(at.start // BLOCK, at.stop // BLOCK)
        return Span(
            first=first,
            weight_N=self.weight_N[at],
            grad_N=self.grad_N[at],
            exp_avg_N=self.exp_avg_N[at],
            exp_avg_sq_N=self.exp_avg_sq_N[at],
            decays=self.decays,
            exp_avg_scale_B=None if self.exp_avg_scale_B is None else self.exp_avg_scale_B[blocks],
            exp_avg_sq_scale_B=None
            if self.exp_avg_sq_scale_B is None
            else self.exp_avg_sq_scale_B[blocks],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Scalars of one update. The gradient is multiplied by `grad_scale` first; `num_updates`
    includes this update."""

    learning_rate: float
    grad_scale: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    num_updates: int


UpdateSpans = Callable[[Sequence[Span], Numbers], None]


def update_spans(spans: Sequence[Span], numbers: Numbers) -> None:
    """Update weights and moments once and zero the gradients. All spans are on one device."""
    if not spans:
        return
    device = spans[0].weight_N.device
    fused = load_adamw(device)
    if fused is not None:
        _by_kernel(fused, spans, numbers)
        return
    for span in spans:
        size = len(span.weight_N)
        block = BLOCK_CPU if device.type == "cpu" else size
        for start in range(0, size, max(1, block)):
            update_block(
                span.part(span.first + start, span.first + min(start + block, size)), numbers
            )


def _by_kernel(
    fused: Callable[..., Tensor | None], spans: Sequence[Span], numbers: Numbers
) -> None:
    largest_P = fused(
        [(span.weight_N, span.grad_N, span.exp_avg_N, span.exp_avg_sq_N) for span in spans],
        [span.decays for span in spans],
        **asdict(numbers),
        find_largest=any(span.amax is not None for span in spans),
    )
    for span, largest in zip(
        spans, () if largest_P is None else largest_P.unbind(), strict=largest_P is not None
    ):
        if span.amax is not None:
            span.amax.found = largest


def update_block(span: Span, numbers: Numbers) -> None:
    """Update one block in the operation order of torch.optim.AdamW. Uses the gradient as scratch
    and leaves it zero."""
    (beta1, beta2), rate, count = numbers.betas, numbers.learning_rate, numbers.num_updates
    weight_N, grad_N = span.weight_N, span.grad_N
    exp_avg_N, exp_avg_sq_N = span.exp_avg_N, span.exp_avg_sq_N
    if numbers.grad_scale != 1.0:
        grad_N.mul_(numbers.grad_scale)
    if numbers.weight_decay and span.decays:
        weight_N.mul_(1.0 - rate * numbers.weight_decay)
    exp_avg_N.lerp_(grad_N, 1.0 - beta1)
    exp_avg_sq_N.mul_(beta2).addcmul_(grad_N, grad_N, value=1.0 - beta2)
    torch.sqrt(exp_avg_sq_N, out=grad_N)
    grad_N.div_(math.sqrt(1.0 - beta2**count)).add_(numbers.eps)
    weight_N.addcdiv_(exp_avg_N, grad_N, value=-rate / (1.0 - beta1**count))
    grad_N.zero_()
