"""AdamW over spans with 8-bit moments, by the bitsandbytes library. In: Spans with scales. Out: the
same tensors, updated. trainer.optim.flat calls it in place of `trainer.adamw.adamw.update_spans`.

Codes are those of block-wise dynamic quantization (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", arXiv 2110.02861): a number is map[code] × scale. The scale is the largest
magnitude of its block. On a GPU the library's kernel decodes, updates and encodes in one pass. On a
CPU torch operations do so with the library's maps; they are also the kernel's test oracle. The
library's own CPU encoder does not distinguish numbers below 3e-5 of the scale, and encodes zero as
2e-5.
"""

# N numbers of a span, B blocks of them, K numbers of a block, P patterns of a float's first 16 bits

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gyre.core.errors import ConfigError
from gyre.trainer.adamw.adamw import BLOCK_CPU, Numbers, Span, update_block, update_spans
from gyre.trainer.adamw.blocks import BLOCK

NUMBERS_GPU = 1 << 30  # at a time: the kernel counts in 32 bits
TRIAL_BLOCKS, TRIAL_UPDATES, TRIAL_RATE = 64, 4, 1e-3
# of a learning rate: codes at the edge between two, and the kernel's quick powers
TRIAL_BOUND = 0.02
FOUR_BIT = "bitsandbytes.backends.cpu.ops"
SMALLEST_SCALE = 1e-38  # that is divided by: a block of zeros is coded as zeros
HALF = 1 << 15
DEFAULT = 'set trainer.moments = "float32"'


class CodedUpdate:
    """An UpdateSpans for coded moments. Spans with float32 moments are passed to `update_spans`."""

    def __init__(self, device: torch.device) -> None:
        """Load the library. Raises ConfigError without it, or where its kernel does not work on the
        device."""
        # misses kernels there that are not used here
        logging.getLogger(FOUR_BIT).setLevel(logging.ERROR)
        try:
            from bitsandbytes import functional  # here, since it takes seconds and few runs need it
        except ImportError as error:
            raise ConfigError(
                'trainer.moments = "8_bit" needs the package bitsandbytes, which cannot be '
                f"imported: {error}",
                hint=f"install the extra with: pip install 'gyre-rl[moments]'   (or {DEFAULT})",
            ) from error
        self._kernel = functional.optimizer_update_8bit_blockwise
        self._map, self._map_sq = (
            functional.create_dynamic_map(signed=signed).to(device) for signed in (True, False)
        )
        self._codec = Codec(self._map)
        self._codec_sq = Codec(self._map_sq)
        if device.type == "cuda":
            self._try_kernel(device)

    def __call__(self, spans: Sequence[Span], numbers: Numbers) -> None:
        """Update weights and moments once and zero the gradients."""
        for span in spans:
            if span.exp_avg_scale_B is not None:
                self._update(span, numbers)
        update_spans([span for span in spans if span.exp_avg_scale_B is None], numbers)

    def _update(self, span: Span, numbers: Numbers) -> None:
        device, step, update = span.weight_N.device, BLOCK_CPU, self.by_torch
        if device.type == "cuda":
            assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device), (
                "where the kernel is launched"
            )
            step, update = NUMBERS_GPU, self.by_kernel
        for first in range(span.first, span.last, step):
            update(span.part(first, min(first + step, span.last)), numbers)

    def by_kernel(self, span: Span, numbers: Numbers) -> None:
        """Update by the library's kernel. Weight decay is applied first, as in torch.optim.AdamW;
        the kernel would apply it last."""
        (beta1, beta2), rate = numbers.betas, numbers.learning_rate
        assert span.exp_avg_scale_B is not None and span.exp_avg_sq_scale_B is not None
        if numbers.weight_decay and span.decays:
            span.weight_N.mul_(1.0 - rate * numbers.weight_decay)
        self._kernel(
            "adam",
            span.grad_N,
            span.weight_N,
            span.exp_avg_N,
            span.exp_avg_sq_N,
            beta1,
            beta2,
            0.0,
            0.0,
            numbers.eps,
            numbers.num_updates,
            rate,
            self._map,
            self._map_sq,
            span.exp_avg_scale_B,
            span.exp_avg_sq_scale_B,
            weight_decay=0.0,
            gnorm_scale=numbers.grad_scale,
        )
        _keep_from_zero(span.exp_avg_sq_N, span.exp_avg_sq_scale_B)
        span.grad_N.zero_()

    def by_torch(self, span: Span, numbers: Numbers) -> None:
        """Update by torch operations. Allocates float32 moments of the whole span temporarily."""
        assert span.exp_avg_scale_B is not None and span.exp_avg_sq_scale_B is not None
        exp_avg_N = self._codec.decode(span.exp_avg_N, span.exp_avg_scale_B)
        exp_avg_sq_N = self._codec_sq.decode(span.exp_avg_sq_N, span.exp_avg_sq_scale_B)
        wide = replace(
            span,
            exp_avg_N=exp_avg_N,
            exp_avg_sq_N=exp_avg_sq_N,
            exp_avg_scale_B=None,
            exp_avg_sq_scale_B=None,
        )
        update_block(wide, numbers)
        self._codec.encode(exp_avg_N, span.exp_avg_N, span.exp_avg_scale_B)
        self._codec_sq.encode(exp_avg_sq_N, span.exp_avg_sq_N, span.exp_avg_sq_scale_B)
        _keep_from_zero(span.exp_avg_sq_N, span.exp_avg_sq_scale_B)

    def _try_kernel(self, device: torch.device) -> None:
        """Raise ConfigError unless the kernel runs and agrees with the torch operations."""
        generator = torch.Generator(device).manual_seed(0)
        spans = [_blank(TRIAL_BLOCKS, device) for _ in range(2)]
        try:
            for count in range(1, TRIAL_UPDATES + 1):
                grad_N = torch.randn(TRIAL_BLOCKS * BLOCK, device=device, generator=generator)
                numbers = Numbers(
                    learning_rate=TRIAL_RATE,
                    grad_scale=0.5,
                    betas=(0.9, 0.95),
                    eps=1e-8,
                    weight_decay=0.0,
                    num_updates=count,
                )
                for span, update in zip(spans, (self.by_kernel, self.by_torch), strict=True):
                    span.grad_N.copy_(grad_N)
                    update(span, numbers)
        except RuntimeError as error:
            raise ConfigError(
                f'trainer.moments = "8_bit": bitsandbytes does not work on {device}: {error}',
                hint=f"install a build of it for this GPU and CUDA version, or {DEFAULT}",
            ) from error
        apart = float((spans[0].weight_N - spans[1].weight_N).abs().max()) / TRIAL_RATE
        if not apart <= TRIAL_BOUND * TRIAL_UPDATES:
            raise ConfigError(
                f'trainer.moments = "8_bit": on {device} bitsandbytes is {apart:.3g} learning '
                "rates from AdamW after "
                f"{TRIAL_UPDATES} updates, at most {TRIAL_BOUND * TRIAL_UPDATES:g} are accepted",
                hint=f"try another version of it, or {DEFAULT}",
            )


def _keep_from_zero(codes_sq_N: Tensor, scale_sq_B: Tensor) -> None:
    """Reserve the zero code for blocks of zeros. A small second moment rounded to zero would make
    the next update explode: its root divides a nonzero first moment."""
    codes_sq_BK, least_B = codes_sq_N.view(-1, BLOCK), (scale_sq_B > 0).to(torch.uint8)
    torch.maximum(codes_sq_BK, least_B.unsqueeze(1), out=codes_sq_BK)


def _blank(num_blocks: int, device: torch.device) -> Span:
    size = num_blocks * BLOCK
    return Span(
        first=0,
        weight_N=torch.zeros(size, device=device),
        grad_N=torch.zeros(size, device=device),
        exp_avg_N=torch.zeros(size, dtype=torch.uint8, device=device),
        exp_avg_sq_N=torch.zeros(size, dtype=torch.uint8, device=device),
        exp_avg_scale_B=torch.zeros(num_blocks, device=device),
        exp_avg_sq_scale_B=torch.zeros(num_blocks, device=device),
        decays=True,
    )


class Codec:
    """Numbers as 8-bit codes with a scale per block, by torch operations. Finds the nearest value
    of a map of 256 ascending values, from −1 or 0 to 1, without a search.

    All floats with the same first 16 bits are so close that at most one boundary between two values
    separates them. A table holds the code of the lowest; one comparison decides the side of the
    boundary.
    """

    def __init__(self, map_256: Tensor) -> None:
        middles = (map_256[1:] + map_256[:-1]) * 0.5
        heads_P = torch.arange(-HALF, HALF, dtype=torch.int32, device=map_256.device) << 16
        ends_P2 = torch.stack([heads_P, heads_P | 0xFFFF], 1).view(torch.float32)
        # of negative floats the highest pattern is the lowest number
        ends_P2[:HALF] = ends_P2[:HALF].flip(1)
        codes_P2 = torch.bucketize(ends_P2, middles, out_int32=True, right=True).clamp(max=255)
        inside_P = (ends_P2.abs() <= 1.0).all(1)
        assert int((codes_P2[:, 1] - codes_P2[:, 0])[inside_P].max()) <= 1, (
            "two borders between floats of one pattern"
        )
        self._map = map_256
        self._lowest_P = codes_P2[:, 0].contiguous()
        self._borders = torch.cat([middles, middles.new_full((1,), torch.inf)])

    def decode(self, codes_N: Tensor, scale_B: Tensor) -> Tensor:
        """Decode to float32."""
        values_BK = torch.index_select(self._map, 0, codes_N.int()).view(-1, BLOCK)
        return values_BK.mul_(scale_B.unsqueeze(1)).view(-1)

    def encode(self, values_N: Tensor, codes_N: Tensor, scale_B: Tensor) -> None:
        """Encode into codes and scales, in place. Overwrites `values_N` as scratch."""
        values_BK = values_N.view(-1, BLOCK)
        torch.amax(values_BK.abs(), 1, out=scale_B)
        values_BK.div_(scale_B.clamp_min(SMALLEST_SCALE).unsqueeze(1))
        found_N = torch.index_select(self._lowest_P, 0, (values_N.view(torch.int32) >> 16) + HALF)
        found_N += values_N >= torch.index_select(self._borders, 0, found_N)
        codes_N.copy_(found_N)
