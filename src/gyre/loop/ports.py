"""Ports: what the loop needs beside the contracts, as small Protocols and one bundle. In: objects
that `wire` made. Callers: every file of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gyre.core.contracts import EngineLifecycle, PolicyTrainer, PromptSource, RolloutEngine, Scorer
from gyre.core.records import Phase, Prompt, TrainBatch
from gyre.loop.stopping import StopRequest
from gyre.objectives.config import AnyObjective
from gyre.observability.events import EventLog
from gyre.observability.samples import SampleLog
from gyre.observability.spans import Spans


class PhaseGate(Protocol):
    """Orders the memory of a phase change; the only other thing that moves components is nobody."""

    async def enter(self, phase: Phase, *, step: int) -> None: ...


class SnapshotPort(Protocol):
    """Keeps resumable states of one run, newest first."""

    async def save(
        self, *, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]
    ) -> None:
        """Write the trainer's state together with ours, whole or not at all."""
        ...


class TextPort(Protocol):
    """A tokenizer, as far as the loop looks at text."""

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = False) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """What makes one stage of a run."""

    name: str
    objective: AnyObjective
    steps: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """Where the loop says what happens."""

    events: EventLog
    samples: SampleLog
    spans: Spans
    sample_groups_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that a ring turns with."""

    source: PromptSource
    trainer: PolicyTrainer
    gate: PhaseGate
    snapshots: SnapshotPort
    observers: Observers
    text: TextPort
    engine: RolloutEngine | None = None
    lifecycle: EngineLifecycle | None = None
    scorer: Scorer | None = None
    eval_prompts: tuple[Prompt, ...] = ()
    # that nobody asks for by default
    stop: StopRequest = field(default_factory=lambda: StopRequest(deadline_s=0.0))
    # held-out sequences, for objectives that are judged without rollouts
    eval_batch: TrainBatch | None = None
