"""Fresh weights, a pure function of (seed, parameter name): the same on every device and in every order.
Callers: wire (fresh models), engine (dummy start), tests.
"""

from __future__ import annotations

import torch

from gyre.core.seeds import derive_seed
from gyre.models.decoder import Decoder

GAIN = 0.7  # standard deviation × square root of the columns; 0.02 of hub models is this at 1,225 columns
RESIDUAL_GAIN = 1.7  # of the matrices that write to the residual stream, before the division by depth


@torch.no_grad()
def init_weights(decoder: Decoder, seed: int) -> None:
    """Fill in place: norms 1, biases 0, matrices normal with a deviation that follows their width, so that small models
    start as lively as large ones; those that write to the residual stream are narrower with depth, so that its size at
    the start does not grow with the number of layers."""
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            writes_residual = name.endswith(("out.weight", "down.weight"))
            gain = RESIDUAL_GAIN / (2 * decoder.spec.num_layers) ** 0.5 if writes_residual else GAIN
            generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(drawn.mul_(gain / parameter.shape[1] ** 0.5))
