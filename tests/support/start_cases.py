"""Cases for the start of a trainer: functions that run in rank processes (rank_pool), or in the
test's own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from gyre.distributed.process_group import RankGroup, alone
from gyre.models.decoder import Decoder, ScalarHead
from gyre.models.hub.checkpoint import Checkpoint
from gyre.models.init import FreshWeights
from gyre.models.spec import ModelSpec
from gyre.trainer.trainer import NativeTrainer
from gyre.weights.tensor_source import TensorSource
from trainer_cases import make_trainer
from zero_cases import LAYOUTS, SPECS, batch_for, whole

META = torch.device("meta")


class Counting:
    """A source that counts the numbers that are read of another."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.read_numbers: dict[str, int] = dict.fromkeys(source.shapes, 0)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._source.shapes

    def read(self, name: str, start: int, stop: int, out_N: Tensor) -> None:
        assert 0 <= start < stop and out_N.shape == (stop - start,)
        self.read_numbers[name] += stop - start
        self._source.read(name, start, stop, out_N)


def blank(spec: ModelSpec, dtype: str) -> Decoder:
    return Decoder(spec, device=META, dtype=getattr(torch, dtype))


def started(
    group: RankGroup | None,
    kind: str,
    *,
    layout: str = "zero0",
    dtype: str = "float32",
    weights: TensorSource | None,
    reward: TensorSource | None = None,
    reward_head: ScalarHead | None = None,
    spec: ModelSpec,
    **settings: Any,
) -> NativeTrainer:
    """A trainer that begins with blank models."""
    group, extra = group or alone(), {}
    if reward is not None:
        extra["reward_model"] = (
            blank(spec, dtype),
            reward_head or ScalarHead(spec.hidden_size, device=group.device),
        )
    return make_trainer(
        kind,
        decoder=blank(spec, dtype),
        group=group,
        parallel=LAYOUTS[layout],
        weights=weights,
        reward_weights=reward,
        **extra,
        **settings,
    )


def from_folder(
    group: RankGroup | None, kind: str, folder: Path, **settings: Any
) -> tuple[dict[str, np.ndarray], dict[str, int], dict[str, int], np.ndarray]:
    """What a snapshot holds after a start from a hub folder (and a reward model from it), the
    numbers that this rank read of each tensor, those that it holds of the actor, and what the
    reward model says of a batch."""
    with closing(Checkpoint(folder)) as checkpoint:
        counted, reward = Counting(checkpoint), Counting(checkpoint)
        spec = checkpoint.spec
        head = ScalarHead(spec.hidden_size, device=(group or alone()).device)
        trainer = started(
            group, kind, weights=counted, reward=reward, reward_head=head, spec=spec, **settings
        )
    optimizer = trainer.models.actor.optimizer
    held = {
        name: optimizer.places[name].stop - optimizer.places[name].start for name in counted.shapes
    }
    with torch.no_grad():
        head.weight.fill_(1.0)
    scores = trainer.evaluate_now(batch_for(5, seed=0), "reward").per_sequence
    assert scores is not None
    return whole(trainer), counted.read_numbers, held, scores


def from_seed(
    group: RankGroup | None, kind: str, *, spec: str, **settings: Any
) -> dict[str, np.ndarray]:
    """What a snapshot holds after a start from drawn numbers, and a step."""
    trainer = started(
        group, kind, weights=FreshWeights(SPECS[spec], 5), spec=SPECS[spec], **settings
    )
    before = whole(trainer)
    trainer.step_now(batch_for(8, seed=0))
    return before


def peak_bytes(group: RankGroup, spec: ModelSpec, **settings: Any) -> tuple[int, int]:
    """Most bytes of tensors that exist while a trainer starts, and those of its components."""
    tracker = MemTracker()
    with tracker:
        trainer = started(group, "grpo", weights=FreshWeights(spec, 0), spec=spec, **settings)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return peak, sum(component.size_bytes for component in trainer.components())


def resumed(
    group: RankGroup | None, state: dict[str, Any], kind: str, *, spec: str, **settings: Any
) -> Any:
    """What a blank trainer holds once it is restored, and whether it took part in anything before,
    or after a restore that failed."""
    parked = {
        "actor.grads": "none",
        "actor.params": "host",
        "actor.optimizer": "host",
        "reference": "host",
    }
    trainer = started(group, kind, weights=None, spec=SPECS[spec], parked=parked, **settings)
    refused = [is_refused(trainer)]
    held = f"{trainer.models.learners[-1].name}.exp_avg."
    for change in ({"objective": "other"}, {}):
        tensors = {
            name: tensor
            for name, tensor in state["tensors"].items()
            if change or not name.startswith(held)
        }
        try:
            trainer.restore_now({"tensors": tensors, "state": state["state"] | change})
        except Exception as error:  # noqa: BLE001  the test reads it
            refused.append(f"{type(error).__name__}, {is_refused(trainer)}")
    trainer.restore_now(state)
    tiers = {component.name: component.tier for component in trainer.components()}
    assert tiers == {name: parked.get(name, "device") for name in tiers}
    trainer.move([name for name in tiers if parked.get(name) == "host"], "device")
    return refused, whole(trainer), trainer.step_now(batch_for(8, seed=9)).num_updates


def is_refused(trainer: NativeTrainer) -> str:
    for work in (
        lambda: trainer.step_now(batch_for(8, seed=0)),
        lambda: trainer.evaluate_now(batch_for(8, seed=0), "policy"),
        trainer.register_now,
        trainer.snapshot_now,
    ):
        try:
            work()
        except AssertionError as error:
            assert "blank" in str(error)
        else:
            return "accepted"
    return "refused"
