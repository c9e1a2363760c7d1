"""Reference: the policy that the KL term and DPO compare with. In: the actor's initial weights,
later its current ones. Out: a frozen Decoder, renewed every n steps or by moving average.

Its layout over ranks may differ from the actor's: it reads the actor's weights as runs of numbers.
"""

# N numbers of a run

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gyre.distributed.mesh import ModelSharding
from gyre.memory.pools.fixed import FixedPool
from gyre.memory.pools.storage import StoragePool
from gyre.models.decoder import Decoder
from gyre.trainer.checkpoint.shards import Holding, PartSource, sharers
from gyre.trainer.config import TrainerConfig
from gyre.trainer.optim.flat import AdamW
from gyre.trainer.parallelize.sharded_module import local_tensors
from gyre.trainer.roles.materialize import Away, frozen_layout, start_frozen
from gyre.weights.gather import gather_runs, local_runs
from gyre.weights.tensor_source import TensorSource


class Reference:
    """A copy of the actor's compute weights. With a moving average, the average is kept in
    float32."""

    def __init__(
        self,
        decoder: Decoder,
        config: TrainerConfig,
        split: ModelSharding,
        weights: TensorSource | None,
    ) -> None:
        """Allocate the reference in `decoder`, a meta-device model that it owns. Without `weights`
        it stays uninitialized until `restore`."""
        self._config = config
        self._split = split
        self.decoder = decoder
        self._dtype = decoder.dtype
        self._layout = frozen_layout(decoder, split)
        self.away = start_frozen("reference", decoder, None, config, split, weights)
        self._average: dict[str, Tensor] = {}
        if config.reference_moving_average:
            self._average = {
                name: own.float().clone() for name, own in local_tensors(decoder).items()
            }

    def due(self, steps_done: int) -> Literal["refresh", "average"] | None:
        """Return what the config requires of the reference after that many loop steps."""
        every = self._config.reference_refresh_steps
        if every and steps_done % every == 0:
            return "refresh"
        return "average" if self._config.reference_moving_average else None

    @torch.no_grad()
    def follow(self, actor: AdamW, how: Literal["refresh", "average"]) -> None:
        """Copy the actor, or move the average towards it. Collective where the actor's master
        weights are sharded."""
        own, places = local_tensors(self.decoder), self._layout.ranks[self._split.rank]
        masters = {name: tensor for name, tensor in actor.masters().items() if name in own}
        layout = actor.layout.local.of(list(own))
        same = layout.ranks[actor.mesh.shard.rank] == places
        runs = local_runs(layout, masters, rank=actor.mesh.shard.rank, dtype=torch.float32)
        if not same:
            runs = gather_runs(layout, masters, group=actor.mesh.shard, dtype=torch.float32)
        for name, run, gathered_N in runs:
            place = places[name]
            first, last = max(run.start, place.start), min(run.stop, place.stop)
            if first >= last:
                continue
            values_N = gathered_N[first - run.start : last - run.start]
            at = slice(first - place.start, last - place.start)
            target_N = own[name].view(-1)[at]
            if how == "average":
                average_N = self._average[name].view(-1)[at]
                average_N.lerp_(
                    values_N.to(average_N.device), 1.0 - self._config.reference_moving_average
                )
                values_N = average_N
            elif name in self._average:
                self._average[name].view(-1)[at].copy_(values_N)
            target_N.copy_(values_N)

    def holdings(self) -> list[Holding]:
        """Return this rank's share of the reference's snapshot."""
        contents = {"reference.": (self._dtype, local_tensors(self.decoder))}
        if self._average:
            contents["reference.average."] = (torch.float32, self._average)
        return [
            Holding(
                component="reference",
                prefix=prefix,
                layout=self._layout,
                rank=self._split.rank,
                tensor_rank=self._split.mesh.tensor.rank,
                dtype=dtype,
                tensors=tensors,
                # a run may go on in another dtype, as the actor's masters may
                converts=tensors is not self._average,
                sharers=sharers(self._layout, self._split.mesh),
            )
            for prefix, (dtype, tensors) in contents.items()
        ]

    @torch.no_grad()
    def restore(self, source: PartSource) -> bool:
        """Load this rank's part of a compatible snapshot. Returns whether wider weights were
        rounded. Weights of an average are recomputed from it, as always."""
        for holding in self.holdings():
            holding.load(source)
        own = local_tensors(self.decoder)
        for name, average in self._average.items():
            own[name].copy_(average)
        kinds = source.kinds()
        return not self._average and any(holding.rounds(kinds) for holding in self.holdings())

    def pools(self, folder: Path | None) -> list[StoragePool | FixedPool]:
        tensors = {
            name: own for holding in self.holdings() for name, own in holding.named().items()
        }
        device = self._split.mesh.device if self.away is not None else self.decoder.device
        return frozen_pools("reference", tensors, device, folder, self.away)


def frozen_pools(
    name: str,
    tensors: dict[str, Tensor],
    device: torch.device,
    folder: Path | None,
    away: Away | None,
) -> list[StoragePool | FixedPool]:
    if away is None:
        return [
            StoragePool(
                name, tensors, tiers=("device", "host", "disk"), folder=folder, device=device
            )
        ]
    pages, buffers = away.buffer.watch(), {"layer_buffers": away.stream.buffers_B}

    def held_bytes() -> int:
        return len(held) if (held := pages()) is not None else 0

    return [
        FixedPool(name, "host", size_bytes=away.buffer.size_bytes, held_bytes=held_bytes),
        StoragePool(f"{name}.layer_buffers", buffers, tiers=("device", "none"), device=device),
    ]
