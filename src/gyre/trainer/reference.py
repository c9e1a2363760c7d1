"""Reference: the policy that the KL term and DPO compare with. In: the actor's weights. Out: a frozen Decoder, renewed
every n steps or by moving average. Caller: trainer.native.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gyre.models.decoder import Decoder
from gyre.trainer.config import TrainerConfig
from gyre.trainer.optim import FlatOptimizer
from gyre.vram.pools import StoragePool


class Reference:
    """A copy of the actor's compute weights. With a moving average, the average itself is kept in float32."""

    def __init__(self, actor: Decoder, config: TrainerConfig) -> None:
        self._config = config
        self.decoder = frozen_copy(actor)
        self._average: dict[str, Tensor] = {}
        if config.reference_moving_average:
            self._average = {name: p.detach().float().clone() for name, p in self.decoder.named_parameters()}

    def due(self, steps_done: int) -> Literal["refresh", "average"] | None:
        """What the config wants of the reference after that many loop steps."""
        every = self._config.reference_refresh_steps
        if every and steps_done % every == 0:
            return "refresh"
        return "average" if self._config.reference_moving_average else None

    @torch.no_grad()
    def follow(self, actor: FlatOptimizer, how: Literal["refresh", "average"]) -> None:
        """Become the actor, or move towards it."""
        names = [name for name, _ in self.decoder.named_parameters()]
        own = [parameter.detach() for parameter in self.decoder.parameters()]
        averages = [self._average[name] for name in names if name in self._average]
        masters = [actor.masters()[name] for name in names]
        if how == "refresh":
            torch._foreach_copy_(own, [actor.parameters[name].detach() for name in names])
            if averages:
                torch._foreach_copy_(averages, masters)
            return
        torch._foreach_lerp_(averages, masters, 1.0 - self._config.reference_moving_average)
        torch._foreach_copy_(own, averages)

    def state_tensors(self) -> dict[str, Tensor]:
        weights = {f"reference.{name}": p.detach() for name, p in self.decoder.named_parameters()}
        return weights | {f"reference.average.{name}": tensor for name, tensor in self._average.items()}

    def pool(self, folder: Path | None) -> StoragePool:
        return frozen_pool("reference", self.state_tensors(), self.decoder.device, folder)


def frozen_copy(source: Decoder) -> Decoder:
    """A Decoder with the same weights in storage of its own, and no gradients."""
    copy = Decoder(source.spec, device=source.device, dtype=source.dtype)
    copy.load_state_dict(source.state_dict())
    return copy.requires_grad_(False)


def frozen_pool(name: str, tensors: dict[str, Tensor], device: torch.device, folder: Path | None) -> StoragePool:
    return StoragePool(name, tensors, tiers=("device", "host", "disk"), folder=folder, device=device)
