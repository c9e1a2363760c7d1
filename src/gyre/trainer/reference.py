"""Reference: the policy that the KL term and DPO compare with. In: the weights that the actor begins with, later the
actor's. Out: a frozen Decoder, renewed every n steps or by moving average. Caller: trainer.native.

It may lie over ranks in another way than the actor: what it takes from the actor comes as runs of numbers.
"""

# N numbers of a run

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gyre.models.decoder import Decoder
from gyre.parallel.mesh import Split
from gyre.trainer.config import TrainerConfig
from gyre.trainer.optim import AdamW
from gyre.trainer.parallelise import local_tensors
from gyre.trainer.resharding import check_whole, join, load
from gyre.trainer.start import frozen_layout, start_frozen
from gyre.vram.pools import StoragePool
from gyre.weights.gather import gather_runs, local_runs
from gyre.weights.pieces import TensorSource


class Reference:
    """A copy of the actor's compute weights. With a moving average, the average itself is kept in float32."""

    def __init__(self, decoder: Decoder, config: TrainerConfig, split: Split, weights: TensorSource | None) -> None:
        """`decoder` is blank and the reference's own from here on; without `weights` it stays so until `restore`."""
        self._config, self._split = config, split
        self.decoder, self._dtype = decoder, decoder.dtype
        self._layout = frozen_layout(decoder, split)
        start_frozen(decoder, split, weights)
        self._average: dict[str, Tensor] = {}
        if config.reference_moving_average:
            self._average = {name: own.float().clone() for name, own in local_tensors(decoder).items()}

    def due(self, steps_done: int) -> Literal["refresh", "average"] | None:
        """What the config wants of the reference after that many loop steps."""
        every = self._config.reference_refresh_steps
        if every and steps_done % every == 0:
            return "refresh"
        return "average" if self._config.reference_moving_average else None

    @torch.no_grad()
    def follow(self, actor: AdamW, how: Literal["refresh", "average"]) -> None:
        """Become the actor, or move towards it. Collective where the actor's master weights lie in shards."""
        own, places = local_tensors(self.decoder), self._layout.ranks[self._split.rank]
        masters = {name: tensor for name, tensor in actor.masters().items() if name in own}
        layout = actor.layout.of(list(own))
        same = layout.ranks[actor.mesh.shard.rank] == places
        runs = local_runs(layout, masters, rank=actor.mesh.shard.rank, dtype=torch.float32)
        if not same:
            runs = gather_runs(layout, masters, group=actor.mesh.shard, dtype=torch.float32)
        for run in runs:
            place = places[run.name]
            first, last = max(run.start, place.start), min(run.stop, place.stop)
            if first >= last:
                continue
            values_N = run.values_N[first - run.start : last - run.start]
            at = slice(first - place.start, last - place.start)
            target_N = own[run.name].view(-1)[at]
            if how == "average":
                average_N = self._average[run.name].view(-1)[at]
                average_N.lerp_(values_N.to(average_N.device), 1.0 - self._config.reference_moving_average)
                values_N = average_N
            elif run.name in self._average:
                self._average[run.name].view(-1)[at].copy_(values_N)
            target_N.copy_(values_N)

    def state_tensors(self) -> dict[str, Tensor]:
        """What a snapshot holds of this rank's."""
        weights = {f"reference.{name}": own for name, own in local_tensors(self.decoder).items()}
        return weights | {f"reference.average.{name}": tensor for name, tensor in self._average.items()}

    def whole_state(self, copies: dict[str, Tensor]) -> dict[str, Tensor]:
        """Join the ranks' copies of `state_tensors`; on rank 0, {} on the others."""
        mesh = self._split.mesh
        if len(self._layout.ranks) == 1:
            return dict(copies) if mesh.world.rank == 0 else {}
        if mesh.replica.rank:
            return {}
        names = list(self._layout.shapes)
        joined = join(self._layout, {name: copies[f"reference.{name}"] for name in names}, self._dtype, mesh.shard)
        state = {f"reference.{name}": tensor for name, tensor in joined.items()}
        if self._average:
            averages = {name: copies[f"reference.average.{name}"] for name in names}
            joined = join(self._layout, averages, torch.float32, mesh.shard)
            state |= {f"reference.average.{name}": tensor for name, tensor in joined.items()}
        return state

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take this rank's part of a whole snapshot."""
        shapes, places = self._layout.shapes, self._layout.ranks[self._split.rank]
        check_whole({f"reference.{name}": shape for name, shape in shapes.items()}, tensors, self._dtype)
        averages = {f"reference.average.{name}": shapes[name] for name in self._average}
        check_whole(averages, tensors, torch.float32)
        load(places, local_tensors(self.decoder), {name: tensors[f"reference.{name}"] for name in shapes})
        load(places, self._average, {name: tensors[f"reference.average.{name}"] for name in self._average})

    def pool(self, folder: Path | None) -> StoragePool:
        return frozen_pool("reference", self.state_tensors(), self.decoder.device, folder)


def frozen_pool(name: str, tensors: dict[str, Tensor], device: torch.device, folder: Path | None) -> StoragePool:
    return StoragePool(name, tensors, tiers=("device", "host", "disk"), folder=folder, device=device)
