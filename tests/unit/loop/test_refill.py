"""Dynamic sampling: groups that teach nothing are replaced by further prompts, within a bound, the
same way every time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.config import FakeEngineConfig
from gyre.core.codec import encode
from gyre.core.records import Group, Score, ScorePart
from gyre.core.scores import AccuracyMetric
from gyre.loop.config import EvalConfig
from gyre.loop.refill import filter_metric, find_equal, is_equal, num_missing, why_filtered_by_score
from gyre.loop.resume import from_snapshot
from gyre.loop.stopping import StopRequest
from gyre.objectives.config import GrpoConfig, PpoConfig
from loop_cases import GROUPS_OF_4, HELD_OUT, Bench, digit_share, digits_script, turn
from unit.loop.test_assemble import rollout as sample

RIGHT = AccuracyMetric(part="answer", threshold=1.0)
DAPO = GrpoConfig(variant="dapo")


def rarely_right(rollout):
    """Right for one in five; the wrong ones differ, as a score does that has a part beside the
    answer."""
    share = digit_share(rollout)
    return 1.0 if share > 0.7 else 0.5 * share


def refilled(max_refills, **more):
    rollout = GROUPS_OF_4.model_copy(update={"max_refills": max_refills, **more})
    return {"rollout": rollout, "script": digits_script, "table": rarely_right, "objective": DAPO}


def score(right, value, outcome="ok"):
    part = ScorePart(name="answer", value=float(right), weight=1.0, reason="", outcome=outcome)
    return Score(rollout_id="x", value=value, parts=(part,))


judged = st.tuples(
    st.booleans(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(["ok", "ok", "ok", "timeout"])
)


@given(st.lists(judged, max_size=6))
def test_a_group_is_kept_where_some_scored_siblings_are_right_and_some_wrong(siblings):
    scores = [score(*one) for one in siblings]
    scored = [(right, value) for right, value, outcome in siblings if outcome == "ok"]
    assert is_equal(scores, RIGHT) == (not 0 < sum(right for right, _ in scored) < len(scored))
    assert is_equal(scores, None) == (len({value for _, value in scored}) < 2)


def test_a_failed_part_counts_for_the_filter_as_it_does_for_the_batch():
    """A function that failed is worth the least that it gave anywhere in the step."""

    def scored(value, outcome="ok"):
        parts = (("f", value, outcome), ("format", 1.0, "ok"))
        made = [ScorePart(name=n, value=v, weight=1.0, reason="", outcome=o) for n, v, o in parts]
        return Score(rollout_id="x", value=value + 1.0, parts=tuple(made))

    def group(name, *scores):
        return Group(group_id=name, rollouts=(sample(name, 0, 3),) * len(scores), scores=scores)

    wrong = group("wrong", *[scored(-1.0)] * 3, scored(0.0, "error"))
    right = group("right", *[scored(0.0)] * 3, scored(0.0, "error"))
    assert find_equal([wrong, right], None) == {"wrong"}, (
        "all at -1 in one, the failed one below the others in the other"
    )
    assert find_equal([right], None) == {"right"}


def test_what_is_only_watched_does_not_score_a_sample():
    def made(*parts):
        return tuple(
            ScorePart(name=n, value=0.0, weight=w, reason="", outcome=o) for n, w, o in parts
        )

    for parts, is_scored in (
        (made(("answer", 1.0, "timeout"), ("length", 0.0, "ok")), False),
        (made(("answer", 1.0, "timeout"), ("format", -0.1, "ok")), True),
        (made(("watched", 0.0, "ok"), ("other", 0.0, "error")), True),
        ((), True),
    ):
        assert Score(rollout_id="x", value=0.0, parts=parts).is_scored == is_scored


@given(st.integers(1, 50), st.integers(0, 50), st.integers(0, 50))
def test_what_is_missing_never_overfills_a_step(wanted, kept, in_flight):
    missing = num_missing(wanted=wanted, kept=kept, in_flight=in_flight)
    assert missing >= 0 and (missing == 0 or kept + in_flight + missing == wanted)
    assert missing or kept + in_flight >= wanted


def test_the_filter_looks_at_correctness_where_a_part_judges_it():
    assert filter_metric(DAPO, RIGHT) == RIGHT and not why_filtered_by_score(DAPO, RIGHT)
    assert filter_metric(DAPO, None) is None and "judges correctness" in why_filtered_by_score(
        DAPO, None
    )
    watched = replace(RIGHT, rewarded=False)
    assert filter_metric(
        DAPO, watched
    ) is None and "'answer' has weight 0" in why_filtered_by_score(DAPO, watched)
    by_score = GrpoConfig(variant="dapo", filter_metric="score")
    assert filter_metric(by_score, RIGHT) is None and not why_filtered_by_score(by_score, None)
    for keeps in (GrpoConfig(), PpoConfig()):
        assert filter_metric(keeps, RIGHT) is None and not why_filtered_by_score(keeps, None)


def groups_of(batch):
    groups = {}
    for sequence in batch.sequences:
        groups.setdefault(sequence.group_id, []).append(sequence.scalars["score"])
    return groups


def test_a_step_is_filled_up_with_groups_that_teach(tmp_path):
    bench = Bench(tmp_path, steps=4, **refilled(20))
    turn(bench)
    assert [len(groups_of(batch)) for batch in bench.trainer.batches] == [4] * 4
    for batch in bench.trainer.batches:
        for values in groups_of(batch).values():
            assert 0 < sum(value == 1.0 for value in values) < len(values) == 4
    asked = [request for phase, request in bench.engine.asked if phase == "rollout"]
    assert (
        len(asked) == len(bench.engine.asked) == len({request.request_id for request in asked}) > 16
    )
    assert len({request.seed for request in asked}) == len(asked)
    assert not bench.rows("rollouts.refills_exhausted")
    for step, row in enumerate(bench.steps(), 1):
        mine = [request for request in asked if request.request_id.startswith(f"{step}.")]
        assert row["sampled_per_kept"] == len(mine) / 4 and row["refilled_prompts"] == len(mine) - 4
        assert row["equal_groups_share"] == pytest.approx(1 - 4 / len(mine))
        dropped = [one["count"] for one in bench.rows("drop.equal_groups") if one["step"] == step]
        assert dropped == ([len(mine) - 4] if len(mine) > 4 else [])
        refills = [one["prompts"] for one in bench.rows("rollouts.refilled") if one["step"] == step]
        assert refills == dropped
    rewards = {row["step"]: [] for row in bench.steps()}
    for rollout in bench.seen:
        rewards[int(rollout.group_id.partition(".")[0])].append(rarely_right(rollout))
    for row in bench.steps():
        assert row["reward"] == pytest.approx(sum(rewards[row["step"]]) / len(rewards[row["step"]]))


@pytest.mark.parametrize("max_refills", [0, 1, 3])
def test_refills_end_at_their_bound_and_the_step_trains_on_what_there_is(tmp_path, max_refills):
    settings = refilled(max_refills) | {"table": lambda rollout: 0.0}
    bench = Bench(tmp_path, steps=2, **settings)
    turn(bench)
    assert len(bench.engine.asked) == 2 * 4 * (1 + max_refills)
    assert all(not batch.sequences for batch in bench.trainer.batches)
    assert [row["count"] for row in bench.rows("drop.equal_groups")] == [4 * (1 + max_refills)] * 2
    exhausted = [
        (row["rounds"], row["missing"]) for row in bench.rows("rollouts.refills_exhausted")
    ]
    assert exhausted == ([(max_refills, 4)] * 2 if max_refills else [])


def test_a_filter_by_score_keeps_what_one_by_correctness_drops(tmp_path):
    # nobody is right, everybody differs
    half_right = {"table": lambda rollout: 0.5 * digit_share(rollout)}
    by_score = GrpoConfig(variant="dapo", filter_metric="score")
    bench = Bench(
        tmp_path / "score", steps=2, **(refilled(2) | half_right | {"objective": by_score})
    )
    turn(bench)
    assert [len(groups_of(batch)) for batch in bench.trainer.batches] == [4, 4]
    other = Bench(tmp_path / "accuracy", steps=2, **(refilled(2) | half_right))
    turn(other)
    assert [len(batch.sequences) for batch in other.trainer.batches] == [0, 0]


def test_only_what_is_trained_on_goes_through_the_reference(tmp_path):
    settings = refilled(20) | {"objective": GrpoConfig(variant="dapo", kl_coef=0.1)}
    bench = Bench(tmp_path, steps=2, **settings)
    turn(bench)
    assert [call for call in bench.trainer.calls if call[1].startswith("evaluate")] == [
        ("score", "evaluate reference")
    ] * 2
    for batch in bench.trainer.batches:
        assert len(batch.sequences) == 16
        assert all(len(s.columns["reference_logprobs"]) == len(s.tokens) for s in batch.sequences)


def test_a_learnt_reward_scores_the_groups_that_are_dropped_too(tmp_path):
    bench = Bench(tmp_path, steps=2, reward_model=("learned", 1.0), **refilled(20))
    turn(bench)
    assert [len(groups_of(batch)) for batch in bench.trainer.batches] == [4, 4]
    assert all("learned" in {part["name"] for part in row["parts"]} for row in bench.sample_rows())


@pytest.mark.parametrize("cap", [0, 3], ids=["whole", "partial"])
@pytest.mark.parametrize("stop_at", [2, 4])
def test_a_resumed_run_refills_as_the_run_that_never_stopped(tmp_path, cap, stop_at):
    evaluation = EvalConfig(num_problems=len(HELD_OUT), every_steps=3)
    settings = refilled(2, max_tokens_per_iteration=cap) | {
        "steps": 6, "snapshot_every": 2, "evaluation": evaluation, "table": rarely_right,
    }  # fmt: skip
    straight = Bench(tmp_path / "straight", **settings)
    whole = turn(straight)
    first = Bench(tmp_path / "stopped", **settings)
    turn(first)
    second = Bench(tmp_path / "stopped", **settings)
    resumed = turn(second, kept=first.shelf.kept[stop_at])
    assert sum(
        row["prompts"] for row in straight.rows("rollouts.refilled") if row["step"] > stop_at
    )
    assert second.steps() == straight.steps() and second.sample_rows() == straight.sample_rows()
    assert resumed.source == whole.source
    assert in_flight(second.shelf.kept[6]) == in_flight(straight.shelf.kept[6])
    assert bool(in_flight(straight.shelf.kept[6])) == bool(cap)


@pytest.mark.parametrize("cap", [0, 3], ids=["whole", "partial"])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_step_broken_off_amid_refills_goes_on_with_its_rounds(tmp_path, cap, step):
    """The stop, which leaves no time, comes as a completion is scored in the first refill of this
    step or later."""
    settings = refilled(2, max_tokens_per_iteration=cap) | {"steps": 6, "table": rarely_right}
    straight = Bench(tmp_path / "straight", **settings)
    turn(straight)
    stop = StopRequest(deadline_s=0.0)

    def judge(rollout):
        rounds = {
            int(group.group_id.split(".")[0]) for group in stopped.ring.in_flight if group.refill
        }
        if max(rounds, default=0) >= step:
            stop.ask()
        return rarely_right(rollout)

    slow = FakeEngineConfig(token_delay_s=0.003)
    stopped = Bench(tmp_path / "stopped", stop=stop, engine=slow, **(settings | {"table": judge}))
    turn(stopped)
    assert stopped.rows("step.broken_off") and any(group.refill for group in stopped.ring.in_flight)
    again = Bench(tmp_path / "stopped", **settings)
    turn(again, kept=stopped.shelf.kept[max(stopped.shelf.kept)])
    assert again.steps() == straight.steps() and again.sample_rows() == straight.sample_rows()
    assert [row["missing"] for row in again.rows("rollouts.refills_exhausted")] == [
        row["missing"] for row in straight.rows("rollouts.refills_exhausted")
    ]


def in_flight(kept):
    """To the last bit; scores say when they were made, which may differ."""
    groups = []
    for group in from_snapshot(json.loads(kept[0]), kept[1]).in_flight:
        scores = {i: replace(one, started_s=0.0, ended_s=0.0) for i, one in group.scores.items()}
        groups.append(encode(replace(group, scores=scores)))
    return groups


def test_a_step_with_partial_rollouts_holds_no_more_groups_than_it_was_given(tmp_path):
    bench = Bench(tmp_path, steps=8, snapshot_every=1, **refilled(5, max_tokens_per_iteration=3))
    turn(bench)
    for step, batch in enumerate(bench.trainer.batches, 1):
        state, blobs, _ = bench.shelf.kept[step]
        carried = from_snapshot(json.loads(state), blobs)
        assert len(groups_of(batch)) + len(carried.in_flight) <= 4
    assert bench.rows("rollouts.refilled")


def test_a_filter_without_a_judge_says_that_it_looks_at_the_score(tmp_path):
    bench = Bench(tmp_path, steps=1, accuracy=None, **refilled(1))
    turn(bench)
    assert len(bench.rows("fallback.filter_by_score")) == 1
    judged = Bench(tmp_path / "judged", steps=1, **refilled(1))
    turn(judged)
    assert not judged.rows("fallback.filter_by_score")
