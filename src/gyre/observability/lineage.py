"""Lineage: the rows that form a run's history across attempts. In: rows of events.jsonl. Out: a
Lineage. Pure.

A run that is killed and resumed leaves rows of steps that a later attempt repeats. An
`attempt.started` row names what its attempt resumed from: {"attempt": A, "seq": S} keeps the rows
of attempt A up to S. Null keeps nothing earlier. An attempt without such a row follows all rows
that were live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The chain of attempts that leads to the newest one."""

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
    """Trace the newest attempt back to the first. Keeps the rows of each up to where the next
    resumed."""
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
