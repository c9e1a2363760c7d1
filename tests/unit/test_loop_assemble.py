"""Groups to batches: what is laid out where, and what is counted."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.records import Evaluation, Group, Prompt, Rollout, Sampling, Score, ScorePart
from gyre.loop.accuracy import AccuracyMetric
from gyre.loop.assemble import Passes, add_part, assemble, bare_batch, reward_metrics
from gyre.objectives.config import DpoConfig, GrpoConfig, PpoConfig

PROMPT = Prompt(prompt_id="p", tokens=np.array([7, 8], dtype=np.int32), text="7+8=", task={}, source="test")
SAMPLING = Sampling(temperature=0.7, max_tokens=9)


def rollout(group: str, sample: int, length: int, finish: str = "stop") -> Rollout:
    tokens = np.arange(2 + length, dtype=np.int32)
    chosen = np.arange(2 + length) >= 2
    return Rollout(
        rollout_id=f"{group}.{sample}", group_id=group, prompt=PROMPT, tokens=tokens, sampled=chosen,
        logprobs=np.where(chosen, np.float32(-1.0), np.float32(0.0)), raw_logprobs=np.zeros(2 + length, np.float32),
        versions=np.where(chosen, 3, -1).astype(np.int32), sampling=SAMPLING, finish=finish, text="x",  # type: ignore[arg-type]
    )  # fmt: skip


def group(name: str, values: list[float], lengths: list[int] | None = None, outcome: str = "ok") -> Group:
    rollouts = [rollout(name, i, (lengths or [3] * len(values))[i]) for i in range(len(values))]
    scores = [
        Score(
            rollout_id=r.rollout_id,
            value=value,
            parts=(ScorePart(name="answer", value=value, weight=1.0, reason="", outcome=outcome),),  # type: ignore[arg-type]
        )
        for r, value in zip(rollouts, values, strict=True)
    ]
    return Group(group_id=name, rollouts=tuple(rollouts), scores=tuple(scores))


values = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=5)


@given(st.lists(values, min_size=1, max_size=5), st.sampled_from(["grpo", "dapo", "rloo", "reinforce_pp"]))
def test_every_rollout_is_in_the_batch_or_counted_as_dropped(groups_values, variant):
    groups = [group(str(i), scores) for i, scores in enumerate(groups_values)]
    made = assemble(GrpoConfig(variant=variant), groups, Passes(), step=4)
    equal = [g for g in groups if len({s.value for s in g.scores}) == 1]
    drops = variant == "dapo"
    assert made.num_equal_groups == len(equal) and made.num_dropped_groups == (len(equal) if drops else 0)
    kept = [g for g in groups if not (drops and g in equal)]
    want = [r.group_id for g in kept for r in g.rollouts]
    assert [s.group_id for s in made.batch.sequences] == want and made.batch.step == 4
    assert made.metrics == {"equal_groups_share": len(equal) / len(groups)}
    for sequence in made.batch.sequences:
        assert not sequence.columns["advantages"][:2].any(), "a prompt token got an advantage"
        assert sequence.temperature == 0.7
        assert sequence.columns["advantages"].dtype == np.float32


def test_no_groups_make_an_empty_batch():
    for objective in (GrpoConfig(variant="dapo"), PpoConfig()):
        made = assemble(objective, [], Passes(), step=1)
        assert made.batch.sequences == () and made.metrics == {}


def test_passes_go_to_the_rollout_that_they_are_of():
    groups = [group("a", [0.0, 1.0], [1, 2]), group("b", [1.0, 0.0], [3, 1])]
    bare = bare_batch(groups, step=1)
    numbered = tuple(np.full(len(s.tokens), i, np.float32) for i, s in enumerate(bare.sequences))
    made = assemble(
        GrpoConfig(kl_coef=0.1), groups, Passes(reference=Evaluation(which="reference", per_token=numbered)), step=1
    )
    for i, sequence in enumerate(made.batch.sequences):
        assert sequence.columns["reference_logprobs"].tolist() == [i] * len(sequence.tokens)
        assert sequence.tokens is bare.sequences[i].tokens


def test_kl_in_the_reward_is_between_the_trainers_own_logprobs_and_reported_per_token():
    """The engine's are -1.0: what it rounds otherwise is no KL."""
    groups = [group("a", [0.0, 1.0], [1, 3])]
    bare = bare_batch(groups, step=1)

    def evaluation(which: Literal["policy", "reference"], value: float) -> Evaluation:
        return Evaluation(
            which=which, per_token=tuple(np.full(len(s.tokens), value, np.float32) for s in bare.sequences)
        )

    for policy, clamp, kl, bounded in ((-1.25, 0.0, 0.25, 0.0), (-1.5, 0.0, 0.0, 0.0), (-1.25, 0.125, 0.125, 1.0)):
        config = GrpoConfig(variant="reinforce_pp", kl_coef=0.1, kl_clamp=clamp)
        passes = Passes(policy=evaluation("policy", policy), reference=evaluation("reference", -1.5))
        made = assemble(config, groups, passes, step=1)
        assert made.metrics["kl_reference"] == pytest.approx(kl)  # k1 at each of the four tokens
        assert made.metrics["kl_bounded_fraction"] == bounded
        assert all((s.columns["policy_logprobs"] == policy).all() for s in made.batch.sequences)


def test_a_cut_off_completion_is_worth_what_the_critic_sees_after_it():
    cut = Group(group_id="a", rollouts=(rollout("a", 0, 2, "length"),), scores=group("a", [0.0]).scores)
    ended = Group(group_id="a", rollouts=(rollout("a", 0, 2, "stop"),), scores=group("a", [0.0]).scores)
    critic = Evaluation(which="critic", per_token=(np.zeros(4, np.float32),), per_sequence=np.array([0.8], np.float32))
    config = PpoConfig(gamma=1.0, lam=1.0, whiten=False)
    returns = [
        assemble(config, [g], Passes(critic=critic), step=1).batch.sequences[0].columns["returns"] for g in (cut, ended)
    ]
    np.testing.assert_allclose(returns[0], [0, 0, 0.8, 0.8], rtol=1e-6)
    np.testing.assert_allclose(returns[1], [0, 0, 0, 0])


def test_a_reward_model_s_nan_is_a_labelled_zero():
    groups = [group("a", [1.0, 0.0]), group("b", [0.0])]
    made = add_part(groups, "learnt", 2.0, np.array([0.5, np.nan, -1.0]))
    assert [s.value for g in made for s in g.scores] == [2.0, 0.0, -2.0]
    assert [s.parts[-1].outcome for g in made for s in g.scores] == ["ok", "invalid", "ok"]
    assert [len(s.parts) for g in groups for s in g.scores] == [1, 1, 1], "the groups given were changed"


def test_reward_metrics_are_means_over_rollouts():
    groups = [group("a", [1.0, 0.0], [2, 4]), group("b", [0.5], [6])]
    metrics = reward_metrics(groups, AccuracyMetric(part="answer", threshold=1.0))
    assert metrics == pytest.approx(
        {"reward/answer": 0.5, "reward": 0.5, "train_accuracy": 1 / 3, "length": 4.0, "cut_off_share": 0.0}
    )
    assert "train_accuracy" not in reward_metrics(groups, None)


def test_pairs_keep_the_reference_of_their_own_rollouts():
    groups = [group("a", [0.5, 0.5]), group("b", [0.0, 1.0, 0.5]), group("c", [1.0, 0.0])]
    bare = bare_batch(groups, step=1)
    numbered = tuple(np.full(len(s.tokens), i, np.float32) for i, s in enumerate(bare.sequences))
    reference = Evaluation(which="reference", per_token=numbered)
    made = assemble(DpoConfig(pairs="online"), groups, Passes(reference=reference), step=1)
    assert [s.columns["reference_logprobs"][0] for s in made.batch.sequences] == [3, 2, 5, 6]
    assert [(s.group_id, s.pair_id, s.scalars["score"]) for s in made.batch.sequences] == [
        ("b", 0, 1.0), ("b", 0, 0.0), ("c", 1, 1.0), ("c", 1, 0.0),
    ]  # fmt: skip
    assert made.num_groups_without_pair == 1
