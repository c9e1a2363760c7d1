"""Counting trainer: counts tokens and advances the version. In: unpacked batches. Out: reports, and
its version number as weights. Implements PolicyTrainer and MemoryTenant.

T tokens of one sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fakes.config import FakeTrainerConfig
from fakes.tenant import FakeComponents
from gyre.core.errors import SnapshotError
from gyre.core.events import Emit
from gyre.core.offers import LocalTensors, Offer
from gyre.core.records import (
    Component,
    Evaluation,
    StepReport,
    Tier,
    TrainBatch,
    TrainSequence,
    Usage,
    Which,
)
from gyre.weights.manifest import make_manifest

SIZES_BYTES = {
    "actor.params": 4096,
    "actor.grads": 8192,
    "actor.optimizer": 16384,
    "reference": 4096,
}


class CountingTrainer:
    """Trains nothing, and keeps honest books: which tokens were targets, how many updates, which
    version."""

    def __init__(
        self,
        *,
        emit: Emit,
        config: FakeTrainerConfig | None = None,
        version: int = 0,
        fail_at_steps: Sequence[int] = (),
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """`fail_at_steps`: loop steps at which `step` raises, with nothing changed. `shapes`:
        tensors to register, all filled with the version's number, for an engine that wants a
        model's."""
        self._emit, self._config = emit, config or FakeTrainerConfig()
        self._shapes = dict(shapes or {"version": (1,)})
        self._fail_at_steps = frozenset(fail_at_steps)
        self._version, self._targets_seen = version, 0
        self.memory = FakeComponents(SIZES_BYTES)
        self._closed = False

    async def step(self, batch: TrainBatch) -> StepReport:
        assert not self._closed, "step after close"
        await asyncio.sleep(self._config.step_delay_s)
        if batch.step in self._fail_at_steps:
            self._emit("trainer.update_skipped", step=batch.step, reason="as told")
            raise RuntimeError(f"the fake trainer was told to fail at step {batch.step}")
        masks = [_target_mask(sequence) for sequence in batch.sequences]
        useful = [
            sequence for sequence, mask in zip(batch.sequences, masks, strict=True) if mask.any()
        ]
        num_targets = sum(int(mask.sum()) for mask in masks)
        per_update = self._config.sequences_per_update or len(useful)
        num_updates = -(-len(useful) // per_update) if useful else 0
        if not useful:
            self._emit("trainer.nothing_to_train", step=batch.step, sequences=len(batch.sequences))
        self._version += num_updates
        self._targets_seen += num_targets
        return StepReport(
            step=batch.step,
            version=self._version,
            metrics={"loss": 1.0 / (1.0 + self._version), "target_tokens": float(num_targets)},
            num_tokens=sum(len(sequence.tokens) for sequence in useful),
            num_updates=num_updates,
        )

    async def evaluate(self, batch: TrainBatch, which: Which) -> Evaluation:
        """policy and reference: the configured log-prob at every target; critic: 0; reward:
        scalars["score"] or 0."""
        assert not self._closed, "evaluate after close"
        zeros = np.zeros(len(batch.sequences), dtype=np.float32)
        if which == "reward":
            scores = [sequence.scalars.get("score", 0.0) for sequence in batch.sequences]
            return Evaluation(which=which, per_sequence=np.array(scores, dtype=np.float32))
        value = 0.0 if which == "critic" else self._config.logprob
        per_token = tuple(
            np.where(_target_mask(sequence), np.float32(value), np.float32(0.0))
            for sequence in batch.sequences
        )
        return Evaluation(
            which=which, per_token=per_token, per_sequence=zeros if which == "critic" else None
        )

    async def register(self, *, epoch: int = 0) -> Offer:
        return self.register_now(epoch)

    def register_now(self, epoch: int = 0) -> Offer:
        tensors = {
            name: torch.full(shape, float(self._version)) for name, shape in self._shapes.items()
        }
        manifest = make_manifest(self._version, tensors, shared=False, checksums=True, epoch=epoch)
        return Offer(manifest=manifest, source=LocalTensors(tensors=tensors))

    async def snapshot(self) -> Mapping[str, Any]:
        counts = torch.tensor([self._version, self._targets_seen], dtype=torch.int64)
        return {
            "tensors": {"counts": counts},
            "state": {"objective": "fake", "version": self._version},
        }

    async def restore(self, state: Mapping[str, Any]) -> None:
        if state["state"].get("objective") != "fake":
            raise SnapshotError(
                f"the snapshot is of objective '{state['state'].get('objective')}', this trainer "
                "is a fake",
                hint="resume with the config that the run was started with",
            )
        self._version, self._targets_seen = (int(count) for count in state["tensors"]["counts"])

    async def close(self) -> None:
        self._closed = True
        self.memory.move(tuple(SIZES_BYTES), "none")

    def components(self) -> Sequence[Component]:
        return self.memory.components()

    def move(self, names: Sequence[str], tier: Tier) -> None:
        self.memory.move(names, tier)

    def measure(self) -> Mapping[str, Usage]:
        return self.memory.measure()


def _target_mask(sequence: TrainSequence) -> np.ndarray:
    """bool [T]: loss_mask, or without one all tokens but the first."""
    mask = sequence.columns.get("loss_mask")
    return np.arange(len(sequence.tokens)) > 0 if mask is None else mask.astype(bool)
