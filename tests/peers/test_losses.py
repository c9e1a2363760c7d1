"""Every objective and every option of one beside a peer's own function: loss and gradient in
float64 on ragged, perforated masks. The table is in loss_cases.py, the peers' answers in
losses.json. A config field without a row fails here."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from environment import ask
from loss_cases import ROWS, VARIANT_ROWS, Row, question
from pydantic import TypeAdapter

from gyre.core.records import Evaluation, Group, Prompt, Rollout, Sampling, Score, ScorePart
from gyre.core.scores import AccuracyMetric
from gyre.loop.assemble import Passes, assemble
from gyre.objectives.advantages import Sample, estimate, rank_pairs
from gyre.objectives.api import denominator, finish_sums, loss_sum
from gyre.objectives.config import (
    VARIANTS,
    DpoConfig,
    GrpoConfig,
    ObjectiveConfig,
    PolicyConfig,
    PpoConfig,
    RmConfig,
    SftConfig,
    is_pairwise,
    needs_reference,
    trains_scores,
)
from gyre.objectives.inputs import LossInputs

HERE = Path(__file__).parent
KEPT = json.loads((HERE / "losses.json").read_text())
CONFIG = TypeAdapter(ObjectiveConfig)
COLUMNS = {
    "old_logprobs_N": "old",
    "behavior_logprobs_N": "behavior",
    "advantages_N": "advantages",
    "entropy_N": "entropy",
    "old_values_N": "old_values",
    "returns_N": "returns",
}


def tensors(name: str) -> dict[str, torch.Tensor]:
    data = {
        key: torch.tensor(values, dtype=torch.float64) for key, values in KEPT["data"][name].items()
    }
    for leaf in ("logprobs", "entropy", "values", "scores"):
        data[leaf].requires_grad_(True)
    return data


def inputs(config: Any, data: dict[str, torch.Tensor], row: Row) -> LossInputs:
    """The masked tokens of the padded data, flat. The first half of the sequences is chosen, the
    second rejected."""
    mask, half = data["mask"].bool(), len(data["mask"]) // 2
    given = {column: data[name][mask] for column, name in COLUMNS.items()}
    if not trains_scores(config) and row.call != "value":
        given["logprobs_N"] = data["logprobs"][mask]
    if row.call == "value":
        given["values_N"] = data["values"][mask]
    if trains_scores(config):
        given["scores_S"] = data["scores"]
    if row.args.get("margin"):
        given["margins_P"] = data["margins"]
    if is_pairwise(config):
        given |= {"chosen_P": torch.arange(half), "rejected_P": torch.arange(half, 2 * half)}
    if needs_reference(config):
        given["reference_logprobs_N"] = data["reference"][mask]
    if getattr(config, "ratio_base", "") == "engine":
        del given["old_logprobs_N"]
    return LossInputs(
        num_sequences=2 * half,
        sequence_index_N=mask.nonzero()[:, 0],
        target_counts_S=mask.sum(1),
        **given,
    )


def our_loss(row: Row) -> dict[str, Any]:
    config, data = CONFIG.validate_python(row.ours), tensors(row.data)
    loss = loss_sum(config, inputs(config, data, row))[0] / denominator(
        config, data["mask"].sum(1).long().numpy()
    )
    loss.backward()
    leaves = ("logprobs", "entropy", "values", "scores")
    return {
        "loss": loss.item(),
        "grads": {leaf: data[leaf].grad for leaf in leaves if data[leaf].grad is not None},
    }


def our_advantages(row: Row) -> dict[str, np.ndarray]:
    config, data = (
        CONFIG.validate_python(row.ours),
        {k: np.array(v) for k, v in KEPT["data"][row.data].items()},
    )
    masks = data["mask"].astype(bool)
    made = estimate(
        config,
        [
            Sample(
                group_id=str(data["groups"][i]),
                score=float(data["rewards"][i]),
                num_tokens=int(mask.sum()),
                logprobs_C=data["logprobs"][i][mask],
                reference_logprobs_C=data["reference"][i][mask],
                values_C=data["old_values"][i][mask],
            )
            for i, mask in enumerate(masks)
        ],
    )
    padded = {"advantages": made.advantages} | (
        {} if made.returns is None else {"returns": made.returns}
    )
    found = {}
    for name, values in padded.items():
        found[name] = np.zeros(masks.shape)
        for i, mask in enumerate(masks):
            found[name][i][mask] = values[i]
    if row.bessel:  # verl whitens with N - 1, we with N
        found["advantages"] *= np.sqrt((masks.sum() - 1) / masks.sum())
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_loss_and_gradient_equal_the_peers(row: Row):
    kept = KEPT["answers"][row.name]
    if row.call == "advantage":
        found = our_advantages(row)
        assert found.keys() == kept.keys()
        for name, values in found.items():
            np.testing.assert_allclose(
                values, kept[name], rtol=row.rtol, atol=row.rtol, err_msg=name
            )
        return
    found = our_loss(row)
    assert found["loss"] == pytest.approx(kept["loss"], rel=row.rtol)
    live = {leaf for leaf, grad in kept["grads"].items() if np.any(grad)}
    assert live and live <= found["grads"].keys()
    for leaf, grad in found["grads"].items():
        np.testing.assert_allclose(
            grad, kept["grads"].get(leaf, 0.0), rtol=row.rtol, atol=1e-9, err_msg=leaf
        )


OFF = {
    "dual_clip": 0.0,
    "entropy_coef": 0.0,
    "kl_coef": 0.0,
    "kl_ratio_weighted": False,
    "rejection_level": "none",
    "importance_level": "token",
    "off_policy_mask_threshold": 0.0,
    "value_clip": 0.0,
    "label_smoothing": 0.0,
    "average_logprobs": False,
    "center_coef": 0.0,
}


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.ours.keys() & OFF.keys()], ids=lambda row: row.name
)
def test_every_option_of_a_row_changes_its_answer(row: Row):
    """A row whose data never reach an option would compare nothing."""
    found = our_advantages(row) if row.call == "advantage" else our_loss(row)["grads"]
    for name in row.ours.keys() & OFF.keys():
        if row.ours[name] == OFF[name]:
            continue
        without = {
            key: value
            for key, value in row.ours.items()
            if (name, key) != ("rejection_level", "rejection_band")
        }
        plain = replace(row, ours={**without, name: OFF[name]})
        other = our_advantages(plain) if row.call == "advantage" else our_loss(plain)["grads"]
        leaves = found.keys() | other.keys()
        assert any(
            not np.array_equal(found.get(leaf, 0.0), other.get(leaf, 0.0)) for leaf in leaves
        ), name


@pytest.mark.slow
def test_the_peers_still_say_what_is_kept():
    asked = question(("verl", "trl"), KEPT["data"])
    found = ask(HERE / "ask_losses.py", asked)
    assert found.keys() == {row[0] for row in asked["rows"]}
    for name, answer in found.items():
        flat = [
            np.concatenate([np.ravel(v) for v in _leaves(one)])
            for one in (answer, KEPT["answers"][name])
        ]
        np.testing.assert_allclose(flat[0], flat[1], rtol=1e-12, atol=1e-14, err_msg=name)


def _leaves(answer: Any) -> list[Any]:
    if isinstance(answer, dict):
        return [leaf for key in sorted(answer) for leaf in _leaves(answer[key])]
    return [answer]


# What no peer has as a function, each with a formula of its own.


def sample_groups(*groups: list[tuple[float, str]], tokens: int = 3) -> list[Group]:
    """Groups of (score, how the completion ended)."""
    made = []
    for g, members in enumerate(groups):
        rollouts = tuple(
            _rollout(f"{g}", i, finish, tokens) for i, (_, finish) in enumerate(members)
        )
        scores = tuple(
            _score(r.rollout_id, value) for r, (value, _) in zip(rollouts, members, strict=True)
        )
        made.append(Group(group_id=f"{g}", rollouts=rollouts, scores=scores))
    return made


def _score(name: str, value: float) -> Score:
    part = ScorePart(name="answer", value=value, weight=1.0, reason="")
    return Score(rollout_id=name, value=value, parts=(part,))


def _rollout(group: str, number: int, finish: Any, tokens: int) -> Rollout:
    chosen = np.arange(1 + tokens) >= 1
    return Rollout(
        rollout_id=f"{group}.{number}",
        group_id=group,
        prompt=Prompt(
            prompt_id="p", tokens=np.array([7], dtype=np.int32), text="", task={}, source="test"
        ),
        tokens=np.arange(1 + tokens, dtype=np.int32),
        sampled=chosen,
        logprobs=np.zeros(1 + tokens, np.float32),
        raw_logprobs=np.zeros(1 + tokens, np.float32),
        versions=np.where(chosen, 0, -1).astype(np.int32),
        sampling=Sampling(max_tokens=tokens),
        finish=finish,
        text="",
    )


def check_every_baseline_and_scale() -> None:
    """The pairs that no peer has together: subtract, then divide."""
    scores = [[0.3, -1.0, 2.0], [1.0, 0.5, 0.0]]
    for baseline in ("group_mean", "leave_one_out", "none"):
        for scale in ("group_std", "batch_std", "none"):
            groups = [np.array(s) for s in scores]
            others = [(s.sum() - s) / 2 for s in groups]
            minus = {
                "group_mean": [s.mean() for s in groups],
                "leave_one_out": others,
                "none": [0.0, 0.0],
            }[baseline]
            expected = [s - m for s, m in zip(groups, minus, strict=True)]
            if scale == "group_std":
                expected = [e / s.std(ddof=1) for e, s in zip(expected, groups, strict=True)]
            if scale == "batch_std":
                flat = np.concatenate(expected)
                expected = [(e - flat.mean()) / flat.std() for e in expected]
            config = GrpoConfig(baseline=baseline, scale=scale)  # type: ignore[arg-type]
            samples = [
                Sample(group_id=str(g), score=score, num_tokens=2)
                for g, s in enumerate(scores)
                for score in s
            ]
            found = [values[0] for values in estimate(config, samples).advantages]
            np.testing.assert_allclose(found, np.concatenate(expected), rtol=1e-5, atol=1e-6)


def check_one_sample_alone_has_no_advantage() -> None:
    """verl and TRL give it its raw score; there is nothing to compare it with."""
    for variant in ("grpo", "rloo"):
        made = estimate(
            GrpoConfig(variant=variant), [Sample(group_id="a", score=0.7, num_tokens=2)]
        )
        assert made.advantages[0].tolist() == [0.0, 0.0]


def check_equal_groups() -> None:
    groups = sample_groups([(1.0, "stop"), (0.0, "stop")], [(1.0, "stop"), (1.0, "stop")])
    kept, dropped = (
        assemble(GrpoConfig(equal_groups=what), groups, Passes(), step=1)  # type: ignore[arg-type]
        for what in ("keep", "drop")
    )
    assert [len(made.batch.sequences) for made in (kept, dropped)] == [4, 2]


def check_filter_metric() -> None:
    """Both right, but of different scores: equal by accuracy only."""
    groups = sample_groups([(1.0, "stop"), (1.5, "stop")])
    right = AccuracyMetric(part="answer", threshold=1.0)
    for metric, left in (("accuracy", 0), ("score", 2)):
        config = GrpoConfig(equal_groups="drop", filter_metric=metric)  # type: ignore[arg-type]
        assert (
            len(assemble(config, groups, Passes(), step=1, accuracy=right).batch.sequences) == left
        )


def check_mask_truncated() -> None:
    """The cut-off completion is out of the loss, and its score in the baseline."""
    groups = sample_groups([(1.0, "stop"), (0.0, "length"), (0.2, "stop")])
    made = assemble(GrpoConfig(mask_truncated=True, scale="none"), groups, Passes(), step=1)
    assert made.num_truncated == 1
    found = [sequence.columns["advantages"][-1] for sequence in made.batch.sequences]
    np.testing.assert_allclose(found, [1.0 - 0.4, 0.2 - 0.4], rtol=1e-6)


def check_bootstrap_truncated() -> None:
    """One-step returns: the last token's is its reward plus gamma times the critic's value after
    it."""
    groups = sample_groups([(0.25, "length")])
    critic = Evaluation(
        which="critic",
        per_token=(np.zeros(4, np.float32),),
        per_sequence=np.array([0.8], np.float32),
    )
    for bootstrap, last in ((True, 0.25 + 0.9 * 0.8), (False, 0.25)):
        config = PpoConfig(bootstrap_truncated=bootstrap, gamma=0.9, lam=0.0, whiten=False)
        made = assemble(config, groups, Passes(critic=critic), step=1)
        assert made.batch.sequences[0].columns["returns"][-1] == pytest.approx(last)


def check_no_whitening() -> None:
    made = estimate(
        PpoConfig(whiten=False, lam=1.0),
        [Sample(group_id="a", score=2.0, num_tokens=2, values_C=np.array([0.5, 1.0]))],
    )
    assert made.advantages[0].tolist() == [1.5, 1.0]


def check_vf_coef() -> None:
    """The whole loss is the policy's plus vf_coef times the value's: verl and OpenRLHF train two
    models apart."""
    data = tensors("ragged")
    row = Row(name="", ours={}, peer="none", call="policy", args={})
    losses = {}
    for vf_coef in (0.0, 1.0, 0.7):
        config = PpoConfig(vf_coef=vf_coef, tis_cap=0.0)
        given = inputs(config, data, row)
        both = {name: getattr(given, name) for name in given.__slots__}
        both["values_N"] = data["values"][data["mask"].bool()]
        losses[vf_coef] = loss_sum(config, LossInputs(**both))[0].item()
    assert losses[0.7] == pytest.approx(losses[0.0] + 0.7 * (losses[1.0] - losses[0.0]))


def check_sft_coef() -> None:
    """Pang et al. 2024, eq. 1, each pair by its own chosen length; TRL averages over all chosen
    tokens."""
    data = tensors("ragged")
    row = Row(name="", ours={}, peer="none", call="dpo", args={})
    losses = []
    for sft_coef in (0.0, 0.4):
        config = DpoConfig(sft_coef=sft_coef)
        losses.append(loss_sum(config, inputs(config, data, row))[0].item() / 3)
    mask = data["mask"]
    nll = [-(data["logprobs"][i] * mask[i]).sum().item() / mask[i].sum().item() for i in range(3)]
    assert losses[1] - losses[0] == pytest.approx(0.4 * sum(nll) / 3)


def check_online_pairs() -> None:
    rewards = np.array([0.1, 0.9, 0.4, 0.5])
    assert rank_pairs(DpoConfig(pairs="online"), rewards) == [(1, 0)]
    assert rank_pairs(DpoConfig(pairs="online", pairs_per_group=2), rewards) == [(1, 0), (3, 2)]
    assert rank_pairs(
        DpoConfig(pairs="online", pairs_per_group=2, min_reward_gap=0.2), rewards
    ) == [(1, 0)]
    made = assemble(
        DpoConfig(pairs="online"), sample_groups([(0.0, "stop"), (1.0, "stop")]), Passes(), step=1
    )
    assert [(s.scalars["score"], s.scalars["chosen"]) for s in made.batch.sequences] == [
        (1.0, 1.0),
        (0.0, 0.0),
    ]


def check_rloo_and_one_action_per_sequence() -> None:
    """TRL's RLOO clips one ratio per sequence and takes the mean over sequences. On policy its
    gradient is ours times the mean length; off policy it is another objective."""
    data = tensors("ragged")
    mask = data["mask"]
    data["old"] = data["logprobs"].detach().clone()
    row = Row(name="", ours={}, peer="none", call="policy", args={})
    config = GrpoConfig(variant="rloo", tis_cap=0.0)
    (loss_sum(config, inputs(config, data, row))[0] / float(mask.sum())).backward()
    ours = data["logprobs"].grad.clone()
    data["logprobs"].grad = None
    sums_S = ((data["logprobs"] - data["old"]) * mask).sum(1)
    (-(sums_S.exp() * data["advantages"][:, 0])).mean().backward()
    np.testing.assert_allclose(
        data["logprobs"].grad, ours * float(mask.sum()) / len(mask), rtol=1e-12
    )


# what verl's compute_offpolicy_metrics says of the trainer's log-probs before the update
VERL_CHI2 = {"token": 0.9816235465395371, "sequence": 4.317783797561671}


def check_chi2() -> None:
    """The metrics are verl's chi2_token and chi2_seq on the same data (0.9.1); the penalty's
    gradient is 2 (r - 1) r."""
    data = tensors("ragged")
    mask = data["mask"]
    row = Row(name="", ours={}, peer="none", call="policy", args={})
    plain = GrpoConfig(tis_cap=0.0, aggregation="token")
    given = inputs(plain, data, row)
    found = finish_sums(loss_sum(plain, given)[1])
    assert found["chi2_token"] == pytest.approx(VERL_CHI2["token"], rel=1e-5)
    assert found["chi2_sequence"] == pytest.approx(VERL_CHI2["sequence"], rel=1e-5)
    grads = []
    for coef in (0.0, 0.5):
        config = plain.model_copy(update={"chi2_coef": coef})
        data["logprobs"].grad = None
        loss_sum(config, inputs(config, data, row))[0].backward()
        grads.append(data["logprobs"].grad.clone())
    ratio = (data["logprobs"] - data["behavior"]).exp().detach()
    np.testing.assert_allclose(
        grads[1] - grads[0], 0.5 * 2 * (ratio - 1) * ratio * mask, rtol=1e-9, atol=1e-12
    )


NONE: dict[str, tuple[str, Callable[[], None]]] = {
    "baseline": (
        "peers have the baselines, not every baseline with every scale",
        check_every_baseline_and_scale,
    ),
    "scale": ("as baseline", check_every_baseline_and_scale),
    "a group of one": ("verl and TRL keep the raw score", check_one_sample_alone_has_no_advantage),
    "rloo off policy": (
        "TRL takes a sequence as one action",
        check_rloo_and_one_action_per_sequence,
    ),
    "equal_groups": ("verl drops in its trainer's loop, not in a function", check_equal_groups),
    "filter_metric": ("as equal_groups", check_filter_metric),
    "mask_truncated": ("TRL masks where it generates", check_mask_truncated),
    "bootstrap_truncated": ("all peers take 0 after the last token", check_bootstrap_truncated),
    "whiten": ("peers whiten always", check_no_whitening),
    "vf_coef": ("peers train actor and critic apart", check_vf_coef),
    "chi2_coef": ("verl measures the divergence and does not penalize it", check_chi2),
    "sft_coef": ("TRL's mean is over all chosen tokens", check_sft_coef),
    "pairs": ("TRL's online DPO ranks in its trainer", check_online_pairs),
    "pairs_per_group": ("as pairs", check_online_pairs),
    "min_reward_gap": ("as pairs", check_online_pairs),
}


@pytest.mark.parametrize("name", NONE)
def test_what_no_peer_has_follows_its_formula(name: str):
    reason, check = NONE[name]
    assert len(reason) > 5
    check()


@pytest.mark.parametrize("config", [SftConfig, RmConfig, DpoConfig, GrpoConfig, PpoConfig])
def test_every_field_and_choice_of_an_objective_has_a_row(config: type[Any]):
    """Options that GRPO and PPO share need a row of either."""
    kind = config.model_fields["kind"].default
    missing = []
    for name, info in config.model_fields.items():
        if name in NONE or name == "kind":
            continue
        shared = name in PolicyConfig.model_fields
        rows = [
            row.ours
            for row in ROWS
            if row.ours["kind"] == kind or (shared and row.ours["kind"] in ("grpo", "ppo"))
        ]
        given = [ours[name] for ours in rows if name in ours]
        choices = get_args(info.annotation) if get_origin(info.annotation) is Literal else ()
        missing += [f"{name} = {choice!r}" for choice in choices if choice not in given]
        if not any(value != info.default for value in given):
            missing.append(name)
    assert missing == [], f"{kind}: no row of loss_cases.ROWS and no check in NONE for {missing}"


def test_every_variant_has_a_row_and_every_row_an_answer():
    assert {row.ours.get("variant") for row in VARIANT_ROWS if row.peer == "verl"} == set(VARIANTS)
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) and set(names) == set(KEPT["answers"])
    assert {row.peer for row in ROWS} == {"verl", "trl", "openrlhf"} and len(KEPT["of"]) == 3
