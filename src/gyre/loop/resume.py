"""Resume: what a restart needs beside the trainer's own state, in one record. In: where a stage stands. Out: JSON-able
state and record bytes for a snapshot, and the same read back. Callers: loop.controller, loop.offline, wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre.core.codec import decode, encode
from gyre.core.errors import SnapshotError
from gyre.loop.collect import InFlight

IN_FLIGHT = "in_flight.msgpack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a stage stands between two steps."""

    stage: str
    step: int = 0  # loop steps done
    done: bool = False  # the stage's last step is behind it
    source: Mapping[str, Any] | None = None  # the data cursor; None at the very start
    evals: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # metric -> before, after, n
    in_flight: Sequence[InFlight] = ()


def to_snapshot(progress: Progress, *, events: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(JSON-able state, blobs). `events` is the log position that readers are fenced to on resume."""
    state = {
        "stage": progress.stage,
        "step": progress.step,
        "done": progress.done,
        "source": progress.source,
        "evals": {name: dict(numbers) for name, numbers in progress.evals.items()},
        "events": dict(events),
    }
    return state, {IN_FLIGHT: encode(list(progress.in_flight))}


def from_snapshot(state: Mapping[str, Any], blobs: Mapping[str, bytes]) -> Progress:
    if IN_FLIGHT not in blobs:
        raise SnapshotError(f"the snapshot has no {IN_FLIGHT}", hint="resume from an earlier snapshot")
    return Progress(
        stage=state["stage"],
        step=int(state["step"]),
        done=bool(state["done"]),
        source=state["source"],
        evals=state["evals"],
        in_flight=decode(blobs[IN_FLIGHT], list[InFlight]),
    )
