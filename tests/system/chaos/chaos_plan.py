"""Chaos plan: which faults a run in a pod meets, when, and what must tell of them. In: a seed, the
shape of a run, what this machine can do. Out: planned faults; the faults that nothing told of. Pure.

A round is one run. Faults are dealt from a shuffled deck, so that each kind comes before any comes
again. What the run was doing when one struck is left to chance; where a moment must be exact, the
process waits at a point (`points`, beside this file) until the fault has struck.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Action = Literal[
    "kill", "stop", "tear", "flip", "replace", "truncate", "fill_memory",
    "kill_etcd", "stop_etcd", "age_etcd", "slow", "publish_older", "jump",
]  # fmt: skip
Victim = Literal[
    "engine", "trainer", "member", "driver", "slot", "etcd", "network", "clock", "host"
]
PHASES = ("rollout", "score", "train", "handover")
# where a process waits: a rank in the middle of its slot; an engine before it opens what was
# registered, so between register and update; an engine in the middle of an update's buckets
POINTS = ("writing", "reading", "bucket")
RESTARTS = ("retry.run_restarted", "rank.failed", "rank.hung", "run.resumed")
# a version is registered again, but for an engine that was away and reads it when it comes back
REFUSALS = ("retry.version_registered", "engine.waits_for_weights", "engine.lost")
ETCD = ("rendezvous.lost", "rendezvous.back", "rendezvous.lease_lost", "rendezvous.not_told")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A kind of fault. One of `told_by` must follow it, unless it may pass unnoticed."""

    name: str
    action: Action
    victim: Victim
    moments: tuple[str, ...] = PHASES  # phases that begin, or points
    told_by: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()  # of this machine and of the run's shape
    lasts_s: tuple[float, float] = (0.0, 0.0)
    holds: bool = False  # rollouts wait until it is told
    may_pass: bool = False


KINDS = (
    FaultKind(name="engine killed", action="kill", victim="engine", told_by=("engine.lost",)),
    FaultKind(name="engine stopped", action="stop", victim="engine", told_by=("engine.lost",)),
    FaultKind(
        name="receiver killed in a bucket",
        action="kill",
        victim="engine",
        moments=("bucket",),
        told_by=("engine.lost",),
    ),
    FaultKind(name="rank killed", action="kill", victim="trainer", told_by=RESTARTS),
    FaultKind(
        name="rank stopped",
        action="stop",
        victim="trainer",
        moments=("train", "handover"),
        told_by=RESTARTS,
    ),
    FaultKind(
        name="publisher killed in its slot",
        action="kill",
        victim="trainer",
        moments=("writing",),
        told_by=RESTARTS,
    ),
    FaultKind(
        name="publisher killed between register and update",
        action="kill",
        victim="trainer",
        moments=("reading",),
        told_by=RESTARTS,
    ),
    FaultKind(
        name="driver killed", action="kill", victim="driver", told_by=("run.resumed",)
    ),
    FaultKind(
        name="slot torn", action="tear", victim="slot", moments=("reading",), told_by=REFUSALS
    ),
    FaultKind(
        name="wrong checksum", action="flip", victim="slot", moments=("reading",), told_by=REFUSALS
    ),
    FaultKind(
        name="slot overwritten while it is read",
        action="flip",
        victim="slot",
        moments=("bucket",),
        told_by=REFUSALS,
    ),
    FaultKind(
        name="slot of another run",
        action="replace",
        victim="slot",
        moments=("reading",),
        told_by=REFUSALS,
    ),
    FaultKind(
        name="slot truncated",
        action="truncate",
        victim="slot",
        moments=("reading",),
        told_by=REFUSALS,
    ),
    FaultKind(
        name="shared memory full",
        action="fill_memory",
        victim="host",
        told_by=RESTARTS,
        needs=frozenset({"own shared memory"}),
    ),
    FaultKind(
        name="etcd killed",
        action="kill_etcd",
        victim="etcd",
        told_by=ETCD,
        needs=frozenset({"etcd"}),
        lasts_s=(0.5, 4.0),
        holds=True,
    ),
    FaultKind(
        name="etcd stopped",
        action="stop_etcd",
        victim="etcd",
        told_by=ETCD,
        needs=frozenset({"etcd"}),
        lasts_s=(3.0, 8.0),
        holds=True,
    ),
    FaultKind(
        name="etcd with an older copy of its data",
        action="age_etcd",
        victim="etcd",
        told_by=("rendezvous.rewound",),
        needs=frozenset({"etcd"}),
        lasts_s=(0.2, 1.0),
        holds=True,
    ),
    FaultKind(
        name="slow network",
        action="slow",
        victim="network",
        told_by=ETCD,
        needs=frozenset({"etcd"}),
        lasts_s=(1.0, 5.0),
        may_pass=True,
    ),
    FaultKind(
        name="second publisher of an older epoch",
        action="publish_older",
        victim="host",
        told_by=("rendezvous.superseded",),
        needs=frozenset({"etcd"}),
    ),
    FaultKind(
        name="member killed",
        action="kill",
        victim="member",
        told_by=("engine.lost", "member.left", *RESTARTS),
        needs=frozenset({"member"}),
    ),
    FaultKind(
        name="member stopped",
        action="stop",
        victim="member",
        told_by=("engine.lost", "member.left", *RESTARTS),
        needs=frozenset({"member"}),
        moments=("rollout", "handover"),
    ),
    FaultKind(
        name="clock jumped", action="jump", victim="clock", may_pass=True, lasts_s=(0.5, 3.0)
    ),
)  # fmt: skip
KIND_BY_NAME: Mapping[str, FaultKind] = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """The run of a round."""

    steps: int = 10
    ranks: int = 1
    engines: int = 1
    members: int = 0
    colocated: bool = True
    abilities: frozenset[str] = frozenset()  # of this machine
    only: frozenset[str] = frozenset()  # kinds that are played; empty for all


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """What happens to whom, and when."""

    kind: str  # a name of KINDS
    victim: int  # which engine, rank, member or owner of a slot
    step: int  # it strikes at the first such moment of this step, or of a later one
    moment: str
    delay_s: float
    lasts_s: float
    draw: float  # in [0, 1): where in a slot, how far a clock, how slow a network


@dataclass(frozen=True, slots=True, kw_only=True)
class StruckFault:
    """A planned fault that has struck."""

    fault: PlannedFault
    row: int  # of events.jsonl that came next
    pid: int = 0  # of the process that it struck
    note: str = ""
    told_here: str = ""  # an event of the executor's own part, such as a second publisher


def playable(shape: RunShape) -> tuple[FaultKind, ...]:
    """Return the kinds that a run of this shape can meet on this machine."""
    has = shape.abilities | ({"member"} if shape.members else set())
    wanted = [kind for kind in KINDS if not shape.only or kind.name in shape.only]
    return tuple(kind for kind in wanted if kind.needs <= has)


def deal(seed: int, start: int, count: int, kinds: Sequence[FaultKind]) -> tuple[FaultKind, ...]:
    """Return faults number `start` and following. Each deck has every kind once."""
    dealt = []
    for number in range(start, start + count):
        deck = list(kinds)
        random.Random(f"deck {seed} {number // len(kinds)}").shuffle(deck)
        dealt.append(deck[number % len(kinds)])
    return tuple(dealt)


def plan_round(seed: int, number: int, shape: RunShape, *, faults: int) -> tuple[PlannedFault, ...]:
    """Return the faults of a round, one for each step at most, none in the first or the last two:
    a run that has not begun or is over tells of nothing."""
    draws = random.Random(f"round {seed} {number}")
    steps = sorted(draws.sample(range(2, shape.steps - 1), faults))
    kinds = deal(seed, number * faults, faults, playable(shape))
    return tuple(_draw(draws, kind, step, shape) for kind, step in zip(kinds, steps, strict=True))


def _draw(draws: random.Random, kind: FaultKind, step: int, shape: RunShape) -> PlannedFault:
    counts = {"engine": shape.engines, "member": shape.members, "trainer": shape.ranks}
    counts["slot"] = shape.ranks
    moment = draws.choice(kind.moments)
    return PlannedFault(
        kind=kind.name,
        victim=draws.randrange(counts.get(kind.victim, 1)),
        step=step,
        moment=moment,
        delay_s=0.0 if moment in POINTS else draws.choice([0.0, draws.uniform(0.0, 0.1)]),
        lasts_s=draws.uniform(*kind.lasts_s),
        draw=draws.random(),
    )


def find_untold(
    struck: Sequence[StruckFault], rows: Sequence[Mapping[str, Any]]
) -> tuple[StruckFault, ...]:
    """Return the faults that no event accounts for."""
    return tuple(one for one in struck if not find_teller(one, rows))


def find_teller(struck: StruckFault, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the kind of the event that accounts for a fault, or "". An event about a process must
    be about the one that was struck; a restart of the run accounts for all that was under way."""
    kind = KIND_BY_NAME[struck.fault.kind]
    if struck.told_here:
        return struck.told_here
    for row in rows[struck.row :]:
        if row["kind"] in RESTARTS and kind.victim in ("engine", "slot", "member"):
            return row["kind"]
        if row["kind"] in kind.told_by and _is_about(row, struck.pid):
            return row["kind"]
    return "may pass" if kind.may_pass else ""


def _is_about(row: Mapping[str, Any], pid: int) -> bool:
    place = row.get("place") or ""
    return not pid or "pid " not in place or place.endswith(f"pid {pid}")
