"""Offline: the loop without rollouts, for SFT, reward models and DPO on given pairs. In: a source
of sequences. Out: a trained policy or reward model.

    source.take ──TrainBatch──▶ trainer.step ──▶ between steps: held-out measure,
                                                 generated answers, snapshot
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from gyre.core.contracts import PolicyTrainer
from gyre.core.records import TrainBatch
from gyre.loop.evaluate import Outcome, Rollouts, held_out_loss, pair_accuracy, preference_accuracy
from gyre.loop.handover import Handover
from gyre.loop.ports import Parts, StageSpec
from gyre.loop.resume import StageProgress, note_outcome
from gyre.loop.schedule import Rhythm, Turn, export_if_due, run_steps, step_done

Measure = Callable[[PolicyTrainer, TrainBatch], Awaitable[Outcome]]

MEASURES: Mapping[str, Measure] = MappingProxyType(
    {"rm": pair_accuracy, "dpo": preference_accuracy, "sft": held_out_loss}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineConfig:
    """Options of the offline loop."""

    records_per_step: int  # examples, or pairs
    snapshot_every_steps: int
    export_every_steps: int = 0
    eval_every_steps: int


class OfflineLoop:
    """Feeds the trainer directly from data. With a `judge` it also publishes weights to an engine
    and generates."""

    def __init__(
        self, stage: StageSpec, parts: Parts, config: OfflineConfig, *, judge: Rollouts | None
    ) -> None:
        self._stage = stage
        self._parts = parts
        self._config = config
        self._judge = judge
        self._emit = parts.observers.events.emit
        self._phase = parts.observers.spans.phase
        self._handover = None
        if judge is not None:
            assert parts.lifecycle is not None
            self._handover = Handover(
                parts.trainer,
                parts.lifecycle,
                emit=self._emit,
                epoch=parts.observers.events.attempt,
                versions=parts.versions,
            )

    async def run(self, progress: StageProgress) -> StageProgress:
        """Resume from `progress` and run to the end of the stage, or until a stop request ends
        it."""
        if progress.source is not None:
            self._parts.source.restore(progress.source)
        if progress.evaluated_step >= 0:
            await self._parts.gate.enter("train", step=progress.step)
        turn = Turn(
            step=self._step,
            evaluate=self._evaluate,
            so_far=lambda progress: progress,
            halt=self._halt,
        )
        rhythm = Rhythm(
            steps=self._stage.steps,
            eval_every_steps=self._config.eval_every_steps,
            snapshot_every_steps=self._config.snapshot_every_steps,
        )
        return await run_steps(progress, turn, rhythm, self._parts)

    async def _halt(self, progress: StageProgress) -> StageProgress:
        """Change nothing: no step is broken off."""
        return progress

    async def _step(self, progress: StageProgress) -> StageProgress:
        step, started_s = progress.step + 1, time.monotonic()
        records = self._parts.source.take(self._config.records_per_step)
        with self._phase("train", step=step):
            report = await self._parts.trainer.step(TrainBatch(sequences=tuple(records), step=step))
        await export_if_due(step, self._config.export_every_steps, self._parts)
        seconds = time.monotonic() - started_s
        self._emit("step.done", **step_done(self._stage, step, report, seconds, {}))
        return replace(progress, step=step, source=self._parts.source.state())

    async def _evaluate(self, progress: StageProgress, when: str) -> StageProgress:
        gate, step = self._parts.gate, progress.step
        if self._parts.eval_batch is not None:
            await gate.enter("score", step=step)
            with self._phase("evaluate", step=step):
                outcome = await MEASURES[self._stage.objective.kind](
                    self._parts.trainer, self._parts.eval_batch
                )
            progress = note_outcome(progress, outcome, when, self._emit)
        if self._judge is not None and self._handover is not None and self._parts.eval_prompts:
            await gate.enter("handover", step=step)
            await self._handover.publish(step=step)
            await gate.enter("evaluate", step=step)
            with self._phase("evaluate", step=step):
                outcome = await self._parts.stop.within(self._judge.run(self._parts.eval_prompts))
            progress = note_outcome(progress, outcome, when, self._emit)
        await gate.enter("train", step=step)
        return progress
