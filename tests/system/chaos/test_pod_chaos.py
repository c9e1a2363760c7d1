"""Chaos in a pod: faults at random leave the weights and the numbers of a run as they are, to the
bit. `chaos_run.py` beside this file plays them for as long as it is told to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from chaos_plan import (
    KIND_BY_NAME,
    KINDS,
    RESTARTS,
    PlannedFault,
    RunShape,
    StruckFault,
    deal,
    find_teller,
    find_untold,
    plan_round,
    playable,
)
from chaos_round import Found
from chaos_run import judge
from hypothesis import given
from hypothesis import strategies as st
from system_runs import Story

from gyre.core.events import EVENTS

ALL = frozenset({"etcd", "own shared memory"})
SHORT = (
    "engine killed",
    "receiver killed in a bucket",
    "publisher killed in its slot",
    "publisher killed between register and update",
    "wrong checksum",
    "slot overwritten while it is read",
    "etcd with an older copy of its data",
)
shapes = st.builds(
    RunShape,
    steps=st.integers(8, 30),
    ranks=st.integers(1, 3),
    engines=st.integers(1, 3),
    members=st.integers(0, 2),
    abilities=st.sets(st.sampled_from(sorted(ALL))).map(frozenset),
)


@given(seed=st.integers(0, 2**32), number=st.integers(0, 100), shape=shapes, data=st.data())
def test_a_plan_follows_from_its_seed_and_fits_the_run(seed, number, shape, data) -> None:
    faults = data.draw(st.integers(1, shape.steps - 3))
    plan = plan_round(seed, number, shape, faults=faults)
    assert plan == plan_round(seed, number, shape, faults=faults)
    steps = [fault.step for fault in plan]
    assert len(steps) == faults and steps == sorted(set(steps))
    assert min(steps) >= 2 and max(steps) <= shape.steps - 2
    counts = {"engine": shape.engines, "trainer": shape.ranks, "member": shape.members}
    for fault in plan:
        kind = KIND_BY_NAME[fault.kind]
        assert kind in playable(shape) and fault.moment in kind.moments
        assert 0 <= fault.victim < counts.get(kind.victim, max(1, shape.ranks))
        assert kind.lasts_s[0] <= fault.lasts_s <= kind.lasts_s[1] and 0.0 <= fault.draw < 1.0


@given(seed=st.integers(0, 2**32), each=st.integers(1, 7), shape=shapes)
def test_each_kind_comes_before_any_comes_again(seed, each, shape) -> None:
    kinds = playable(shape)
    dealt = [
        kind for start in range(0, 3 * len(kinds), each) for kind in deal(seed, start, each, kinds)
    ]
    for start in range(0, 3 * len(kinds), len(kinds)):
        assert Counter(dealt[start : start + len(kinds)]) == Counter(kinds)


def test_what_a_machine_cannot_do_is_not_planned() -> None:
    names = {kind.name for kind in playable(RunShape())}
    assert names == {kind.name for kind in KINDS if not kind.needs}
    assert len(playable(RunShape(members=1, abilities=ALL))) == len(KINDS)


def test_what_tells_of_a_fault_is_counted_in_the_report() -> None:
    uncounted = {"rendezvous.back", "run.resumed", "engine.waits_for_weights", "member.left"}
    for kind in KINDS:
        assert kind.told_by or kind.may_pass, kind.name
        for event in kind.told_by:
            assert EVENTS[event].counted or event in uncounted, event
        counted = [event for event in kind.told_by if EVENTS[event].counted]
        assert counted or kind.may_pass or kind.victim == "driver", kind.name


def struck(kind: str, *, row: int, pid: int = 0, told_here: str = "") -> StruckFault:
    fault = PlannedFault(
        kind=kind, victim=0, step=2, moment="rollout", delay_s=0.0, lasts_s=0.0, draw=0.0
    )
    return StruckFault(fault=fault, row=row, pid=pid, told_here=told_here)


def test_a_fault_is_told_by_an_event_after_it_about_its_process() -> None:
    lost = {"kind": "engine.lost", "place": "this host, pid 71"}
    one = struck("engine killed", row=1, pid=71)
    assert find_teller(one, [lost]) == "", "it came before"
    assert find_teller(one, [lost, lost]) == "engine.lost"
    assert find_teller(replace(one, pid=7), [lost, lost]) == "", "it is of another process"
    restart = {"kind": "retry.run_restarted"}
    assert find_teller(replace(one, pid=7), [lost, restart]) == restart["kind"]
    assert find_untold([one], [lost]) == (one,) and not find_untold([one], [lost, lost])


def test_what_may_pass_needs_no_event_and_a_refusal_is_its_own() -> None:
    assert find_teller(struck("clock jumped", row=0), []) == "may pass"
    older = struck("second publisher of an older epoch", row=0)
    assert find_teller(older, []) == ""
    assert find_teller(replace(older, told_here="refused"), []) == "refused"
    assert all(find_teller(struck("rank killed", row=0), [{"kind": kind}]) for kind in RESTARTS)


def test_a_run_without_weights_is_not_one_that_ended_as_the_other(tmp_path: Path) -> None:
    nothing = Story(steps=[], evals=[], samples=[], weights="", num_dead=0, num_attempts=1)
    assert judge(Found(rows=[]), tmp_path, nothing) == [
        "no weights were exported, so nothing says that they are the same"
    ]
    (tmp_path / "export").mkdir()
    assert judge(Found(rows=[]), tmp_path, nothing), "a folder alone is no export"


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is a folder on Linux")
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_short_chaos_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """Without what takes long to be noticed, or starts the whole run again."""
    told = tmp_path / "chaos.json"
    playable_here = [name for name in SHORT if shutil.which("etcd") or "etcd" not in name]
    words = [sys.executable, str(Path(__file__).parent / "chaos_run.py"), "--seconds", "1"]
    words += ["--seed", "18", "--engines", "1", "--steps", str(len(playable_here) + 4)]
    words += ["--faults", str(len(playable_here)), "--only", *playable_here]
    words += ["--output", str(told), "--keep", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    (found,) = json.loads(told.read_text())["rounds"]
    assert sorted(fault["kind"] for fault in found["faults"]) == sorted(playable_here), found
    assert all(fault["told_by"] for fault in found["faults"]) and not found["missed"], found
