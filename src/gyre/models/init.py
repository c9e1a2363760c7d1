"""Fresh weights, a pure function of (seed, parameter name): the same on every device, in every order and for every run
of a tensor that is asked for. Callers: wire (fresh models), engine (dummy start), tests.
"""

# N numbers of a run

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gyre.core.seeds import derive_seed
from gyre.models.decoder import Decoder
from gyre.models.spec import ModelSpec

GAIN = 0.7  # standard deviation × square root of the columns; 0.02 of hub models is this at 1,225 columns
RESIDUAL_GAIN = 1.7  # of the matrices that write to the residual stream, before the division by depth


class FreshWeights:
    """Norms 1, biases 0, matrices normal with a deviation that follows their width, so that small models start as
    lively as large ones; those that write to the residual stream are narrower with depth, so that its size at the start
    does not grow with the number of layers."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self.spec, self._seed = spec, seed

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.spec.parameter_shapes()

    @torch.no_grad()
    def read(self, name: str, start: int, stop: int, out_N: Tensor) -> None:
        """Write numbers [start, stop) of a tensor into `out_N`. A matrix is drawn whole, in float32 on the CPU."""
        if name.endswith("norm.weight"):
            out_N.fill_(1.0)
        elif name.endswith(".bias"):
            out_N.zero_()
        else:
            shape = self.shapes[name]
            writes_residual = name.endswith(("out.weight", "down.weight"))
            gain = RESIDUAL_GAIN / (2 * self.spec.num_layers) ** 0.5 if writes_residual else GAIN
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "init", name))
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32)
            out_N.copy_(drawn.view(-1)[start:stop].mul_(gain / shape[1] ** 0.5))


def init_weights(decoder: Decoder, seed: int) -> None:
    """Fill a whole decoder in place."""
    source = FreshWeights(decoder.spec, seed)
    for name, parameter in decoder.named_parameters():
        source.read(name, 0, parameter.numel(), parameter.detach().view(-1))
