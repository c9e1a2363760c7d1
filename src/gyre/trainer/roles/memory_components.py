"""MemoryComponents: the trainer's components, for the memory ledger and for the trainer itself. In:
trained models, a reference, a reward model, as each is made. Out: a PoolTenant that reports the
tier of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gyre.core.records import Tier
from gyre.distributed.mesh import ModelSharding
from gyre.memory.pools.fixed import FixedPool
from gyre.memory.pools.storage import PoolTenant, StoragePool
from gyre.models.decoder import Decoder, ScalarHead
from gyre.trainer.config import TrainerConfig
from gyre.trainer.offload.weight_stream import WeightStream
from gyre.trainer.parallelize.sharded_module import local_tensors
from gyre.trainer.roles.materialize import start_frozen
from gyre.trainer.roles.reference_model import Reference, frozen_pools
from gyre.trainer.roles.trained_model import TrainedModel
from gyre.weights.tensor_source import TensorSource

ScoredModel = tuple[Decoder, ScalarHead]
# of the owners in the ledger, as the planner has them
ORDER = ("actor", "critic", "reference", "reward")


class MemoryComponents(PoolTenant):
    """All components of one trainer."""

    def __init__(self, disk_folder: Path | None, parked: Mapping[str, Tier]) -> None:
        """Create the components. `parked`: components that leave the device right after allocation,
        to free memory for the next model."""
        super().__init__([])
        self.folder = disk_folder
        self._parked = parked
        self.streams: dict[str, WeightStream] = {}  # of models whose weights are in host memory
        # components that have another reader beside the trainer
        self._lent: frozenset[str] = frozenset()
        self._no_longer_read: Callable[[], None] = lambda: None

    def take_learner(self, learner: TrainedModel) -> TrainedModel:
        self._take(learner.pools(self.folder))
        if learner.stream is not None:
            self.streams[learner.name] = learner.stream
        return learner

    def take_reference(self, reference: Reference) -> Reference:
        self._take(reference.pools(self.folder))
        if reference.away is not None:
            self.streams["reference"] = reference.away.stream
        return reference

    def take_reward(
        self,
        model: ScoredModel,
        config: TrainerConfig,
        split: ModelSharding,
        weights: TensorSource | None,
    ) -> None:
        away = start_frozen("reward", *model, config, split, weights)
        decoder, head = model
        tensors = local_tensors(decoder)
        tensors["scalar_head"] = head.weight.detach()
        self._take(frozen_pools("reward", tensors, split.mesh.device, self.folder, away))
        if away is not None:
            self.streams["reward"] = away.stream

    def _take(self, pools: Sequence[StoragePool | FixedPool]) -> None:
        for pool in pools:
            self.add(pool)
            pool.move(self._parked.get(pool.name, pool.tier))
        rank = {
            name: (ORDER.index(name.partition(".")[0]), at) for at, name in enumerate(self._pools)
        }
        self._pools = {
            name: self._pools[name] for name in sorted(self._pools, key=rank.__getitem__)
        }

    def lend(self, names: Iterable[str], no_longer_read: Callable[[], None]) -> None:
        """Allow a reader to use components until they change. `no_longer_read` blocks until the
        reader is done."""
        self.recall()
        self._lent, self._no_longer_read = frozenset(names), no_longer_read

    def recall(self) -> None:
        """Wait for readers before a lent component changes."""
        if self._lent:
            self._no_longer_read()
            self._lent, self._no_longer_read = frozenset(), lambda: None

    def move(self, names: Sequence[str], tier: Tier) -> None:
        if self._lent.intersection(names):
            self.recall()
        super().move(names, tier)

    def tiers(self) -> dict[str, Tier]:
        return {component.name: component.tier for component in self.components()}

    def need(self, *prefixes: str) -> None:
        """Require every component with one of `prefixes` that can be on the device to be there.
        Reallocates those without contents to keep."""
        for component in self.components():
            name, tiers = component.name, component.tiers
            if not name.startswith(prefixes) or component.tier == "device" or "device" not in tiers:
                continue
            assert tiers == ("device", "none"), (
                f"{name} is on '{component.tier}'; the phase needs it on the device"
            )
            self.move([name], "device")

    @contextlib.contextmanager
    def visiting(self, *owners: str) -> Iterator[None]:
        """Bring models from host memory to the device for the passes in this block."""
        with contextlib.ExitStack() as stack:
            for owner in owners:
                if owner in self.streams:
                    self.need(f"{owner}.layer_buffers")
                    stack.enter_context(self.streams[owner].visit())
            yield

    @contextlib.contextmanager
    def on_device(self, name: str) -> Iterator[None]:
        """Bring a component to the device during this block, if it can be there."""
        component = next(one for one in self.components() if one.name == name)
        tier: Tier = component.tier if "device" in component.tiers else "device"
        if tier != "device":
            self.move([name], "device")
        try:
            yield
        finally:
            if tier != "device":
                self.move([name], tier)

    @contextlib.contextmanager
    def all_on_device(self, prefix: str) -> Iterator[None]:
        """Bring one model's components to the device during this block."""
        with contextlib.ExitStack() as stack:
            for name in self.tiers():
                if name.startswith(prefix):
                    stack.enter_context(self.on_device(name))
            yield
