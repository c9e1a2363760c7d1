"""The ring turns on fakes: phases in order, honest versions, nothing lost, everything counted."""

from __future__ import annotations

import numpy as np
import pytest

from fakes.config import FakeTrainerConfig
from gyre.loop.config import EvalConfig
from gyre.objectives.config import DpoConfig, GrpoConfig, PpoConfig
from gyre.observability.events import count_events, read_events
from gyre.observability.intervals import wilson_interval
from loop_cases import GROUPS_OF_4, HELD_OUT, RIGHT, TRAIN, Bench, digit_share, digits_script, turn

EVALUATION = EvalConfig(num_problems=len(HELD_OUT), every_steps=2)


def test_phases_come_in_order_and_each_room_is_called_in_its_own(tmp_path):
    bench = Bench(tmp_path, objective=GrpoConfig(kl_coef=0.1), evaluation=EVALUATION, steps=3)
    turn(bench)
    step = ["rollout", "score", "train", "handover"]
    want = [("handover", 0), ("evaluate", 0)]
    for number in (1, 2, 3):
        want += [(phase, number) for phase in step]
        want += [("evaluate", number)] if number in (2, 3) else []
    assert bench.gate.seen == want
    assert {phase for phase, what in bench.trainer.calls if what == "step"} == {"train"}
    assert {phase for phase, what in bench.trainer.calls if what == "evaluate reference"} == {
        "score"
    }
    assert {phase for phase, what in bench.trainer.calls if what == "register"} == {"handover"}
    assert {phase for phase, _ in bench.engine.asked} == {"rollout", "evaluate"}
    assert {
        phase for phase, what in bench.engine.calls if what.startswith(("prepare", "commit"))
    } == {"handover"}


def test_the_policy_is_asked_for_its_own_logprobs_where_the_kl_is_in_the_reward(tmp_path):
    for number, (objective, asked) in enumerate(
        [
            (GrpoConfig(variant="reinforce_pp", kl_coef=0.1), True),
            (PpoConfig(kl_coef=0.1), True),
            (PpoConfig(), False),
            (GrpoConfig(kl_coef=0.1), False),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        unlike_the_engine = FakeTrainerConfig(logprob=-0.75)  # which says -0.5
        bench = Bench(folder, objective=objective, steps=2, trainer=unlike_the_engine)
        turn(bench)
        phases = [phase for phase, what in bench.trainer.calls if what == "evaluate policy"]
        assert phases == (["score"] * 2 if asked else [])
        if asked:
            assert [row["kl_reference"] for row in bench.steps()] == [0.0, 0.0]


def test_every_token_carries_the_version_that_the_engine_had(tmp_path):
    bench = Bench(tmp_path, steps=4)
    turn(bench)
    assert bench.seen
    for rollout in bench.seen:
        step = int(rollout.group_id.partition(".")[0])
        before = next((row["version"] for row in bench.steps() if row["step"] == step - 1), 0)
        prompt = len(rollout.prompt.tokens)
        assert rollout.versions[:prompt].tolist() == [-1] * prompt
        assert set(rollout.versions[prompt:].tolist()) == {before}
        assert rollout.sampled.tolist() == [t >= prompt for t in range(len(rollout.tokens))]
        assert not rollout.logprobs[:prompt].any() and rollout.logprobs[prompt:].all()


def test_the_policy_that_learns_is_seen_to_learn(tmp_path):
    bench = Bench(tmp_path, evaluation=EVALUATION, steps=6)
    progress = turn(bench)
    numbers = progress.evals["accuracy"]
    assert progress.done and progress.step == 6
    assert numbers["n"] == len(HELD_OUT)
    assert numbers["before"] < 0.7 < 0.8 < numbers["after"]
    rows = bench.rows("eval.done")
    assert [(row["step"], row["when"]) for row in rows] == [
        (0, "before"),
        (2, "after"),
        (4, "after"),
        (6, "after"),
    ]
    assert rows[0]["accuracy"] == numbers["before"] and rows[-1]["accuracy"] == numbers["after"]


def test_an_accuracy_comes_with_its_meaning_and_its_wilson_interval(tmp_path):
    bench = Bench(tmp_path, evaluation=EVALUATION, steps=2)
    numbers = turn(bench).evals["accuracy"]
    row, n = bench.rows("eval.done")[-1], len(HELD_OUT)
    assert row["meaning"] == numbers["meaning"] == RIGHT.meaning
    assert row["interval"] == numbers["interval"] == list(wilson_interval(row["accuracy"], n) or ())
    assert row["standard_error"] == pytest.approx(
        (row["accuracy"] * (1 - row["accuracy"]) / n) ** 0.5
    )
    assert numbers["before_interval"] == bench.rows("eval.done")[0]["interval"]


def test_without_a_part_that_judges_the_mean_reward_is_named_with_its_error(tmp_path):
    """A reward that is no 0/1 answer: nothing in the log calls it an accuracy."""
    values = iter(range(1000))
    bench = Bench(
        tmp_path,
        evaluation=EVALUATION,
        steps=2,
        accuracy=None,
        table=lambda _: next(values) / 7 - 3,
    )
    progress = turn(bench)
    assert set(progress.evals) == {"reward"}
    for row in bench.rows("eval.done"):
        assert (
            row["name"] == "reward"
            and "accuracy" not in row
            and row["reward"] == row["detail"]["reward"]
        )
        low, high = row["interval"]
        half = 1.96 * row["standard_error"]
        assert (low, high) == (
            pytest.approx(row["reward"] - half),
            pytest.approx(row["reward"] + half),
        )
    numbers = progress.evals["reward"]
    assert (numbers["before"], numbers["after"]) == tuple(
        row["reward"] for row in bench.rows("eval.done")
    )
    assert all("train_accuracy" not in row for row in bench.steps())
    # Values in a row, i / 7 - 3: the standard deviation of 0 … n-1 is sqrt(n (n + 1) / 12)
    n = len(HELD_OUT)
    assert bench.rows("eval.done")[0]["standard_error"] == pytest.approx(
        (n * (n + 1) / 12 / n) ** 0.5 / 7
    )


def test_a_step_says_how_sure_its_mean_reward_is(tmp_path):
    bench = Bench(tmp_path, steps=1, table=digit_share, script=digits_script)
    turn(bench)
    (row,) = bench.rows("step.done")
    means = [
        np.mean([digit_share(rollout) for rollout in bench.seen if rollout.group_id == f"1.{i}"])
        for i in range(4)
    ]
    assert row["num_prompts"] == 4
    assert row["reward_standard_error"] == pytest.approx(np.std(means, ddof=1) / 2)


def test_the_batch_is_what_was_sampled_and_scored(tmp_path):
    bench = Bench(tmp_path, objective=GrpoConfig(), steps=1)
    turn(bench)
    (batch,) = bench.trainer.batches
    assert [s.group_id for s in batch.sequences] == [
        f"1.{place}" for place in range(4) for _ in range(4)
    ]
    by_tokens = {tuple(rollout.tokens.tolist()): rollout for rollout in bench.seen}
    for sequence in batch.sequences:
        rollout = by_tokens[tuple(sequence.tokens.tolist())]
        right = rollout.text == rollout.prompt.task["answer"]
        assert sequence.scalars["score"] == float(right)
        assert sequence.columns["loss_mask"].tolist() == rollout.sampled.tolist()
        np.testing.assert_array_equal(sequence.columns["logprobs"], rollout.logprobs)
    for place in range(4):
        group = [s for s in batch.sequences if s.group_id == f"1.{place}"]
        scores = np.array([s.scalars["score"] for s in group])
        advantages = np.array([s.columns["advantages"][s.columns["loss_mask"]][0] for s in group])
        assert np.all(np.sign(advantages) == np.sign(scores - scores.mean()))


def test_equal_groups_are_dropped_and_counted(tmp_path):
    bench = Bench(
        tmp_path, objective=GrpoConfig(variant="dapo"), table=lambda rollout: 1.0, steps=2
    )
    turn(bench)
    assert [row["count"] for row in bench.rows("drop.equal_groups")] == [4, 4]
    assert all(not batch.sequences for batch in bench.trainer.batches)
    assert [row["num_updates"] for row in bench.steps()] == [0, 0]
    assert [row["equal_groups_share"] for row in bench.steps()] == [1.0, 1.0]
    assert [row["reward"] for row in bench.steps()] == [1.0, 1.0]


def test_only_the_equal_groups_are_dropped(tmp_path):
    first = TRAIN[0].text

    def table(rollout):
        return (
            1.0
            if rollout.prompt.text == first
            else float(rollout.rollout_id.endswith((".0", ".1")))
        )

    kept = Bench(tmp_path / "keep", objective=GrpoConfig(variant="grpo"), table=table, steps=8)
    dropped = Bench(tmp_path / "drop", objective=GrpoConfig(variant="dapo"), table=table, steps=8)
    turn(kept)
    turn(dropped)
    texts = {tuple(prompt.tokens.tolist()): prompt.text for prompt in TRAIN}

    def prompts(bench):
        seen = set()
        for batch in bench.trainer.batches:
            for sequence in batch.sequences:
                start = int(np.argmax(sequence.columns["loss_mask"]))
                seen.add(texts[tuple(sequence.tokens[:start].tolist())])
        return seen

    assert sum(row["count"] for row in dropped.rows("drop.equal_groups")) >= 1
    assert not kept.rows("drop.equal_groups")
    assert prompts(kept) - prompts(dropped) == {first}


def test_failed_rewards_are_counted_by_name_and_outcome(tmp_path):
    def table(rollout):
        if rollout.rollout_id.endswith(".1"):
            raise ValueError("no such thing")
        return float("nan") if rollout.rollout_id.endswith(".2") else 1.0

    bench = Bench(tmp_path, table=table, steps=1)
    turn(bench)
    counted = {row["what"]: row["count"] for row in bench.rows("warn.reward_failed")}
    assert counted == {"table error": 4, "table invalid": 4}
    assert [row["count"] for row in bench.rows("drop.unscored")] == [8]
    assert bench.steps()[0]["reward"] == 1.0 and bench.steps()[0]["unscored_share"] == 0.5
    assert count_events(read_events(bench.log))["warn.reward_failed"] == 8


def test_failed_rewards_of_an_evaluation_are_counted_too(tmp_path):
    def table(rollout):
        assert not rollout.group_id.startswith("0."), "only held-out problems fail"
        return 1.0

    bench = Bench(tmp_path, table=table, evaluation=EvalConfig(num_problems=10), steps=1)
    progress = turn(bench)
    assert progress.evals["accuracy"]["after"] == 0.0
    counted = [
        (row["where"], row["what"], row["count"]) for row in bench.rows("warn.reward_failed")
    ]
    assert counted == [("evaluation", "table error", len(HELD_OUT))] * 2


def test_online_dpo_trains_on_pairs_of_best_and_worst(tmp_path):
    objective = DpoConfig(pairs="online", pairs_per_group=2)
    bench = Bench(tmp_path, objective=objective, script=digits_script, table=digit_share, steps=2)
    turn(bench)
    for batch in bench.trainer.batches:
        assert batch.sequences
        pairs = [batch.sequences[i : i + 2] for i in range(0, len(batch.sequences), 2)]
        for number, (chosen, rejected) in enumerate(pairs):
            assert (chosen.pair_id, rejected.pair_id) == (number, number)
            assert (chosen.scalars["chosen"], rejected.scalars["chosen"]) == (1.0, 0.0)
            assert chosen.group_id == rejected.group_id
            assert chosen.scalars["score"] > rejected.scalars["score"]
            assert (
                "reference_logprobs" in chosen.columns and "reference_logprobs" in rejected.columns
            )
    assert ("score", "evaluate reference") in bench.trainer.calls


def test_online_dpo_counts_groups_without_a_pair(tmp_path):
    bench = Bench(tmp_path, objective=DpoConfig(pairs="online"), table=lambda rollout: 0.0, steps=1)
    turn(bench)
    assert [row["count"] for row in bench.rows("drop.groups_without_pair")] == [4]
    assert bench.trainer.batches[0].sequences == ()


def test_ppo_brings_values_and_returns(tmp_path):
    bench = Bench(
        tmp_path, objective=PpoConfig(kl_coef=0.1), script=digits_script, table=digit_share, steps=1
    )
    turn(bench)
    for sequence in bench.trainer.batches[0].sequences:
        assert {"advantages", "returns", "values", "reference_logprobs"} <= set(sequence.columns)
        off = ~sequence.columns["loss_mask"]
        assert (
            not sequence.columns["advantages"][off].any()
            and not sequence.columns["returns"][off].any()
        )
    # the fake's policy and engine agree with its reference, so the KL in the reward is none
    assert bench.steps()[0]["kl_reference"] == pytest.approx(0.0)


def test_a_reward_model_adds_its_part(tmp_path):
    bench = Bench(
        tmp_path,
        objective=GrpoConfig(),
        reward_model=("learned", 2.0),
        table=lambda r: 0.5,
        steps=1,
    )
    turn(bench)
    assert ("score", "evaluate reward") in bench.trainer.calls
    parts = {part["name"]: part for part in bench.sample_rows()[0]["parts"]}
    assert set(parts) == {"table", "learned"} and parts["learned"]["weight"] == 2.0
    assert bench.steps()[0]["reward/learned"] == 0.0 and bench.steps()[0]["reward"] == 0.5


def test_the_engine_is_ended_before_scoring_and_started_on_dummy_weights(tmp_path):
    bench = Bench(
        tmp_path,
        restart_engine=True,
        evaluation=EVALUATION,
        objective=GrpoConfig(kl_coef=0.1),
        steps=2,
    )
    turn(bench)
    versions = [row["version"] for row in bench.steps()]
    want = [
        ("idle", "start dummy=False"),
        ("handover", "prepare 0"),
        ("handover", "commit 0 drain"),
    ]
    for version in versions:
        want += [("rollout", "terminate"), ("handover", "start dummy=True")]
        want += [("handover", f"prepare {version}"), ("handover", f"commit {version} drain")]
    assert bench.engine.calls == want
    assert (
        len(bench.rows("handover.engine_terminated"))
        == len(bench.rows("handover.engine_started"))
        == 2
    )


def test_published_versions_are_those_of_the_trainer(tmp_path):
    bench = Bench(tmp_path, steps=3)
    turn(bench)
    published = [(row["step"], row["version"]) for row in bench.rows("weights.published")]
    assert published == [(0, 0), *((row["step"], row["version"]) for row in bench.steps())]


def test_the_model_is_exported_at_each_interval_while_its_weights_are_there(tmp_path):
    bench = Bench(tmp_path, steps=5, export_every=2)
    turn(bench)
    assert bench.exports.made == [("handover", 2), ("handover", 4)]
    (tmp_path / "none").mkdir()
    none = Bench(tmp_path / "none", steps=2)
    turn(none)
    assert not none.exports.made


def test_a_resumed_run_publishes_with_a_greater_epoch(tmp_path):
    first = Bench(tmp_path, steps=2)
    turn(first)
    second = Bench(tmp_path, steps=3)
    turn(second, kept=first.shelf.kept[2])
    rows = second.rows("weights.published")
    epochs = [(row["step"], row["attempt"], row["epoch"]) for row in rows]
    assert epochs == [(0, 1, 1), (1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 2, 2)]


def test_the_overlap_account_is_about_scoring_time(tmp_path):
    slow = Bench(tmp_path / "slow", steps=2, scorer_delay_s=0.03)
    turn(slow)
    for row in slow.rows("reward.window"):
        assert 0.0 < row["hidden_s"] <= row["rule_s"]
        assert row["rollout_s"] + row["reference_s"] == pytest.approx(row["hidden_s"])
        assert row["rule_s"] >= 0.025
    late = {f"1.{place}.{sample}": 0.3 for place in range(4) for sample in range(4)}
    # no pass that could hide them after the rollouts
    exposed = Bench(tmp_path / "exposed", steps=1, delays_s=late)
    turn(exposed)
    (row,) = exposed.rows("reward.window")
    assert row["hidden_s"] < row["rule_s"] and row["rule_s"] >= 0.25


def test_seeds_decide_everything(tmp_path):
    first, second = Bench(tmp_path / "a", steps=3), Bench(tmp_path / "b", steps=3)
    turn(first)
    turn(second)
    assert first.steps() == second.steps() and first.sample_rows() == second.sample_rows()


def test_a_group_is_one_request_whose_completions_share_the_prompt(tmp_path):
    bench = Bench(tmp_path, steps=1)
    turn(bench)
    asked = [request for phase, request in bench.engine.asked if phase == "rollout"]
    assert [(request.request_id, request.sampling.n) for request in asked] == [
        (f"1.{place}", 4) for place in range(4)
    ]
    assert len({request.seed for request in asked}) == 4
    assert all(request.sampling.max_tokens == GROUPS_OF_4.max_tokens for request in asked)
