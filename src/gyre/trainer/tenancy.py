"""Tenancy: the trainer's components as the memory ledger sees them, and as the trainer itself needs them.
In: learners, a reference, a reward model. Out: a PoolTenant that can tell what is where. Caller: trainer.native.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from gyre.core.records import Tier
from gyre.models.decoder import Decoder
from gyre.models.heads import ScalarHead
from gyre.trainer.learner import Learner
from gyre.trainer.parallelise import local_tensors
from gyre.trainer.reference import Reference, frozen_pool
from gyre.vram.pools import PoolTenant

ScoredModel = tuple[Decoder, ScalarHead]


class Tenancy(PoolTenant):
    """All components of one trainer."""

    def __init__(
        self,
        learners: Sequence[Learner],
        reference: Reference | None,
        reward_model: ScoredModel | None,
        disk_folder: Path | None,
    ) -> None:
        super().__init__([pool for learner in learners for pool in learner.pools(disk_folder)])
        if reference is not None:
            self.add(reference.pool(disk_folder))
        if reward_model is not None:
            decoder, head = reward_model
            tensors = local_tensors(decoder)
            tensors["scalar_head"] = head.weight.detach()
            self.add(frozen_pool("reward", tensors, decoder.device, disk_folder))

    def tiers(self) -> dict[str, Tier]:
        return {component.name: component.tier for component in self.components()}

    def need(self, *prefixes: str) -> None:
        """Every component that begins with one of `prefixes` and may be on the device must be there; what has no
        contents to keep is made again."""
        for component in self.components():
            name, tiers = component.name, component.tiers
            if not name.startswith(prefixes) or component.tier == "device" or "device" not in tiers:
                continue
            assert tiers == ("device", "none"), f"{name} is on '{component.tier}'; the phase needs it on the device"
            self.move([name], "device")

    @contextlib.contextmanager
    def on_device(self, name: str) -> Iterator[None]:
        """Bring a component to the device for a while, if it ever is there."""
        component = next(one for one in self.components() if one.name == name)
        tier: Tier = component.tier if "device" in component.tiers else "device"
        if tier != "device":
            self.move([name], "device")
        try:
            yield
        finally:
            if tier != "device":
                self.move([name], tier)
