"""Fresh weights, a pure function of (seed, parameter name): the same on every device, in every
order and for every run of a tensor that is asked for.

A matrix is drawn in blocks, each from a seed of its own, so that a rank draws little more than the
rows that it keeps, and threads draw side by side. They do nothing that torch spreads over threads:
each of them would get a team of its own, as large as they are many.
"""

# N numbers of a run

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from gyre.core.seeds import derive_seed
from gyre.models.decoder import Decoder
from gyre.models.spec import ModelSpec

# standard deviation × square root of the columns; 0.02 of hub models is this at 1,225 columns
GAIN = 0.7
BLOCK = 1 << 22  # numbers; the first block has the matrix's own seed
# of the matrices that write to the residual stream, before the division by depth
RESIDUAL_GAIN = 1.7


class FreshWeights:
    """Norms 1, biases 0, matrices normal with a deviation that follows their width, so that small
    models start as lively as large ones; those that write to the residual stream are narrower with
    depth, so that its size at the start does not grow with the number of layers."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.spec, self._seed = spec, seed

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
            for first, drawn_N in self._blocks(name, range(start // BLOCK, -(-stop // BLOCK))):
                low, high = max(start, first), min(stop, first + len(drawn_N))
                out_N[low - start : high - start].copy_(drawn_N[low - first : high - first])

    def _blocks(self, name: str, blocks: range) -> Iterator[tuple[int, Tensor]]:
        """In order: (first number, numbers) of each. A few are drawn ahead."""
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
    """Of a matrix's numbers."""
    writes_residual = name.endswith(("out.weight", "down.weight"))
    gain = RESIDUAL_GAIN / (2 * spec.num_layers) ** 0.5 if writes_residual else GAIN
    return gain / columns**0.5


def init_weights(decoder: Decoder, seed: int) -> None:
    """Fill a whole decoder in place."""
    source = FreshWeights(decoder.spec, seed)
    for name, parameter in decoder.named_parameters():
        source.read(name, 0, parameter.numel(), parameter.detach().view(-1))


@torch.no_grad()
def init_dummies(decoder: Decoder) -> None:
    """Weights like fresh ones, drawn on the device: other numbers on each kind of device."""
    generator = torch.Generator(decoder.device).manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        else:
            parameter.normal_(
                0.0, deviation(decoder.spec, name, parameter.shape[1]), generator=generator
            )
