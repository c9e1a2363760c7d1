"""Events: what happened, in order, as lines of JSON. In: emit(kind, fields) from every room. Out:
events.jsonl.

A row is {"seq", "t", "attempt", "kind", …fields}: `seq` counts the rows of one attempt (samples
included), `t` is unix time. The file is the truth; live display, TensorBoard, W&B and the report
are views of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.core.events import EVENTS, check_event
from gyre.observability.jsonl import LineWriter, read_rows
from gyre.observability.lineage import Lineage, trace_lineage

Row = Mapping[str, Any]
Listener = Callable[[Row], None]

RESERVED = frozenset({"seq", "t", "attempt", "kind"})
COUNTED_PREFIXES = ("fallback.", "drop.", "retry.", "warn.")


class EventLog:
    """Appends events of one attempt and calls listeners. Thread-safe."""

    def __init__(
        self,
        path: Path | str,
        *,
        attempt: int,
        clock: Callable[[], float] = time.time,
        check_schema: bool = True,
    ):
        assert attempt >= next_attempt(path), (
            f"attempt {attempt} has rows in {path} already: ask next_attempt first"
        )
        self.attempt = attempt
        self._clock = clock
        self._check_schema = check_schema
        self._writer = LineWriter(Path(path))
        self._seq = 0
        self._listeners: list[Listener] = []
        self._lock = threading.RLock()

    def emit(self, kind: str, /, **fields: Any) -> None:
        """Append one row. A field that collides with a reserved name is stored with a trailing
        "_"."""
        if self._check_schema:
            check_event(kind, fields)
        with self._lock:
            row: dict[str, Any] = {
                "seq": 0,
                "t": round(self._clock(), 4),
                "attempt": self.attempt,
                "kind": kind,
            }
            row.update(
                {f"{name}_" if name in RESERVED else name: value for name, value in fields.items()}
            )
            row["seq"] = self.take_seq()
            self._writer.append(row)
            self._tell(row)

    def fence(self, attempt: int | None, seq: int = 0, **fields: Any) -> None:
        """Record that this attempt resumes from row `seq` of `attempt`. Readers ignore that
        attempt's later rows.

        None keeps nothing of earlier attempts. `step`, if given, makes TensorBoard discard the same
        points.
        """
        assert attempt is None or attempt < self.attempt, "a run resumes from an earlier attempt"
        resumed_from = None if attempt is None else {"attempt": attempt, "seq": seq}
        self.emit("attempt.started", resumed_from=resumed_from, **fields)

    def position(self) -> dict[str, int]:
        """Return {"attempt", "seq"} of the newest row, for a snapshot. Rows up to it are on disk by
        then."""
        with self._lock:
            self._writer.sync()
            return {"attempt": self.attempt, "seq": self._seq}

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` with each row from now on. A listener that raises is removed, and an
        event records it."""
        with self._lock:
            self._listeners.append(listener)

    def take_seq(self) -> int:
        """Return the next row number; samples.jsonl shares it, so that one fence governs both
        files."""
        with self._lock:
            self._seq += 1
            return self._seq

    def close(self) -> None:
        with self._lock:
            self._writer.close()

    def _tell(self, row: Row) -> None:
        for listener in list(self._listeners):
            try:
                listener(row)
            except Exception as error:  # noqa: BLE001
                # a display or tracker must not end a run; the event says so
                self._listeners.remove(listener)
                name = getattr(listener, "__qualname__", type(listener).__name__)
                self.emit(
                    "warn.listener_failed", listener=name, error=f"{type(error).__name__}: {error}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRows:
    """The live rows of a run, in order, with the number left out and the reason."""

    rows: tuple[dict[str, Any], ...]
    num_dead: int  # rows fenced off by a resume
    num_torn: int  # lines that are no JSON, as a kill in the middle of a write leaves
    lineage: Lineage

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


class StageTracker:
    """Tracks the stage of each row, including rows that do not name it."""

    def __init__(self) -> None:
        self._stage = "main"

    def stage(self, row: Row) -> str:
        if row.get("stage"):
            self._stage = str(row["stage"])
        return self._stage


def read_events(path: Path | str) -> LiveRows:
    """Read a log, finished or not. A file that does not exist has no rows."""
    rows: list[dict[str, Any]] = []
    num_torn = 0
    for _, row in read_rows(Path(path)):
        if row is None or not isinstance(row.get("kind"), str):
            num_torn += 1
        else:
            rows.append(row)
    lineage = trace_lineage(rows)
    live = tuple(row for row in rows if lineage.is_live(row))
    return LiveRows(rows=live, num_dead=len(rows) - len(live), num_torn=num_torn, lineage=lineage)


def next_attempt(path: Path | str) -> int:
    """Return the attempt number for a process that opens this log now. The first is 1."""
    return 1 + max(
        (row["attempt"] for _, row in read_rows(Path(path)) if row is not None), default=0
    )


def has_row(path: Path | str, attempt: int, seq: int) -> bool:
    """Return whether a log contains the row that a snapshot resumes from. Row numbers of samples
    are in another file."""
    return any(
        row["attempt"] == attempt and row["seq"] >= seq
        for _, row in read_rows(Path(path))
        if row is not None
    )


def count_steps(rows: Iterable[Row]) -> int:
    """Count the completed steps of a run."""
    return sum(row["kind"] == "step.done" for row in rows)


def is_counted(row: Row) -> bool:
    """Return whether a row is a fallback, drop, retry or warning that the report counts. An
    explicit `counted` field decides."""
    kind, counted = row["kind"], row.get("counted")
    if isinstance(counted, bool):
        return counted
    return EVENTS[kind].counted if kind in EVENTS else kind.startswith(COUNTED_PREFIXES)


def count_events(rows: Iterable[Row]) -> dict[str, int]:
    """Count the fallbacks, drops, retries and warnings by kind; a row may stand for `count` of
    them."""
    counts: dict[str, int] = {}
    for row in rows:
        if is_counted(row):
            counts[row["kind"]] = counts.get(row["kind"], 0) + weight_of(row)
    return counts


def weight_of(row: Row) -> int:
    """Return how many occurrences a row stands for."""
    count = row.get("count")
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else 1
