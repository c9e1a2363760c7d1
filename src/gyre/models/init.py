"""Fresh weights, a pure function of (seed, parameter name): the same on every device and in every order.
Callers: wire (fresh models), engine (dummy start), tests.
"""

from __future__ import annotations

import torch

from gyre.core.seeds import derive_seed
from gyre.models.decoder import Decoder

STANDARD_DEVIATION = 0.02  # the hub's initializer_range


@torch.no_grad()
def init_weights(decoder: Decoder, seed: int) -> None:
    """Fill in place: norms 1, biases 0, matrices normal; those that write to the residual stream are narrower with
    depth, so that its size at the start does not grow with the number of layers."""
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            writes_residual = name.endswith(("out.weight", "down.weight"))
            deviation = (
                STANDARD_DEVIATION / (2 * decoder.spec.num_layers) ** 0.5 if writes_residual else STANDARD_DEVIATION
            )
            generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(drawn.mul_(deviation))
