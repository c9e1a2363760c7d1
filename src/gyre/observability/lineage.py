"""Lineage: which rows of which attempts tell the run's one story. In: rows of events.jsonl. Out: a
Lineage. Pure.

A run that is killed and resumed leaves rows that a later attempt lived through again. An
`attempt.started` row says what its attempt resumed from: {"attempt": A, "seq": S} means that of
attempt A rows up to S are kept, and null that nothing before is. An attempt without such a row goes
on after all that was live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The attempts that lead to the newest one."""

    # by attempt: rows up to this number are live; None means all are
    last_live_seq: Mapping[int, int | None]
    num_attempts: int  # all that were ever started

    def is_live(self, row: Mapping[str, Any]) -> bool:
        attempt = row["attempt"]
        if attempt not in self.last_live_seq:
            return False
        last = self.last_live_seq[attempt]
        return last is None or row["seq"] <= last


def trace_lineage(rows: Iterable[Mapping[str, Any]]) -> Lineage:
    """Walk back from the newest attempt to the first, keeping of each what the next one resumed
    from."""
    order: list[int] = []
    parents: dict[int, tuple[int, int | None] | None] = {}
    for row in rows:
        attempt = row["attempt"]
        if attempt not in parents:
            parents[attempt] = (order[-1], None) if order else None
            order.append(attempt)
        if row.get("kind") == "attempt.started":
            parents[attempt] = _parent(row.get("resumed_from"))
    live: dict[int, int | None] = {}
    attempt, last = (order[-1], None) if order else (None, None)
    while attempt is not None and attempt not in live:
        live[attempt] = last
        attempt, last = parents.get(attempt) or (None, None)
    return Lineage(last_live_seq=live, num_attempts=len(order))


def _parent(resumed_from: Any) -> tuple[int, int] | None:
    return (resumed_from["attempt"], resumed_from["seq"]) if resumed_from else None
