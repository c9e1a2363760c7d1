"""Initial weights: a pure function of (seed, parameter name), equal on every device, in every order
and for every run of a tensor.

A matrix is drawn in blocks with separate seeds, so that a rank draws little more than its own rows,
and threads draw in parallel. The threads use no torch operation that is itself multithreaded: each
would create a full thread team of its own.
"""

# N numbers of a run

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from gyre.core.rounding import ceil_div
from gyre.core.seeds import derive_seed
from gyre.models.decoder import Decoder
from gyre.models.spec import ModelSpec

# standard deviation × square root of the columns; 0.02 of hub models is this at 1,225 columns
GAIN = 0.7
BLOCK = 1 << 22  # numbers; the first block has the matrix's own seed
# of the matrices that write to the residual stream, before the division by depth
RESIDUAL_GAIN = 1.7


class FreshWeights:
    """Norms 1, biases 0, normal matrices.

    The deviation follows the width, so activations of small and large models start at the same
    scale. Matrices that write to the residual stream have a smaller deviation with depth, so its
    initial size does not grow with the number of layers.
    """

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.spec = spec
        self._seed = seed

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.spec.parameter_shapes()

    @torch.no_grad()
    def read(self, name: str, start: int, stop: int, out_N: Tensor) -> None:
        """Write numbers [start, stop) of a tensor into `out_N`. Matrices are drawn in float32 on
        the CPU."""
        if name.endswith("norm.weight"):
            out_N.fill_(1.0)
        elif name.endswith(".bias"):
            out_N.zero_()
        else:
            for first, drawn_N in self.blocks(name, range(start // BLOCK, ceil_div(stop, BLOCK))):
                low, high = max(start, first), min(stop, first + len(drawn_N))
                out_N[low - start : high - start].copy_(drawn_N[low - first : high - first])

    def blocks(self, name: str, blocks: range) -> Iterator[tuple[int, Tensor]]:
        """Yield (first number, numbers) of each block in order. A few are drawn ahead."""
        ahead: deque[Future[tuple[int, Tensor]]] = deque()
        with ThreadPoolExecutor(threads := torch.get_num_threads()) as pool:
            for block in blocks:
                ahead.append(pool.submit(self._block, name, block))
                if len(ahead) > 2 * threads:
                    yield ahead.popleft().result()
            yield from (drawn.result() for drawn in ahead)

    def _block(self, name: str, block: int) -> tuple[int, Tensor]:
        rows, columns = self.shapes[name]
        seed = derive_seed(self._seed, "init", name, *([block] if block else []))
        drawn_N = torch.empty(min(BLOCK, rows * columns - block * BLOCK), dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        return block * BLOCK, drawn_N.normal_(
            0.0, deviation(self.spec, name, columns), generator=generator
        )


def deviation(spec: ModelSpec, name: str, columns: int) -> float:
    writes_residual = name.endswith(("out.weight", "down.weight"))
    gain = RESIDUAL_GAIN / (2 * spec.num_layers) ** 0.5 if writes_residual else GAIN
    return gain / columns**0.5


def init_weights(decoder: Decoder, seed: int) -> None:
    assert decoder.tensor is None, "a part of a model is read through its layout"
    source = FreshWeights(decoder.spec, seed)
    for name, parameter in decoder.named_parameters():
        source.read(name, 0, parameter.numel(), parameter.detach().view(-1))


@torch.no_grad()
def init_dummies(decoder: Decoder) -> None:
    """Draw weights like initial ones on the device; the numbers differ by kind of device."""
    generator = torch.Generator(decoder.device).manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        else:
            parameter.normal_(
                0.0, deviation(decoder.spec, name, parameter.shape[1]), generator=generator
            )
