"""Rewards that fail during a run: told by kind with counts, and past the share that may fail the
run stops."""

from __future__ import annotations

import pytest

from gyre.core.errors import RewardError
from gyre.core.records import Group, Score, ScorePart
from gyre.loop.failures import MOST_KINDS, find_failures, refuse_failures
from loop_cases import Bench, run
from unit.loop.test_assemble import rollout


def group(*parts: tuple[str, str, str]) -> Group:
    """One completion for each (part, outcome, reason)."""
    rollouts = tuple(rollout("g", number, 3) for number in range(len(parts)))
    scores = tuple(
        Score(
            rollout_id=each.rollout_id,
            value=0.0,
            parts=(ScorePart(name=name, value=0.0, weight=1.0, reason=reason, outcome=outcome),),  # type: ignore[arg-type]
        )
        for each, (name, outcome, reason) in zip(rollouts, parts, strict=True)
    )
    return Group(group_id="g", rollouts=rollouts, scores=scores)


def test_failures_are_told_apart_by_exception_and_line_not_by_message() -> None:
    raised = [("f", "error", f"m:f raised KeyError at r.py:7: {number}") for number in range(3)]
    others = [
        ("f", "error", "m:f raised KeyError at r.py:9: 0"),
        ("f", "ok", "fine"),
        ("g", "timeout", "not done"),
    ]
    found = find_failures([group(*raised, *others[:2]), group(others[2])])
    assert [(f.part, f.kind, f.count, f.checks) for f in found] == [
        ("f", "m:f raised KeyError at r.py:7", 3, 5),
        ("f", "m:f raised KeyError at r.py:9", 1, 5),
        ("g", "not done", 1, 1),
    ]
    assert found[0].reason == "m:f raised KeyError at r.py:7: 0"


def test_many_kinds_are_bounded_and_all_are_counted() -> None:
    found = find_failures([group(*[("f", "invalid", f"kind {number}") for number in range(50)])])
    assert len(found) == MOST_KINDS + 1 and sum(failure.count for failure in found) == 50


@pytest.mark.parametrize(("failed", "stops"), [(0, False), (2, False), (3, True), (10, True)])
def test_the_share_that_may_fail_is_of_one_part_s_checks(failed: int, stops: bool) -> None:
    parts = [
        ("f", "invalid" if n < failed else "ok", f"m:f returned nan (r.py:3): {n}")
        for n in range(10)
    ]
    failures = find_failures([group(*parts, *[("g", "ok", "")] * 100)])
    if not stops:
        refuse_failures(failures, most_share=0.2, step=4)
        return
    with pytest.raises(RewardError) as stop:
        refuse_failures(failures, most_share=0.2, step=4)
    assert f"'f' failed on {failed} of 10 completions of step 4" in stop.value.message
    assert "m:f returned nan (r.py:3): 0" in stop.value.message and stop.value.exit_code == 1


def test_the_ring_stops_before_it_trains_on_a_broken_reward(tmp_path) -> None:
    def table(rollout):
        if rollout.group_id.startswith("2.") and rollout.rollout_id.endswith((".1", ".2")):
            raise ValueError("no such thing")
        return 1.0

    bench = Bench(tmp_path, table=table, steps=3, max_failed_share=0.4)
    with pytest.raises(RewardError, match="'table' failed on 8 of 16 completions of step 2"):
        run(bench.go())
    assert len(bench.steps()) == 1
    (told,) = bench.rows("warn.reward_failed")
    assert told["count"] == 8 and told["checks"] == 16 and "no such thing" in told["reason"]


def test_a_failure_in_the_ring_is_worth_no_more_than_a_wrong_answer(tmp_path) -> None:
    def table(rollout):
        if rollout.rollout_id.endswith(".1"):
            raise ValueError("no")
        return -1.0 if rollout.rollout_id.endswith(".2") else 1.0

    bench = Bench(tmp_path, table=table, steps=1)
    run(bench.go())
    assert bench.steps()[0]["reward"] == pytest.approx(1 / 3), (
        "of the three that were scored: 1, 1 and -1"
    )
