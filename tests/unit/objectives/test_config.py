"""Objective configs: the table of variants, refusals, and the questions that other rooms ask."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import TypeAdapter, ValidationError

from gyre.objectives.config import (
    VARIANTS,
    DpoConfig,
    GrpoConfig,
    ObjectiveConfig,
    PpoConfig,
    RmConfig,
    SftConfig,
    is_pairwise,
    needs_critic,
    needs_old_logprobs,
    needs_policy_logprobs,
    needs_reference,
    needs_rollouts,
    required_columns,
    trains_scores,
)

UNION = TypeAdapter(ObjectiveConfig)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_fills_what_is_left_open_and_nothing_else(variant):
    row = VARIANTS[variant]
    config = GrpoConfig(variant=variant, fixed_length_tokens=8)
    assert {name: getattr(config, name) for name in row} == dict(row)
    set_by_hand = GrpoConfig(variant=variant, fixed_length_tokens=8, clip_high=0.5, scale="none")
    assert (set_by_hand.clip_high, set_by_hand.scale) == (0.5, "none")
    assert UNION.validate_python(config.model_dump()) == config


@pytest.mark.parametrize("kind", ["sft", "rm", "dpo", "grpo", "ppo"])
def test_the_kind_alone_is_enough(kind):
    assert UNION.validate_python({"kind": kind}).kind == kind


@pytest.mark.parametrize(
    ("variant", "low", "high"),
    [
        ("grpo", 0.2, 0.2),
        ("dapo", 0.2, 0.28),
        ("dr_grpo", 0.2, 0.2),
        ("gspo", 3e-4, 4e-4),
        ("rloo", 0.2, 0.2),
        ("reinforce_pp", 0.2, 0.2),
        ("cispo", 1.0, 4.0),
    ],
)
def test_each_variant_clips_where_its_paper_does(variant, low, high):
    config = GrpoConfig(variant=variant, fixed_length_tokens=8)
    assert (config.clip_low, config.clip_high) == (low, high)


def test_what_is_not_set():
    """The defaults that a run is made with."""
    rm, dpo, grpo, ppo = RmConfig(), DpoConfig(), GrpoConfig(), PpoConfig()
    assert rm.center_coef == dpo.label_smoothing == dpo.sft_coef == dpo.min_reward_gap == 0.0
    assert (dpo.beta, dpo.pairs_per_group, dpo.average_logprobs) == (0.1, 1, False)
    for config in (grpo, ppo):
        assert config.dual_clip == config.kl_coef == config.entropy_coef == 0.0
        assert (config.tis_cap, config.rejection_band, config.fixed_length_tokens) == (
            2.0,
            (0.5, 2.0),
            0,
        )
        assert not config.kl_ratio_weighted and not config.mask_truncated
    assert (ppo.clip_low, ppo.clip_high) == (0.2, 0.2), "no variant fills these"
    assert (ppo.gamma, ppo.lam, ppo.value_clip, ppo.vf_coef) == (1.0, 0.95, 0.2, 0.5)
    assert ppo.whiten and not ppo.bootstrap_truncated


@pytest.mark.parametrize(
    ("kind", "key", "accepted", "refused"),
    [
        ("rm", "center_coef", [0.0], [-0.01]),
        ("dpo", "beta", [0.01], [0.0]),
        ("dpo", "label_smoothing", [0.0, 0.49], [-0.01, 0.5]),
        ("dpo", "sft_coef", [0.0], [-0.01]),
        ("dpo", "pairs_per_group", [1], [0]),
        ("dpo", "min_reward_gap", [0.0], [-0.01]),
        ("ppo", "clip_low", [0.0, 1.0], [-0.01, 1.01]),
        ("ppo", "clip_high", [0.0, 5.0], [-0.01]),
        ("ppo", "dual_clip", [0.0, 1.01], [-0.01, 1.0]),
        ("ppo", "tis_cap", [0.0, 0.5], [-0.01]),
        ("ppo", "off_policy_mask_threshold", [0.0, 0.5], [-0.01]),
        ("grpo", "chi2_coef", [0.0, 0.5], [-0.01]),
        ("ppo", "fixed_length_tokens", [0], [-1]),
        ("ppo", "kl_coef", [0.0], [-0.01]),
        ("ppo", "kl_clamp", [0.0], [-0.01]),
        ("ppo", "entropy_coef", [0.0], [-0.01]),
        ("ppo", "gamma", [0.01, 1.0], [0.0, 1.01]),
        ("ppo", "lam", [0.0, 1.0], [-0.01, 1.01]),
        ("ppo", "value_clip", [0.0], [-0.01]),
        ("ppo", "vf_coef", [0.0], [-0.01]),
    ],
)
def test_a_value_may_be_as_large_and_as_small_as_it_makes_sense(kind, key, accepted, refused):
    for value in accepted:
        assert getattr(UNION.validate_python({"kind": kind, key: value}), key) == value
    for value in refused:
        with pytest.raises(ValidationError, match=key):
            UNION.validate_python({"kind": kind, key: value})


def test_a_correction_fills_what_is_not_set():
    icepop = GrpoConfig(correction="icepop")
    assert (icepop.tis_cap, icepop.rejection_level, icepop.rejection_band) == (
        5.0,
        "token",
        (0.5, 5.0),
    )
    assert GrpoConfig(correction="icepop", tis_cap=3.0).tis_cap == 3.0
    assert GrpoConfig(correction="tis") == GrpoConfig()
    none = PpoConfig(correction="none")
    assert (none.tis_cap, none.rejection_level) == (0.0, "none")
    with pytest.raises(ValidationError, match="icepop"):
        GrpoConfig(correction="icepops")


@pytest.mark.parametrize("band", [(0.0, 3.0), (0.0, 1.0), (1.0, 2.0), (0.5, 5.0)])
def test_a_band_may_end_at_one(band):
    assert GrpoConfig(rejection_level="token", rejection_band=band).rejection_band == band


@pytest.mark.parametrize("band", [(-0.01, 2.0), (1.01, 2.0), (0.5, 0.99), (1.0, 1.0)])
def test_a_band_that_keeps_no_agreement_is_refused(band):
    with pytest.raises(ValidationError, match="need 0 <= low <= 1 <= high and low < high"):
        GrpoConfig(rejection_level="token", rejection_band=band)


@pytest.mark.parametrize(
    "values",
    [
        {"aggregation": "fixed_length", "fixed_length_tokens": 1},
        {"kl_estimator": "k1"},  # no KL
        {"kl_estimator": "k1", "kl_in": "reward", "kl_coef": 0.1},
        {"kl_estimator": "k3", "kl_in": "loss", "kl_coef": 0.1},
        {"kl_estimator": "k3", "kl_in": "reward", "kl_coef": 0.1},
        {"kl_estimator": "k3_plus", "kl_in": "loss", "kl_coef": 0.1},
        {"kl_ratio_weighted": True, "kl_coef": 0.1},
        {"importance_level": "sequence", "tis_cap": 0.5},
        {"tis_cap": 0.0, "ratio_base": "engine"},
        {"surrogate": "cispo"},
        {"dual_clip": 3.0},
    ],
)
def test_what_goes_together_is_accepted(values):
    config = UNION.validate_python({"kind": "grpo", **values})
    assert {key: getattr(config, key) for key in values} == values


def test_dpo_may_be_smoothed_and_ipo_need_not_be():
    assert (
        DpoConfig(label_smoothing=0.1).label_smoothing == 0.1
        and DpoConfig(loss="ipo").loss == "ipo"
    )


def test_a_kl_coefficient_of_zero_asks_for_no_passes():
    off, on = GrpoConfig(kl_in="reward"), GrpoConfig(kl_in="reward", kl_coef=0.04)
    assert not needs_reference(off) and not needs_policy_logprobs(off)
    assert needs_reference(on) and needs_policy_logprobs(on)
    assert "reference_logprobs" not in required_columns(off) | required_columns(on)
    assert not {"values", "returns"} & required_columns(off)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"kind": "grop"}, "grpo"),
        ({"kind": "grpo", "variant": "dapoo"}, "dapo"),
        ({"kind": "grpo", "clip_hi": 1.0}, "did you mean 'clip_high'"),
        ({"kind": "grpo", "variant": "dr_grpo"}, "fixed_length_tokens"),
        ({"kind": "grpo", "dual_clip": 0.5}, "more than 1"),
        ({"kind": "grpo", "variant": "cispo", "dual_clip": 3.0}, "surrogate = 'clip'"),
        ({"kind": "grpo", "kl_coef": 0.1, "kl_estimator": "k1"}, "zero mean"),
        ({"kind": "ppo", "kl_estimator": "k3_plus"}, "gradient"),
        (
            {"kind": "grpo", "rejection_level": "token", "rejection_band": [2.0, 0.5]},
            "low <= 1 <= high",
        ),
        (
            {"kind": "grpo", "rejection_level": "token", "rejection_band": [1.5, 2.0]},
            "low <= 1 <= high",
        ),
        ({"kind": "grpo", "rejection_level": "token", "rejection_band": [0.5]}, "rejection_band"),
        ({"kind": "grpo", "rejection_band": [0.5, 5.0]}, "rejection_level"),
        ({"kind": "grpo", "importance_level": "sequence", "tis_cap": 0.0}, "tis_cap"),
        ({"kind": "ppo", "importance_level": "sequence", "ratio_base": "engine"}, "ratio_base"),
        ({"kind": "dpo", "loss": "ipo", "label_smoothing": 0.1}, "label_smoothing"),
        ({"kind": "dpo", "beta": 0.0}, "greater than 0"),
        ({"kind": "ppo", "lam": 1.5}, "less than or equal to 1"),
        ({"kind": "sft", "aggregation": "fixed_length"}, "token"),
    ],
)
def test_refusals_say_what_is_accepted(values, says):
    with pytest.raises(ValidationError, match=says):
        UNION.validate_python(values)


@pytest.mark.parametrize(
    ("config", "reference", "critic", "rollouts", "pairwise", "scores"),
    [
        (SftConfig(), False, False, False, False, False),
        (RmConfig(), False, False, False, True, True),
        (DpoConfig(), True, False, False, True, False),
        (DpoConfig(pairs="online"), True, False, True, True, False),
        (GrpoConfig(), False, False, True, False, False),
        (GrpoConfig(kl_coef=0.04), True, False, True, False, False),
        (PpoConfig(), False, True, True, False, False),
        (PpoConfig(kl_coef=0.04), True, True, True, False, False),
    ],
)
def test_questions(config, reference, critic, rollouts, pairwise, scores):
    assert needs_reference(config) is reference
    assert needs_critic(config) is critic
    assert needs_rollouts(config) is rollouts
    assert is_pairwise(config) is pairwise
    assert trains_scores(config) is scores


def test_required_columns():
    assert required_columns(SftConfig()) == {"loss_mask"}
    assert required_columns(RmConfig()) == set()
    assert required_columns(DpoConfig()) == {"loss_mask", "reference_logprobs"}
    assert required_columns(GrpoConfig()) == {"loss_mask", "advantages", "logprobs"}
    assert "reference_logprobs" in required_columns(GrpoConfig(kl_coef=0.1))
    assert "reference_logprobs" not in required_columns(PpoConfig(kl_coef=0.1))
    assert {"values", "returns"} <= required_columns(PpoConfig())


def test_old_logprobs_are_needed_once_the_policy_has_moved():
    assert not needs_old_logprobs(GrpoConfig(), updates_per_batch=1)
    assert needs_old_logprobs(GrpoConfig(), updates_per_batch=2)
    assert not needs_old_logprobs(GrpoConfig(ratio_base="engine"), updates_per_batch=2)
    assert not needs_old_logprobs(SftConfig(), updates_per_batch=2)


def test_config_and_advantages_load_no_torch():
    code = (
        "import sys; import gyre.objectives.config, gyre.objectives.advantages; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_bound_of_the_kl_follows_the_estimator_where_it_is_not_set():
    assert GrpoConfig().kl_clamp == GrpoConfig(kl_estimator="k3_plus").kl_clamp == 10.0
    assert (
        GrpoConfig(variant="reinforce_pp").kl_clamp
        == PpoConfig().kl_clamp
        == GrpoConfig(kl_estimator="k2").kl_clamp
    )
    assert PpoConfig().kl_clamp == GrpoConfig(kl_ratio_weighted=True).kl_clamp == 0.0
    assert (
        PpoConfig(kl_estimator="k3").kl_clamp
        == GrpoConfig(variant="reinforce_pp", kl_estimator="k3").kl_clamp
        == 10
    )
    assert (
        PpoConfig(kl_clamp=3.0).kl_clamp
        == GrpoConfig(kl_ratio_weighted=True, kl_clamp=3.0).kl_clamp
        == 3.0
    )
    assert GrpoConfig(kl_clamp=0.0).kl_clamp == 0.0


@pytest.mark.parametrize(
    "fields", [{"kl_in": "reward"}, {"kl_estimator": "k2"}, {"kl_estimator": "k3_plus"}]
)
def test_the_ratio_weighs_k3_in_the_loss_only(fields):
    with pytest.raises(ValueError, match="kl_ratio_weighted corrects the gradient of k3"):
        GrpoConfig(kl_ratio_weighted=True, **fields)


def test_the_policys_own_logprobs_are_needed_for_a_kl_in_the_reward():
    assert needs_policy_logprobs(PpoConfig(kl_coef=0.1))
    assert not needs_policy_logprobs(PpoConfig()) and not needs_policy_logprobs(
        GrpoConfig(kl_coef=0.1)
    )
    assert not needs_policy_logprobs(DpoConfig())
