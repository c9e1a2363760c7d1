"""Resume: what a restart needs besides the trainer's own state, in one record. In: the progress of
a stage. Out: JSON-able state and record bytes for a snapshot, and the same decoded.

Nothing here reads a clock: every schedule follows from the step number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gyre.core.codec import decode, encode
from gyre.core.errors import SnapshotError
from gyre.core.events import Emit
from gyre.loop.asynchronous.collection import CollectionRecord
from gyre.loop.collect import InFlightGroup
from gyre.loop.evaluate import Outcome

IN_FLIGHT = "in_flight.msgpack"
COLLECTED = "collected.msgpack"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """Progress of a stage between two steps."""

    stage: str
    step: int = 0  # loop steps done
    done: bool = False  # the stage's last step is behind it
    source: Mapping[str, Any] | None = None  # the data cursor; None at the very start
    # metric -> see note_outcome
    evals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    evaluated_step: int = -1  # loop step of the newest evaluation; -1 before the first
    # complete rollouts of the next steps, in order; none where each step waits for its own
    collected: Sequence[CollectionRecord] = ()
    in_flight: Sequence[InFlightGroup] = ()  # of the step after those
    published: Sequence[int] = ()  # versions so far, ascending

    @property
    def num_unfinished_groups(self) -> int:
        """Groups of prompts that were taken and not trained on."""
        return len(self.in_flight) + sum(len(record.groups) for record in self.collected)


def is_due(step: int, every: int) -> bool:
    """Return whether something with this interval in steps (0: never) is due after this step."""
    return bool(every) and step % every == 0


def note_outcome(progress: StageProgress, outcome: Outcome, when: str, emit: Emit) -> StageProgress:
    """Record the first value as "before" and the newest as "after", each with its 95 % interval
    (None: unknown). The event carries the value under the metric's own name."""
    interval = None if outcome.interval is None else list(outcome.interval)
    emit(
        "eval.done",
        stage=progress.stage,
        name=outcome.metric,
        **{outcome.metric: outcome.value},
        n=outcome.n,
        meaning=outcome.meaning,
        standard_error=outcome.standard_error,
        interval=interval,
        step=progress.step,
        when=when,
        detail=dict(outcome.detail),
    )
    old = progress.evals.get(outcome.metric, {})
    numbers = {
        "before": old.get("before", outcome.value),
        "after": outcome.value,
        "n": outcome.n,
        "before_interval": old.get("before_interval") if old else interval,
        "interval": interval,
        "standard_error": outcome.standard_error,
        "meaning": outcome.meaning,
    }
    return replace(progress, evals={**progress.evals, outcome.metric: numbers})


def to_snapshot(
    progress: StageProgress, *, events: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return (JSON-able state, blobs). `events` is the log position that readers are fenced to on
    resume."""
    state = {
        "stage": progress.stage,
        "step": progress.step,
        "done": progress.done,
        "source": progress.source,
        "evals": {name: dict(numbers) for name, numbers in progress.evals.items()},
        "evaluated_step": progress.evaluated_step,
        "published": list(progress.published),
        "events": dict(events),
    }
    blobs = {IN_FLIGHT: encode(list(progress.in_flight))}
    if progress.collected:
        blobs[COLLECTED] = encode(list(progress.collected))
    return state, blobs


def from_snapshot(state: Mapping[str, Any], blobs: Mapping[str, bytes]) -> StageProgress:
    """Decode the output of to_snapshot."""
    if IN_FLIGHT not in blobs:
        raise SnapshotError(
            f"the snapshot has no {IN_FLIGHT}", hint="resume from an earlier snapshot"
        )
    return StageProgress(
        stage=state["stage"],
        step=int(state["step"]),
        done=bool(state["done"]),
        source=state["source"],
        evals=state["evals"],
        # older ones were written after it
        evaluated_step=int(state.get("evaluated_step", state["step"])),
        in_flight=decode(blobs[IN_FLIGHT], list[InFlightGroup]),
        collected=decode(blobs[COLLECTED], list[CollectionRecord]) if COLLECTED in blobs else (),
        published=tuple(state.get("published", ())),
    )
