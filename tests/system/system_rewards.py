"""Reward functions that a user might bring, good and bad."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


def varied(task, completion):
    """Differs between completions, and depends on nothing else."""
    return (sum(completion.encode("utf-8", "replace")) % 7) / 7


def raises(task, completion):
    raise KeyError("no such thing in this task")


def gives_nan(task, completion):
    return float("nan")


def hangs(task, completion):
    time.sleep(600)


def no_number(task, completion):
    return "good"


def fails_later(task, completion, *, flag):
    """Fine until the file FLAG exists, then it raises, returns NaN, hangs or dies, as the
    completion has it."""
    if not Path(flag).exists():
        return varied(task, completion)
    way = sum(completion.encode("utf-8", "replace")) % 5
    if way == 0:
        raise RuntimeError("the service behind this reward is gone")
    if way == 1:
        return float("inf")
    if way == 2:
        os._exit(3)
    if way == 3:
        time.sleep(600)
    return 1.0


def varied_once_back(task, completion, *, events):
    """As `varied`; while an engine is lost it waits until that is back."""
    while True:
        told = Path(events).read_text()
        if told.count('"engine.rejoined"') >= told.count('"engine.lost"'):
            return varied(task, completion)
        time.sleep(0.1)


def varied_with_members(task, completion, *, events):
    """As `varied`; once rollouts have begun, scores of the first steps wait for what members do: a
    and b have come, b is lost, a has left."""
    wanted = [
        [("engine.rejoined", "member-a"), ("engine.rejoined", "member-b")],
        [("engine.lost", "member-b")],
        [("member.left", "member-a")],
    ]
    while True:
        rows = [
            json.loads(line) for line in Path(events).read_text().splitlines() if line[-1] == "}"
        ]
        if not any(row["kind"] == "phase.started" for row in rows):
            return varied(task, completion)
        step = sum(row["kind"] == "step.done" for row in rows)
        told = {(row["kind"], row.get("engine", row.get("member"))) for row in rows}
        if told.issuperset(wanted[step] if step < len(wanted) else []):
            return varied(task, completion)
        time.sleep(0.1)


def varied_once_joined(task, completion, *, events):
    """As `varied`; once an engine has weights it waits until a member takes work."""
    while True:
        told = Path(events).read_text()
        if '"weights.published"' not in told or '"engine.rejoined"' in told:
            return varied(task, completion)
        time.sleep(0.1)


def digit_share_with_members(task, completion, *, events):
    """As `digit_share`; once an engine has weights it waits until two members take work."""
    while True:
        told = Path(events).read_text()
        if '"weights.published"' not in told or told.count('"engine.rejoined"') >= 2:
            return digit_share(task, completion)
        time.sleep(0.1)


def digit_share(task, completion):
    """What a random model does a little and can learn to do always: write digits."""
    return sum(char.isdigit() for char in completion) / max(1, len(completion))


def breaks_later(task, completion, *, flag, way):
    """Fine until the file FLAG exists; from then on it breaks for every completion."""
    print("this reward prints", completion[:1])
    if not Path(flag).exists():
        return varied(task, completion)
    if way == "raises":
        raise RuntimeError(f"no service for {len(completion)} characters")
    return float("nan")


def varied_at_gate(task, completion, *, gate):
    """As `varied`, while the file GATE is there."""
    while not Path(gate).exists():
        time.sleep(0.01)
    return varied(task, completion)
