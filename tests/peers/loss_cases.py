"""The table of objectives: each row is one of our configs beside a call of a peer that means the
same. In: nothing. Out: rows and padded random data. Callers: test_losses.py, make_losses.py.

The peers' answers lie in `losses.json`; `bessel` says that verl whitens with N - 1 where we do with
N.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

# three groups of two, or three pairs: the first half chosen, the second rejected
SEQUENCES, LENGTH = 6, 8


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    ours: dict[str, Any]
    peer: str
    call: str
    args: dict[str, Any]
    data: str = "ragged"
    rtol: float = 1e-7  # verl adds 1e-8 to a sequence's count
    bessel: bool = False
    why: str = field(default="", compare=False)


def random_data(
    seed: int, *, masked: bool = False, far: bool = False, spread: float = 0.4
) -> dict[str, Any]:
    """Padded [B, T] data: ragged, with holes, optionally a sequence without any target or
    log-ratios past ±20."""
    rng = np.random.default_rng(seed)
    shape = (SEQUENCES, LENGTH)
    lengths = [8, 3, 1, 6, 5, 2]
    mask = (np.arange(LENGTH) < np.array(lengths)[:, None]).astype(float)
    mask[0, 2] = mask[3, 0] = mask[3, 3] = mask[4, 1] = 0.0
    if masked:
        mask[1] = 0.0
    logprobs = -rng.exponential(1.0, shape)
    moved = {
        name: logprobs + rng.normal(0.0, spread, shape) for name in ("old", "behavior", "reference")
    }
    if far:
        moved["old"][0, 0], moved["old"][3, 1], moved["behavior"][0, 4] = -40.0, 25.0, -45.0
        moved["reference"][0, 1], moved["reference"][4, 0] = -31.0, 30.0
    values = rng.normal(0.0, 1.0, shape)
    made = {
        "mask": mask,
        "logprobs": logprobs,
        **moved,
        "advantages": np.repeat(rng.normal(0.0, 1.0, (SEQUENCES, 1)), LENGTH, axis=1),
        "entropy": rng.exponential(1.0, shape),
        "values": values,
        "old_values": values + rng.normal(0.0, 0.3, shape),
        "returns": rng.normal(0.0, 1.0, shape),
        "scores": rng.normal(0.0, 1.0, SEQUENCES),
        "margins": rng.exponential(1.0, SEQUENCES // 2),
        "rewards": rng.normal(0.0, 1.0, SEQUENCES),
        "groups": np.array([0, 1, 0, 1, 0, 1]),
    }
    return {name: values.tolist() for name, values in made.items()}


def make_data() -> dict[str, Any]:
    return {
        "ragged": random_data(1),
        "masked": random_data(2, masked=True),
        "far": random_data(3, far=True),
    }


def grpo(**keys: Any) -> dict[str, Any]:
    return {"kind": "grpo", "tis_cap": 0.0, **keys}


def ppo(**keys: Any) -> dict[str, Any]:
    return {"kind": "ppo", "tis_cap": 0.0, **keys}


SEQ, TOKEN, NORM = "seq-mean-token-mean", "token-mean", "seq-mean-token-sum-norm"
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
BAND = (0.8, 1.25)  # its ends are each other's inverse: verl's k1 is -log(trainer / engine)


def verl(name: str, ours: dict[str, Any], agg: str, **args: Any) -> Row:
    more = {key: args.pop(key) for key in ("data", "rtol", "why") if key in args}
    return Row(name=name, ours=ours, peer="verl", call="policy", args={"agg": agg, **args}, **more)


def trl(name: str, ours: dict[str, Any], loss_type: str, **args: Any) -> Row:
    more = {key: args.pop(key) for key in ("data", "rtol", "why") if key in args}
    return Row(
        name=name,
        ours=ours,
        peer="trl",
        call="policy",
        args={"loss_type": loss_type, **args},
        **more,
    )


def openrlhf(name: str, ours: dict[str, Any], call: str, **args: Any) -> Row:
    more = {key: args.pop(key) for key in ("data", "rtol", "why") if key in args}
    return Row(name=name, ours=ours, peer="openrlhf", call=call, args=args, **more)


def gained(
    name: str, ours: dict[str, Any], estimator: str, *, bessel: bool = False, **args: Any
) -> Row:
    given = {"estimator": estimator, **args}
    return Row(
        name=name, ours=ours, peer="verl", call="advantage", args=given, rtol=2e-5, bessel=bessel
    )


VARIANT_ROWS = [
    verl("grpo, verl", grpo(variant="grpo"), SEQ),
    verl("dapo, verl", grpo(variant="dapo", clip_high=0.28), TOKEN, high=0.28),
    verl("dr_grpo, verl", grpo(variant="dr_grpo", fixed_length_tokens=16), NORM, scale=16),
    verl(
        "gspo, verl",
        grpo(variant="gspo", clip_low=0.02, clip_high=0.03),
        SEQ,
        mode="gspo",
        low=0.02,
        high=0.03,
    ),
    verl("rloo, verl", grpo(variant="rloo"), TOKEN),
    verl("reinforce_pp, verl", grpo(variant="reinforce_pp"), TOKEN),
    verl("cispo, verl", grpo(variant="cispo"), TOKEN, mode="cispo", low=1.0, high=4.0),
    verl("grpo, a sequence without targets", grpo(variant="grpo"), SEQ, data="masked"),
    verl(
        "dr_grpo, a sequence without targets",
        grpo(variant="dr_grpo", fixed_length_tokens=16),
        NORM,
        scale=16,
        data="masked",
    ),
    verl(
        "log-ratios past 20",
        grpo(variant="dapo", tis_cap=2.0),
        TOKEN,
        high=0.28,
        data="far",
        **{"is": "token", "is_threshold": 2.0},
    ),
    trl("grpo, trl", grpo(variant="grpo"), "grpo"),
    trl("dapo, trl", grpo(variant="dapo"), "dapo", high=0.28),
    trl("dr_grpo, trl", grpo(variant="dr_grpo", fixed_length_tokens=16), "dr_grpo", scale=16),
    trl(
        "gspo, trl",
        grpo(variant="gspo", clip_low=0.02, clip_high=0.03),
        "grpo",
        level="sequence",
        low=0.02,
        high=0.03,
    ),
    trl("cispo, trl", grpo(variant="cispo"), "cispo", high=5.0),
    openrlhf("ppo policy, openrlhf", ppo(kl_coef=0.0), "policy", agg="token"),
    openrlhf("gspo, openrlhf", grpo(variant="gspo", **CLIP), "policy", agg="sequence", type="gspo"),
]

POLICY_ROWS = [
    verl(
        "surrogate = reinforce",
        grpo(surrogate="reinforce", aggregation="token", ratio_base="engine"),
        TOKEN,
        mode="bypass_mode",
        loss_type="reinforce",
    ),
    verl(
        "surrogate = clip, ratio = token",
        grpo(surrogate="clip", ratio="token", aggregation="sequence"),
        SEQ,
    ),
    verl(
        "surrogate = cispo",
        grpo(surrogate="cispo", clip_low=0.1, clip_high=0.2, aggregation="token"),
        TOKEN,
        mode="cispo",
        low=0.1,
        high=0.2,
    ),
    verl(
        "ratio = sequence, mean over tokens",
        grpo(ratio="sequence", aggregation="token"),
        TOKEN,
        mode="gspo",
    ),
    verl("dual_clip, verl", grpo(dual_clip=1.2), SEQ, c=1.2),
    trl("dual_clip, trl", grpo(dual_clip=1.3), "grpo", delta=1.3),
    openrlhf(
        "dual_clip, openrlhf",
        grpo(dual_clip=1.2, aggregation="token"),
        "policy",
        agg="token",
        c=1.2,
    ),
    verl(
        "ratio_base = engine",
        grpo(ratio_base="engine", aggregation="token"),
        TOKEN,
        mode="bypass_mode",
    ),
    verl("ratio_base = trainer", grpo(ratio_base="trainer", aggregation="token"), TOKEN),
    verl("entropy_coef, verl", grpo(entropy_coef=0.03), SEQ, entropy=0.03),
    trl("entropy_coef, trl", grpo(entropy_coef=0.03, variant="dapo", **CLIP), "dapo", entropy=0.03),
    verl(
        "aggregation = fixed_length",
        grpo(aggregation="fixed_length", fixed_length_tokens=11),
        NORM,
        scale=11,
    ),
]

KL_ROWS = [
    verl(
        "kl k2 in the loss",
        grpo(kl_coef=0.1, kl_estimator="k2", kl_in="loss"),
        SEQ,
        kl_coef=0.1,
        kl="k2",
    ),
    verl(
        "kl k3 in the loss, bounded",
        grpo(kl_coef=0.1, kl_estimator="k3", kl_clamp=10.0),
        SEQ,
        kl_coef=0.1,
        kl="k3",
        data="far",
    ),
    verl(
        "kl k3_plus in the loss",
        grpo(kl_coef=0.1, kl_estimator="k3_plus"),
        SEQ,
        kl_coef=0.1,
        kl="k3+",
        data="far",
    ),
    trl("kl k3 in the loss, unbounded", grpo(kl_coef=0.1, kl_clamp=0.0), "grpo", beta=0.1),
    trl(
        "kl_ratio_weighted",
        grpo(kl_coef=0.1, kl_ratio_weighted=True),
        "grpo",
        beta=0.1,
        bias_correction=True,
    ),
    trl(
        "kl_ratio_weighted, sequence",
        grpo(kl_coef=0.1, kl_ratio_weighted=True, variant="gspo", **CLIP),
        "grpo",
        beta=0.1,
        bias_correction=True,
        level="sequence",
    ),
    openrlhf(
        "kl k2 in the loss, bounded",
        grpo(kl_coef=0.1, kl_estimator="k2", kl_clamp=10.0, aggregation="token"),
        "policy",
        agg="token",
        kl_coef=0.1,
        kl="k2",
        data="far",
        rtol=1e-5,
    ),
]

CORRECTION_ROWS = [
    verl(
        "token weights, verl",
        grpo(tis_cap=1.2, importance_level="token"),
        SEQ,
        **{"is": "token", "is_threshold": 1.2},
    ),
    verl(
        "sequence weights, verl",
        grpo(tis_cap=1.5, importance_level="sequence"),
        SEQ,
        **{"is": "sequence", "is_threshold": 1.5},
    ),
    verl(
        "sequence weights past 20",
        grpo(tis_cap=1.5, importance_level="sequence"),
        SEQ,
        data="far",
        **{"is": "sequence", "is_threshold": 1.5},
    ),
    verl(
        "gspo with token weights",
        grpo(tis_cap=1.2, variant="gspo", **CLIP),
        SEQ,
        mode="gspo",
        **{"is": "token", "is_threshold": 1.2},
        why="TRL gives all tokens the mean weight",
    ),
    verl(
        "IcePop, verl",
        grpo(tis_cap=1.4, rejection_level="token", rejection_band=(0.7, 1.4)),
        SEQ,
        **{"is": "token", "is_threshold": "0.7_1.4"},
    ),
    verl(
        "correction = tis",
        {"kind": "grpo", "correction": "tis"},
        SEQ,
        **{"is": "token", "is_threshold": 2.0},
        data="far",
    ),
    verl(
        "correction = icepop",
        {"kind": "grpo", "correction": "icepop"},
        SEQ,
        **{"is": "token", "is_threshold": "0.5_5.0"},
        data="far",
    ),
    verl("correction = none", {"kind": "grpo", "correction": "none"}, SEQ, data="far"),
    trl(
        "off-policy sequence mask",
        grpo(off_policy_mask_threshold=0.02),
        "grpo",
        off_policy=0.02,
    ),
    trl(
        "off-policy sequence mask, token weights",
        grpo(off_policy_mask_threshold=0.02, tis_cap=1.2),
        "grpo",
        off_policy=0.02,
        **{"is": "token_truncate", "is_max": 1.2},
    ),
    verl(
        "IcePop, sequences",
        grpo(
            tis_cap=1.6,
            importance_level="sequence",
            rejection_level="sequence",
            rejection_band=(0.5, 1.6),
        ),
        SEQ,
        **{"is": "sequence", "is_threshold": "0.5_1.6"},
    ),
    verl(
        "token rejection without weights",
        grpo(rejection_level="token", rejection_band=BAND, aggregation="token"),
        TOKEN,
        rs="token_k1",
        rs_threshold="0.8_1.25",
    ),
    verl(
        "sequence rejection",
        grpo(rejection_level="sequence", rejection_band=BAND, aggregation="token"),
        TOKEN,
        rs="seq_sum_k1",
        rs_threshold="0.8_1.25",
    ),
    verl(
        "rejection by the geometric mean, token weights",
        grpo(
            tis_cap=1.2, rejection_level="sequence_mean", rejection_band=BAND, aggregation="token"
        ),
        TOKEN,
        **{"is": "token", "is_threshold": 1.2},
        rs="seq_mean_k1",
        rs_threshold="0.8_1.25",
    ),
    verl(
        "token rejection, ratio_base = engine",
        grpo(
            ratio_base="engine", rejection_level="token", rejection_band=BAND, aggregation="token"
        ),
        TOKEN,
        mode="bypass_mode",
        rs="token_k1",
        rs_threshold="0.8_1.25",
    ),
    verl("no rejection", grpo(rejection_level="none"), SEQ),
    trl("token_truncate", grpo(tis_cap=1.2), "grpo", **{"is": "token_truncate", "is_max": 1.2}),
    trl(
        "token_mask",
        grpo(tis_cap=1.4, rejection_level="token", rejection_band=(0.7, 1.4)),
        "grpo",
        **{"is": "token_mask", "is_min": 0.7, "is_max": 1.4},
    ),
    trl(
        "sequence_truncate",
        grpo(tis_cap=1.5, importance_level="sequence"),
        "grpo",
        **{"is": "sequence_truncate", "is_max": 1.5},
    ),
    trl(
        "sequence_mask",
        grpo(
            tis_cap=3.0,
            importance_level="sequence",
            rejection_level="sequence",
            rejection_band=(0.0, 3.0),
        ),
        "grpo",
        **{"is": "sequence_mask", "is_max": 3.0},
    ),
    trl(
        "gspo, sequence_mask, KL beside it",
        grpo(
            variant="gspo",
            **CLIP,
            tis_cap=3.0,
            importance_level="sequence",
            rejection_level="sequence",
            rejection_band=(0.7, 3.0),
            kl_coef=0.1,
            kl_clamp=0.0,
        ),
        "grpo",
        level="sequence",
        beta=0.1,
        **{"is": "sequence_mask", "is_min": 0.7, "is_max": 3.0},
    ),
    openrlhf(
        "tis, openrlhf",
        grpo(tis_cap=1.2, aggregation="token"),
        "policy",
        agg="token",
        band=[0.0, 1.2],
        **{"is": "tis"},
    ),
    openrlhf(
        "icepop, openrlhf",
        grpo(tis_cap=1.4, rejection_level="token", rejection_band=(0.7, 1.4), aggregation="token"),
        "policy",
        agg="token",
        band=[0.7, 1.4],
        **{"is": "icepop"},
    ),
    openrlhf(
        "seq-mask-tis, openrlhf",
        grpo(
            tis_cap=1e6,
            rejection_level="sequence_mean",
            rejection_band=(0.9, 1.25),
            aggregation="token",
        ),
        "policy",
        agg="token",
        band=[0.9, 1.25],
        **{"is": "seq-mask-tis"},
    ),
]

VALUE_ROWS = [
    Row(
        name="value loss, clipped",
        ours=ppo(value_clip=0.2, vf_coef=1.0),
        peer="verl",
        call="value",
        args={"clip": 0.2, "agg": TOKEN},
    ),
    Row(
        name="value loss, sequences",
        ours=ppo(value_clip=0.1, vf_coef=1.0, aggregation="sequence"),
        peer="verl",
        call="value",
        args={"clip": 0.1, "agg": SEQ},
    ),
    openrlhf("value loss, not clipped", ppo(value_clip=0.0, vf_coef=1.0), "value", agg="token"),
    openrlhf(
        "value loss, openrlhf", ppo(value_clip=0.2, vf_coef=1.0), "value", agg="token", clip=0.2
    ),
]

PAIR_ROWS = [
    Row(
        name="dpo",
        ours={"kind": "dpo", "beta": 0.3, "loss": "sigmoid"},
        peer="trl",
        call="dpo",
        args={"loss_types": ["sigmoid"], "beta": 0.3},
    ),
    Row(
        name="dpo, average_logprobs",
        ours={"kind": "dpo", "beta": 0.3, "average_logprobs": True},
        peer="trl",
        call="dpo",
        args={"loss_types": ["sigmoid_norm"], "beta": 0.3},
    ),
    Row(
        name="ipo, average_logprobs",
        ours={"kind": "dpo", "loss": "ipo", "beta": 0.3, "average_logprobs": True},
        peer="trl",
        call="dpo",
        args={"loss_types": ["ipo"], "beta": 0.3},
    ),
    openrlhf("ipo, sums", {"kind": "dpo", "loss": "ipo", "beta": 0.3}, "dpo", beta=0.3, ipo=True),
    openrlhf(
        "cdpo",
        {"kind": "dpo", "beta": 0.3, "label_smoothing": 0.2},
        "dpo",
        beta=0.3,
        label_smoothing=0.2,
    ),
    Row(name="rm", ours={"kind": "rm"}, peer="trl", call="rm", args={}),
    Row(name="rm, margin", ours={"kind": "rm"}, peer="trl", call="rm", args={"margin": True}),
    Row(
        name="rm, center_coef",
        ours={"kind": "rm", "center_coef": 0.05},
        peer="trl",
        call="rm",
        args={"center": 0.05},
    ),
    openrlhf("rm, margin, openrlhf", {"kind": "rm"}, "rm", margin=True),
    openrlhf("sft, tokens", {"kind": "sft", "aggregation": "token"}, "sft", agg="token"),
    openrlhf("sft, sequences", {"kind": "sft", "aggregation": "sequence"}, "sft", agg="sequence"),
]

ADVANTAGE_ROWS = [
    gained(
        "group_mean, group_std", grpo(baseline="group_mean", scale="group_std"), "grpo", std=True
    ),
    gained("group_mean, no scale", grpo(baseline="group_mean", scale="none"), "grpo", std=False),
    gained("leave_one_out", grpo(baseline="leave_one_out", scale="none"), "rloo"),
    gained(
        "no baseline, batch_std",
        grpo(baseline="none", scale="batch_std"),
        "reinforce_plus_plus",
        bessel=True,
    ),
    gained(
        "group_mean, batch_std",
        grpo(baseline="group_mean", scale="batch_std"),
        "reinforce_plus_plus_baseline",
        bessel=True,
    ),
    *(
        gained(
            f"kl {kl} in the reward, {name}",
            grpo(**ours, kl_coef=0.2, kl_in="reward", kl_estimator=kl),
            estimator,
            kl_coef=0.2,
            kl=kl,
            bessel=estimator == "reinforce_plus_plus",
            **more,
        )
        for kl in ("k1", "k2", "k3")
        for name, ours, estimator, more in (
            ("grpo", {"variant": "grpo"}, "grpo", {"std": True}),
            ("reinforce_pp", {"variant": "reinforce_pp"}, "reinforce_plus_plus", {}),
        )
    ),
    gained("gae", ppo(gamma=0.97, lam=0.9, whiten=True), "gae", bessel=True, gamma=0.97, lam=0.9),
    gained(
        "gae, kl k1 in the reward",
        ppo(gamma=1.0, lam=0.95, kl_coef=0.2),
        "gae",
        bessel=True,
        gamma=1.0,
        lam=0.95,
        kl_coef=0.2,
        kl="k1",
    ),
]

ROWS = [
    *VARIANT_ROWS,
    *POLICY_ROWS,
    *KL_ROWS,
    *CORRECTION_ROWS,
    *VALUE_ROWS,
    *PAIR_ROWS,
    *ADVANTAGE_ROWS,
]


def question(peers: tuple[str, ...], data: dict[str, Any]) -> dict[str, Any]:
    """What `ask_losses.py` and `ask_openrlhf.py` read."""
    rows = [[row.name, row.peer, row.call, row.args, row.data] for row in ROWS if row.peer in peers]
    return {"data": data, "rows": rows}
