"""Ports: what the loop needs besides the contracts, as small Protocols and one bundle. In: objects
that `launch` made. Out: the Parts of one stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gyre.core.contracts import EngineLifecycle, PolicyTrainer, PromptSource, RolloutEngine, Scorer
from gyre.core.offers import Offer
from gyre.core.records import Phase, Prompt, TrainBatch
from gyre.loop.stopping import StopRequest
from gyre.objectives.config import AnyObjective
from gyre.observability.events import EventLog
from gyre.observability.samples import SampleLog
from gyre.observability.spans import Spans


class PhaseGate(Protocol):
    """Moves components at phase changes. Nothing else may move them.

    With rollout.max_staleness above 0 rollouts and training overlap, on devices of their own. The
    loop then enters the trainer's phases (score, train, handover) and neither rollout nor evaluate;
    the engines keep all that these two need.
    """

    async def enter(self, phase: Phase, *, step: int) -> None: ...


class SnapshotPort(Protocol):
    """Stores resumable states of one run, newest first."""

    async def save(
        self, *, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]
    ) -> None:
        """Write the trainer's state together with the loop's, atomically."""
        ...


class ExportPort(Protocol):
    """Writes the model as others load it."""

    async def export(self) -> None:
        """Write the current version, verified, to a folder of its own. The weights are on their
        devices."""
        ...


class TextPort(Protocol):
    """The tokenizer functions that the loop uses."""

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """Name, objective, length and seed of one stage of a run."""

    name: str
    objective: AnyObjective
    steps: int
    seed: int


class VersionLog(Protocol):
    """Records versions at a pod's rendezvous, for operators and tests. No engine reads them: it
    hears of a version by `prepare`. No call fails because the store is away; RankError where a
    newer attempt at the run publishes."""

    async def offered(self, offer: Offer) -> None: ...

    async def committed(self, offer: Offer) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """The sinks of the loop's events, samples and spans."""

    events: EventLog
    samples: SampleLog
    spans: Spans
    sample_groups_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """What a stage is driven through, wherever it runs."""

    trainer: PolicyTrainer
    gate: PhaseGate
    snapshots: SnapshotPort
    engine: RolloutEngine | None = None
    lifecycle: EngineLifecycle | None = None
    exports: ExportPort | None = None  # between the steps; None where none is asked for
    versions: VersionLog | None = None  # None where there is no rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(StageParts):
    """All objects that a loop runs with."""

    source: PromptSource
    observers: Observers
    text: TextPort
    scorer: Scorer | None = None
    eval_prompts: tuple[Prompt, ...] = ()
    # never asked for by default
    stop: StopRequest = field(default_factory=lambda: StopRequest(deadline_s=0.0))
    # held-out sequences, for objectives that are judged without rollouts
    eval_batch: TrainBatch | None = None
