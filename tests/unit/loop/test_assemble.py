"""Groups to batches: what is laid out where, and what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.records import Evaluation, Group, Prompt, Rollout, Sampling, Score, ScorePart
from gyre.core.scores import AccuracyMetric
from gyre.loop.assemble import (
    Passes,
    add_part,
    assemble,
    bare_batch,
    num_unscored,
    refill_metrics,
    reward_error,
    reward_metrics,
)
from gyre.loop.refill import StepRollouts
from gyre.objectives.api import denominator
from gyre.objectives.config import DpoConfig, GrpoConfig, PpoConfig

PROMPT = Prompt(
    prompt_id="p", tokens=np.array([7, 8], dtype=np.int32), text="7+8=", task={}, source="test"
)
SAMPLING = Sampling(temperature=0.7, max_tokens=9)


def rollout(group: str, sample: int, length: int, finish: str = "stop") -> Rollout:
    tokens = np.arange(2 + length, dtype=np.int32)
    chosen = np.arange(2 + length) >= 2
    return Rollout(
        rollout_id=f"{group}.{sample}",
        group_id=group,
        prompt=PROMPT,
        tokens=tokens,
        sampled=chosen,
        logprobs=np.where(chosen, np.float32(-1.0), np.float32(0.0)),
        raw_logprobs=np.zeros(2 + length, np.float32),
        versions=np.where(chosen, 3, -1).astype(np.int32),
        sampling=SAMPLING,
        finish=finish,
        text="x",  # type: ignore[arg-type]
    )


def group(
    name: str, values: list[float], lengths: list[int] | None = None, outcome: str = "ok"
) -> Group:
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


@given(
    st.lists(values, min_size=1, max_size=5),
    st.sampled_from(["grpo", "dapo", "rloo", "reinforce_pp"]),
)
def test_every_rollout_is_in_the_batch_or_counted_as_dropped(groups_values, variant):
    groups = [group(str(i), scores) for i, scores in enumerate(groups_values)]
    made = assemble(GrpoConfig(variant=variant), groups, Passes(), step=4)
    equal = [g for g in groups if len({s.value for s in g.scores}) == 1]
    drops = variant == "dapo"
    assert made.num_equal_groups == len(equal) and made.num_dropped_groups == (
        len(equal) if drops else 0
    )
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


def test_logprobs_of_another_kind_than_the_trainers_are_not_trained_on():
    raw = replace(rollout("a", 0, 3), logprob_kind="raw")
    made = replace(group("a", [1.0]), rollouts=(raw,))
    with pytest.raises(AssertionError, match=r"has raw log-probs, the trainer's are processed"):
        bare_batch([made], step=1)


def test_passes_go_to_the_rollout_that_they_are_of():
    groups = [group("a", [0.0, 1.0], [1, 2]), group("b", [1.0, 0.0], [3, 1])]
    bare = bare_batch(groups, step=1)
    numbered = tuple(np.full(len(s.tokens), i, np.float32) for i, s in enumerate(bare.sequences))
    made = assemble(
        GrpoConfig(kl_coef=0.1),
        groups,
        Passes(reference=Evaluation(which="reference", per_token=numbered)),
        step=1,
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
            which=which,
            per_token=tuple(np.full(len(s.tokens), value, np.float32) for s in bare.sequences),
        )

    for policy, clamp, kl, bounded in (
        (-1.25, 0.0, 0.25, 0.0),
        (-1.5, 0.0, 0.0, 0.0),
        (-1.25, 0.125, 0.125, 1.0),
    ):
        config = GrpoConfig(variant="reinforce_pp", kl_coef=0.1, kl_clamp=clamp)
        passes = Passes(
            policy=evaluation("policy", policy), reference=evaluation("reference", -1.5)
        )
        made = assemble(config, groups, passes, step=1)
        assert made.metrics["kl_reference"] == pytest.approx(kl)  # k1 at each of the four tokens
        assert made.metrics["kl_bounded_fraction"] == bounded
        assert all((s.columns["policy_logprobs"] == policy).all() for s in made.batch.sequences)


def cut_off(groups: list[Group], *ids: str) -> list[Group]:
    """The same groups, in which these completions reached max_tokens."""
    return [
        replace(
            g,
            rollouts=tuple(
                replace(r, finish="length") if r.rollout_id in ids else r for r in g.rollouts
            ),
        )
        for g in groups
    ]


def values_of(groups: list[Group], value: float, last: float) -> Passes:
    bare = bare_batch(groups, step=1).sequences
    per_token = tuple(np.full(len(s.tokens), value, np.float32) for s in bare)
    return Passes(
        critic=Evaluation(
            which="critic", per_token=per_token, per_sequence=np.full(len(bare), last)
        )
    )


@pytest.mark.parametrize("score", [0.0, 1.0, -1.0])
def test_a_cut_off_completion_ends_at_its_last_token_as_any_other(score):
    """verl core_algos.compute_gae_advantage_return, TRL's PPO, OpenRLHF: the value after the last
    token is 0."""
    groups = [group("a", [score]), group("b", [score])]
    config = PpoConfig(gamma=1.0, lam=0.9, whiten=False)
    made = assemble(
        config, cut_off(groups, "a.0"), values_of(groups, 0.8, 0.8), step=1
    ).batch.sequences
    for column in ("returns", "advantages"):
        np.testing.assert_array_equal(made[0].columns[column], made[1].columns[column])
    assert made[0].columns["advantages"][-1] == pytest.approx(score - 0.8)


def test_bootstrap_truncated_adds_the_value_after_the_last_token():
    groups = [group("a", [0.25]), group("b", [0.25])]
    config = PpoConfig(gamma=0.5, lam=1.0, whiten=False, bootstrap_truncated=True)
    made = assemble(
        config, cut_off(groups, "a.0"), values_of(groups, 0.0, 0.8), step=1
    ).batch.sequences
    np.testing.assert_allclose(
        made[0].columns["returns"][2:], [0.65 / 4, 0.65 / 2, 0.65], rtol=1e-6
    )
    np.testing.assert_allclose(
        made[1].columns["returns"][2:], [0.25 / 4, 0.25 / 2, 0.25], rtol=1e-6
    )


def with_outcomes(values: list[float], outcomes: list[str], name: str = "a") -> Group:
    made = group(name, values)
    scores = [
        replace(s, parts=(replace(s.parts[0], outcome=o),))
        for s, o in zip(made.scores, outcomes, strict=True)
    ]
    return replace(made, scores=tuple(scores))


def advantages_of(made) -> dict[str, list[float]]:
    """By group: the advantage of each sequence's first sampled token."""
    found: dict[str, list[float]] = {}
    for s in made.batch.sequences:
        found.setdefault(s.group_id, []).append(
            float(s.columns["advantages"][s.columns["loss_mask"]][0])
        )
    return found


OUTCOMES = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0]),
        st.sampled_from(["ok", "ok", "timeout", "error", "invalid"]),
    ),
    min_size=1,
    max_size=5,
)
ONLINE = [
    *(GrpoConfig(variant=v) for v in ("grpo", "dapo", "rloo", "reinforce_pp")),
    GrpoConfig(scale="batch_std", equal_groups="drop"), PpoConfig(), PpoConfig(whiten=False),
]  # fmt: skip


@given(st.lists(OUTCOMES, min_size=1, max_size=5), st.sampled_from(ONLINE))
def test_what_no_part_could_score_is_as_if_it_had_never_been_sampled(made_of, config):
    """Whatever value a failed part has, and for every objective: columns, order and statistics."""
    groups = [
        with_outcomes([v for v, _ in g], [o for _, o in g], str(i)) for i, g in enumerate(made_of)
    ]
    without = [
        replace(
            g,
            rollouts=tuple(r for r, s in zip(g.rollouts, g.scores, strict=True) if s.is_scored),
            scores=tuple(s for s in g.scores if s.is_scored),
        )
        for g in groups
    ]
    numbers = iter(np.linspace(-1, 1, sum(len(g.rollouts) for g in groups)).tolist())
    values = {r.rollout_id: next(numbers) for g in groups for r in g.rollouts}

    def passes(of: list[Group]) -> Passes:
        per_token = tuple(
            np.full(len(r.tokens), values[r.rollout_id], np.float32) for g in of for r in g.rollouts
        )
        return Passes(critic=Evaluation(which="critic", per_token=per_token))

    whole, less = (
        assemble(config, g, passes(g) if config.kind == "ppo" else Passes(), step=1)
        for g in (groups, without)
    )
    assert len(whole.batch.sequences) == len(less.batch.sequences)
    for one, other in zip(whole.batch.sequences, less.batch.sequences, strict=True):
        assert (
            one.group_id == other.group_id
            and one.scalars == other.scalars
            and one.columns.keys() == other.columns.keys()
        )
        for name in one.columns:
            np.testing.assert_array_equal(one.columns[name], other.columns[name])
    assert num_unscored(groups) == sum(outcome != "ok" for g in made_of for _, outcome in g)
    assert whole.num_equal_groups == sum(len({v for v, o in g if o == "ok"}) < 2 for g in made_of)


def test_a_timeout_is_never_the_best_of_its_group():
    made = assemble(
        GrpoConfig(),
        [with_outcomes([-1.0, -1.0, 1.0, 0.0], ["ok", "ok", "ok", "timeout"])],
        Passes(),
        step=1,
    )
    assert advantages_of(made)["a"] == pytest.approx([-0.57735, -0.57735, 1.1547], abs=1e-4)
    alone = assemble(GrpoConfig(), [with_outcomes([1.0, 0.0], ["ok", "error"])], Passes(), step=1)
    assert advantages_of(alone) == {"a": [0.0]}, (
        "a single scored sample has nothing to be compared with"
    )


def test_pairs_are_made_of_scored_samples():
    groups = [
        with_outcomes([1.0, 0.0, 0.5], ["timeout", "ok", "ok"]),
        with_outcomes([1.0, 0.0], ["ok", "error"], "b"),
    ]
    bare = bare_batch(groups, step=1)
    numbered = tuple(np.full(len(s.tokens), i, np.float32) for i, s in enumerate(bare.sequences))
    reference = Passes(reference=Evaluation(which="reference", per_token=numbered))
    made = assemble(DpoConfig(pairs="online"), groups, reference, step=1)
    assert [
        (s.scalars["score"], s.columns["reference_logprobs"][0]) for s in made.batch.sequences
    ] == [
        (0.5, 2),
        (0.0, 1),
    ]
    assert made.num_groups_without_pair == 1


def test_a_learnt_reward_scores_what_the_rules_could_not_and_a_nan_does_not():
    groups = [with_outcomes([0.0, 0.0, 1.0], ["timeout", "timeout", "ok"])]
    made = assemble(
        GrpoConfig(),
        add_part(groups, "learned", 1.0, np.array([0.5, np.nan, np.nan])),
        Passes(),
        step=1,
    )
    assert [s.scalars["score"] for s in made.batch.sequences] == [0.5, 1.0]


@given(st.lists(values, min_size=1, max_size=8), st.data())
def test_statistics_of_the_batch_are_of_what_is_trained_on(groups_values, data):
    """OpenRLHF, slime and verl's DAPO filter first: over the tokens of the batch the mean is 0 and
    the deviation 1."""
    groups = [group(str(i), scores) for i, scores in enumerate(groups_values)]
    ids = [r.rollout_id for g in groups for r in g.rollouts]
    groups = cut_off(groups, *data.draw(st.sets(st.sampled_from(ids))))
    config = GrpoConfig(
        scale="batch_std", equal_groups="drop", mask_truncated=data.draw(st.booleans())
    )
    made = assemble(config, groups, Passes(), step=1)
    flat = [
        a for s in made.batch.sequences for a in s.columns["advantages"][s.columns["loss_mask"]]
    ]
    if flat and np.ptp(flat):
        assert np.mean(flat) == pytest.approx(0.0, abs=1e-5) and np.std(flat) == pytest.approx(
            1.0, abs=1e-4
        )


def test_dropped_groups_change_nothing_for_the_others():
    spread = [group(str(i), [0.0, 1.0, 0.5]) for i in range(4)]
    equal = [group(f"equal {i}", [1.0] * 3) for i in range(12)]
    config = GrpoConfig(scale="batch_std", equal_groups="drop")
    alone, among = (
        assemble(config, spread, Passes(), step=1),
        assemble(config, spread + equal, Passes(), step=1),
    )
    assert advantages_of(alone) == advantages_of(among) and among.num_dropped_groups == 12


def test_the_filter_looks_at_the_part_that_judges():
    def judged(name: str, right: list[float], length: list[float]) -> Group:
        made = group(name, right)
        scores = [
            replace(
                s,
                value=s.value + extra,
                parts=(*s.parts, ScorePart(name="length", value=extra, weight=1.0, reason="")),
            )
            for s, extra in zip(made.scores, length, strict=True)
        ]
        return replace(made, scores=tuple(scores))

    groups = [
        judged("all right", [1.0, 1.0], [0.0, -0.025]),
        judged("none", [0.0, 0.0], [0.0, -1.0]),
        judged("some", [1.0, 0.0], [-1.0, 0.0]),
    ]
    right = AccuracyMetric(part="answer", threshold=1.0)
    made = assemble(GrpoConfig(variant="dapo"), groups, Passes(), step=1, accuracy=right)
    assert list(advantages_of(made)) == ["some"] and made.num_dropped_groups == 2
    by_score = assemble(
        GrpoConfig(variant="dapo", filter_metric="score"), groups, Passes(), step=1, accuracy=right
    )
    assert list(advantages_of(by_score)) == ["all right", "none"], (
        "0 + 1 and 1 + 0 are equal scores"
    )


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed_length"])
def test_mask_truncated_leaves_the_loss_and_stays_in_the_baseline(aggregation):
    """TRL's mask_truncated_completions: the loss mask is 0, rewards are normalized before. The mean
    over sequences is verl's: a sequence without a target does not count."""
    groups = cut_off(
        [group("a", [1.0, 0.0, 0.0], [2, 4, 3]), group("b", [0.0, 1.0], [5, 1])], "a.1", "b.0"
    )
    more = {"aggregation": aggregation, "fixed_length_tokens": 9}
    masked = assemble(GrpoConfig(mask_truncated=True, **more), groups, Passes(), step=1)
    plain = assemble(GrpoConfig(**more), groups, Passes(), step=1)
    kept = [plain.batch.sequences[i] for i in (0, 2, 4)]
    assert (
        masked.num_truncated == 2
        and len(masked.batch.sequences) == 3
        and len(plain.batch.sequences) == 5
    )
    for one, other in zip(masked.batch.sequences, kept, strict=True):
        np.testing.assert_array_equal(one.columns["advantages"], other.columns["advantages"])
    counts = [int(s.columns["loss_mask"].sum()) for s in masked.batch.sequences]
    want = {"token": 2 + 3 + 1, "sequence": 3, "fixed_length": 27}[aggregation]
    assert denominator(GrpoConfig(mask_truncated=True, **more), counts) == want


def test_mask_truncated_leaves_the_critic_out_as_well():
    groups = cut_off([group("a", [1.0]), group("b", [0.0]), group("c", [0.0])], "c.0")
    made = assemble(PpoConfig(mask_truncated=True), groups, values_of(groups, 0.3, 0.3), step=1)
    alone = assemble(PpoConfig(), groups[:2], values_of(groups[:2], 0.3, 0.3), step=1)
    assert [s.group_id for s in made.batch.sequences] == ["a", "b"] and made.num_truncated == 1
    for one, other in zip(made.batch.sequences, alone.batch.sequences, strict=True):
        for name in ("advantages", "returns"):
            np.testing.assert_allclose(one.columns[name], other.columns[name], atol=1e-6)


def test_a_reward_model_s_nan_is_a_labeled_zero():
    groups = [group("a", [1.0, 0.0]), group("b", [0.0])]
    made = add_part(groups, "learned", 2.0, np.array([0.5, np.nan, -1.0]))
    assert [s.value for g in made for s in g.scores] == [2.0, 0.0, -2.0]
    assert [s.parts[-1].outcome for g in made for s in g.scores] == ["ok", "invalid", "ok"]
    assert [len(s.parts) for g in groups for s in g.scores] == [1, 1, 1], (
        "the groups given were changed"
    )


def test_reward_metrics_are_means_over_rollouts():
    groups = [group("a", [1.0, 0.0], [2, 4]), group("b", [0.5], [6])]
    metrics = reward_metrics(groups, AccuracyMetric(part="answer", threshold=1.0))
    assert metrics == pytest.approx(
        {
            "reward/answer": 0.5,
            "reward": 0.5,
            "train_accuracy": 1 / 3,
            "length": 4.0,
            "cut_off_share": 0.0,
            "stale_tokens_share": 0.0,
        }
    )
    assert "train_accuracy" not in reward_metrics(groups, None)
    unscored = reward_metrics([*groups, group("c", [9.0], [4], outcome="timeout")], None)
    assert unscored == pytest.approx(
        {
            "reward/answer": 0.5,
            "reward": 0.5,
            "length": 4.0,
            "cut_off_share": 0.0,
            "stale_tokens_share": 0.0,
            "unscored_share": 0.25,
        }
    )
    assert (
        "reward" not in reward_metrics([group("c", [9.0], outcome="timeout")], None)
        and reward_metrics([], None) == {}
    )


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


def test_stale_tokens_are_those_that_an_older_policy_chose():
    old, new = group("a", [1.0], [4]), group("b", [0.0], [6])
    assert reward_metrics([old, new], None)["stale_tokens_share"] == 0.0
    versions = new.rollouts[0].versions.copy()
    versions[-5:] = 4
    continued = replace(new, rollouts=(replace(new.rollouts[0], versions=versions),))
    assert reward_metrics([old, continued], None)["stale_tokens_share"] == pytest.approx(5 / 10)


def test_the_error_of_the_mean_reward_counts_each_prompt_once():
    """Prompt means 0.5, 1.0 and 0.0, of deviation 0.5: the error is 0.5 / sqrt(3), whatever the
    number of siblings."""
    groups = [group("a", [1.0, 0.0, 0.5, 0.5]), group("b", [1.0]), group("c", [0.0, 0.0])]
    assert reward_error(groups) == pytest.approx(0.5 / 3**0.5)
    assert reward_error(groups[:1]) is None
    nobody = group("d", [9.0, 9.0], outcome="timeout")
    assert reward_error([*groups, nobody]) == reward_error(groups), (
        "a prompt that nothing could score is no observation"
    )
    half = with_outcomes([1.0, 9.0], ["ok", "error"], "e")
    assert reward_error([half, group("b", [0.0])]) == pytest.approx(0.5), "means 1 and 0"


def test_what_dynamic_sampling_cost():
    """10 groups were sampled: 4 dropped on the way, 1 by the batch; so 5 are kept, each for the
    price of two."""
    sampled = StepRollouts(
        groups=[], dropped=frozenset("abcd"), refills=2, num_refilled=6, num_missing=0, windows=[]
    )  # fmt: skip
    spread = [group(name, [0.0, 1.0]) for name in "klmno"]
    made = assemble(GrpoConfig(variant="dapo"), [*spread, group("p", [1.0, 1.0])], Passes(), step=1)
    dapo = GrpoConfig(variant="dapo")
    assert refill_metrics(dapo, sampled, made, 10) == {
        "equal_groups_share": 0.5,
        "refilled_prompts": 6.0,
        "sampled_per_kept": 2.0,
    }
    assert refill_metrics(dapo, sampled, made, 5) == {
        "equal_groups_share": 1.0,
        "refilled_prompts": 6.0,
    }
    assert refill_metrics(dapo, sampled, made, 0) == {}
    assert refill_metrics(GrpoConfig(), sampled, made, 10) == {}, (
        "nothing is dropped: there is no price"
    )


def test_each_objective_counts_only_what_it_leaves_out():
    groups = [group("a", [1.0, 0.0]), group("b", [0.5, 0.5])]
    pairs = assemble(DpoConfig(pairs="online"), groups, Passes(), step=1)
    assert [s.scalars["chosen"] for s in pairs.batch.sequences] == [1.0, 0.0]
    assert (pairs.num_equal_groups, pairs.num_groups_without_pair) == (1, 1)
    assert (pairs.num_dropped_groups, pairs.num_truncated) == (0, 0)
    assert pairs.metrics == {"equal_groups_share": 0.5}
    assert assemble(GrpoConfig(), groups, Passes(), step=1).num_groups_without_pair == 0


def test_completions_without_a_token_have_no_kl():
    groups = [group("a", [1.0, 0.0], [0, 0])]
    none = tuple(np.zeros(2, np.float32) for _ in range(2))
    passes = Passes(
        policy=Evaluation(which="policy", per_token=none),
        reference=Evaluation(which="reference", per_token=none),
    )
    made = assemble(GrpoConfig(variant="reinforce_pp", kl_coef=0.1), groups, passes, step=1)
    assert made.metrics == {"equal_groups_share": 0.0}


def test_a_return_is_never_bootstrapped_from_nothing():
    """A critic that gave no value after the last token would make the end of a cut-off completion
    worth 0."""
    groups = cut_off([group("a", [0.25])], "a.0")
    config = PpoConfig(bootstrap_truncated=True)
    per_token = values_of(groups, 0.0, 0.8).critic.per_token
    for passes in (Passes(), Passes(critic=Evaluation(which="critic", per_token=per_token))):
        with pytest.raises(AssertionError, match="bootstrapping needs a critic"):
            assemble(config, groups, passes, step=1)
