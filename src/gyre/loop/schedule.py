"""Schedule: steps, evaluations and snapshots of a stage. In: its progress and the loop's
operations. Out: its progress at the end or at a stop request.

    step ─▶ evaluation, if due ─▶ snapshot, if due ─▶ step …    a stop: snapshot, no further step
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gyre.core.records import StepReport
from gyre.loop.ports import Parts, StageSpec
from gyre.loop.resume import StageProgress, is_due, to_snapshot
from gyre.loop.stopping import StepUnfinished


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The operations of a loop on its progress. `step` and `evaluate` raise StepUnfinished where a
    stop request interrupts them."""

    step: Callable[[StageProgress], Awaitable[StageProgress]]
    evaluate: Callable[[StageProgress, str], Awaitable[StageProgress]]  # "before" or "after"
    # adds what is in flight at this moment
    so_far: Callable[[StageProgress], StageProgress]
    # breaks off what is in flight, and adds what it has
    halt: Callable[[StageProgress], Awaitable[StageProgress]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """Number of steps, and the intervals of evaluations and snapshots (0: only at the end)."""

    steps: int
    eval_every_steps: int
    snapshot_every_steps: int


async def run_steps(
    progress: StageProgress, turn: Turn, rhythm: Rhythm, parts: Parts
) -> StageProgress:
    """Run the stage from `progress`, which is already saved, to its end: then `done` is true.

    A stop request ends it sooner and saves the progress. An evaluation skipped by the stop runs
    first on resume.
    """
    saved, stop = progress, parts.stop
    while True:
        last = progress.step >= rhythm.steps
        try:
            if not stop.is_asked and is_evaluation_due(progress, rhythm):
                when = "before" if progress.evaluated_step < 0 else "after"
                progress = replace(
                    await turn.evaluate(progress, when), evaluated_step=progress.step
                )
            ends = last and progress.evaluated_step == progress.step
            due = progress.step > saved.step and is_due(progress.step, rhythm.snapshot_every_steps)
            if due or (ends and not progress.done):
                saved = progress = turn.so_far(replace(progress, done=ends))
                await save_progress(progress, parts)
            if ends:
                return progress
            if not stop.is_asked:
                progress = replace(await turn.step(progress), done=False)
        except StepUnfinished:
            assert stop.is_asked
        if stop.is_asked:
            progress = await turn.halt(progress)
            stop.saving = True
            if progress is not saved:
                await save_progress(progress, parts)
            return progress


async def save_progress(progress: StageProgress, parts: Parts) -> None:
    """Save the trainer's state and the loop's, with the samples so far on disk."""
    observers = parts.observers
    with observers.spans.phase("snapshot", step=progress.step):
        observers.samples.sync()
        state, blobs = to_snapshot(progress, events=observers.events.position())
        await parts.snapshots.save(step=progress.step, state=state, blobs=blobs)


async def export_if_due(step: int, every_steps: int, parts: Parts) -> None:
    """Export the model after a step at each interval. Called where the weights are on their
    devices."""
    if parts.exports is not None and is_due(step, every_steps):
        with parts.observers.spans.phase("export", step=step):
            await parts.exports.export()


def step_done(
    stage: StageSpec,
    step: int,
    report: StepReport,
    seconds: float,
    metrics: Mapping[str, float],
    **more: Any,
) -> dict[str, Any]:
    """Return the fields of the event "step.done". The trainer's own numbers follow `metrics`."""
    return {
        "stage": stage.name,
        "step": step,
        "version": report.version,
        "metrics": {
            **metrics,
            **report.metrics,
            **report.measured,
            "tokens_per_second": report.num_tokens / max(seconds, 1e-9),
        },
        "num_tokens": report.num_tokens,
        "num_updates": report.num_updates,
        **more,
        "seconds": round(seconds, 4),
    }


def is_evaluation_due(progress: StageProgress, rhythm: Rhythm) -> bool:
    """Return whether an evaluation is due: before the first step, at each interval, and after the
    last step, once each."""
    if progress.evaluated_step == progress.step:
        return False
    first, last = progress.evaluated_step < 0, progress.step >= rhythm.steps
    return first or last or is_due(progress.step, rhythm.eval_every_steps)
