"""Objective config: the objective of a run. In: the `[objective]` table. Out: one frozen, resolved
model, and functions that answer other packages' questions about it. Torch-free.

A GRPO variant is a row of `VARIANTS`: named defaults for keys that the TOML omits. After parsing no
field is open, and every choice can be set separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from gyre.core.config import Section

Variant = Literal["grpo", "dapo", "dr_grpo", "gspo", "rloo", "reinforce_pp", "cispo"]
Estimator = Literal["k1", "k2", "k3", "k3_plus"]

# Shao et al. 2024, arXiv 2402.03300, eq. 3: mean over tokens, then over sequences
_GRPO: Mapping[str, Any] = {
    "baseline": "group_mean",
    "scale": "group_std",
    "ratio": "token",
    "equal_groups": "keep",
    "surrogate": "clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "aggregation": "sequence",
}
# What each variant changes of it.
_CHANGES: Mapping[Variant, Mapping[str, Any]] = {
    "grpo": {},
    # Yu et al. 2025, arXiv 2503.14476, eq. 8 and 11: clip-higher, token-level mean, dynamic
    # sampling
    "dapo": {"clip_high": 0.28, "aggregation": "token", "equal_groups": "drop"},
    # Liu et al. 2025, arXiv 2503.20783, section 3.2: neither division by the standard deviation nor
    # by the length
    "dr_grpo": {"scale": "none", "aggregation": "fixed_length"},
    # Zheng et al. 2025, arXiv 2507.18071, eq. 5 to 7: one length-normalized ratio per sequence
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    # Ahmadian et al. 2024, arXiv 2402.14740, section 2.2: leave-one-out baseline, every token of
    # equal weight. Each token has a ratio (verl); TRL clips one ratio per sequence: the same
    # direction on policy, not off policy
    "rloo": {"baseline": "leave_one_out", "scale": "none", "aggregation": "token"},
    # Hu et al. 2025, arXiv 2501.03262: no group; KL in the reward, normalized over the whole
    # batch's tokens
    "reinforce_pp": {
        "baseline": "none",
        "scale": "batch_std",
        "aggregation": "token",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    # MiniMax 2025, arXiv 2506.13585, eq. 4 and 5: the ratio is clipped and detached, no token loses
    # its gradient
    "cispo": {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token"},
}
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {name: {**_GRPO, **changes} for name, changes in _CHANGES.items()}
)

Correction = Literal["tis", "icepop", "none"]
CORRECTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"
        "tis": {},
        # Ling Team 2025, arXiv 2510.18855, "IcePop": M(k) = k for k in [0.5, 5], else 0
        "icepop": {"tis_cap": 5.0, "rejection_level": "token", "rejection_band": (0.5, 5.0)},
        "none": {"tis_cap": 0.0},
    }
)


class SftConfig(Section):
    """Supervised fine-tuning: cross-entropy on the target tokens."""

    kind: Literal["sft"] = "sft"
    aggregation: Literal["token", "sequence"] = "token"
    """What the loss is a mean over: all target tokens of an update, or its sequences (each a mean
    over its tokens)."""


class RmConfig(Section):
    """Reward model from preference pairs (Bradley–Terry)."""

    kind: Literal["rm"] = "rm"
    center_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the squared sum of a pair's two scores, which keeps scores around zero; 0 turns it
    off."""


class DpoConfig(Section):
    """Direct preference optimization on offline pairs, or on pairs of own completions ranked by
    reward."""

    kind: Literal["dpo"] = "dpo"
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid is DPO (with label_smoothing: cDPO), ipo regresses the log-ratio gap on 1 / (2 beta).
    The gap is of sums over tokens, as in OpenRLHF; TRL's ipo averages per token, which is
    average_logprobs = true."""
    beta: float = Field(default=0.1, gt=0.0)
    """How strongly the policy is held to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of pairs taken to be labeled the wrong way round (cDPO); sigmoid only."""
    average_logprobs: bool = False
    """Divide each sequence's log-prob by its number of target tokens before pairs are compared
    (TRL's sigmoid_norm, and its ipo)."""
    sft_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the chosen sequence's mean negative log-likelihood, added to each pair's loss; 0
    turns it off. Pairs have equal weight (Pang et al. 2024, eq. 1); TRL's sft term is a mean over
    all chosen tokens."""
    pairs: Literal["offline", "online"] = "offline"
    """offline: pairs come from the data; online: from each group of completions, ranked by
    reward."""
    pairs_per_group: int = Field(default=1, ge=1)
    """Online: pairs made of one group at most: best with worst, second best with second worst, …"""
    min_reward_gap: float = Field(default=0.0, ge=0.0)
    """Online: a pair is made only if its rewards differ by more than this."""

    @model_validator(mode="after")
    def check(self) -> DpoConfig:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(
                "label_smoothing needs loss = 'sigmoid'; set it to 0 with loss = 'ipo'"
            )
        return self


class PolicyConfig(Section):
    """Options shared by the policy-gradient objectives: ratio, surrogate, KL, correction,
    aggregation."""

    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio of each token, or one geometric mean per sequence. A token's log-ratio is
    bounded at ±20 first, as in verl and OpenRLHF; for sequences verl bounds the mean at 10 instead,
    TRL nothing."""
    surrogate: Literal["clip", "cispo", "reinforce"] = "clip"
    """clip is PPO's pessimistic minimum; cispo clips and detaches the ratio; reinforce has no ratio
    at all."""
    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float = Field(default=0.0, ge=0.0)
    """With a negative advantage the loss is at most this times its size (must exceed 1); 0 turns it
    off."""
    ratio_base: Literal["trainer", "engine"] = "trainer"
    """Whose log-probs the ratio divides by: the trainer's before the update, or those that the
    engine sampled with."""
    correction: Correction = "tis"
    """Row of named choices that fills the four keys below where they are not set: truncated
    importance sampling at 2; IcePop, which keeps ratios in [0.5, 5] and drops the other tokens; or
    none of them."""
    tis_cap: float = Field(default=2.0, ge=0.0)
    """Truncated importance sampling: tokens are weighted by min(trainer / engine probability,
    this); 0 turns it off, and so does ratio_base = 'engine', whose ratio already starts there.
    Under ratio = 'sequence' the weights are the tokens' own, as in verl; TRL gives every token of a
    sequence the mean weight."""
    importance_level: Literal["token", "sequence"] = "token"
    """Whose weight tis_cap truncates: each token's ratio, or the product over its sequence (verl
    rollout_is; TRL *_truncate). The product is unbiased and has the larger variance."""
    rejection_level: Literal["none", "token", "sequence", "sequence_mean"] = "none"
    """What must lie in rejection_band: each token's trainer / engine ratio (IcePop), the product
    over its sequence, or its geometric mean (verl seq_mean_k1). What lies outside gets weight 0 and
    still counts in the loss's mean, as in TRL; verl takes it out of the mean too. With ratio_base =
    'engine' the trainer's log-probs are the current ones."""
    rejection_band: tuple[float, float] = (0.5, 2.0)
    """Lowest and highest ratio that is kept, both included. IcePop is tis_cap = 5, rejection_level
    = 'token', rejection_band = [0.5, 5]. TRL's default is importance_level = 'sequence', tis_cap =
    3, rejection_level = 'sequence', rejection_band = [0, 3]."""
    off_policy_mask_threshold: float = Field(default=0.0, ge=0.0)
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, section 3.1): a token with a
    negative advantage has no policy loss where the mean of log(engine / trainer) over its sequence
    exceeds this, in nats. The trainer's log-probs are the current ones. 0 turns it off; TRL
    suggests 0.5."""
    chi2_coef: float = Field(default=0.0, ge=0.0)
    """Weight of (trainer / engine - 1)^2 per token in the loss, with the ratio's gradient. Over the
    engine's tokens its mean is chi^2(trainer, engine), by how much staleness widens the importance
    weights (Laidlaw et al. 2024, arXiv 2403.03185, penalize the same divergence). 0 turns it
    off."""
    aggregation: Literal["token", "sequence", "fixed_length"] = "token"
    """What an update's loss is a mean over: its tokens, its sequences, or sequences times
    fixed_length_tokens."""
    fixed_length_tokens: int = Field(default=0, ge=0)
    """Divisor per sequence under aggregation = 'fixed_length', for example the rollout's
    max_tokens."""
    kl_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference model; 0 means that no reference is loaded."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL enters: a term of the loss, or a penalty on each token's reward before
    advantages."""
    kl_estimator: Estimator = "k3"
    """Per-token estimator: k1 log-ratio, k2 half its square, k3 unbiased and positive, k3_plus k3
    with k2 gradient."""
    kl_clamp: float = Field(default=10.0, ge=0.0)
    """Largest size of a token's KL estimate; 0 leaves it unbounded. Where not set: 10 for k3 and
    k3_plus, 0 for k1, k2 and with kl_ratio_weighted (verl; OpenRLHF bounds k1 and k2 at 10 too, TRL
    nothing). Clamped tokens are counted and have no gradient, or k2's under k3_plus."""
    kl_ratio_weighted: bool = False
    """Multiply the k3 in the loss by the policy's unclipped ratio, with the ratio's gradient: the
    gradient is then that of the KL itself (DeepSeek-V3.2; TRL's default,
    use_bias_correction_kl)."""
    entropy_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus: the exact entropy of each token's distribution after temperature
    and truncation, averaged as the loss is (verl; TRL averages it over tokens). Neither the ratio
    nor tis_cap weighs it."""
    mask_truncated: bool = False
    """Leave completions that reached rollout.max_tokens out of the loss. Their scores still count
    in their group's baseline; the denominator and the batch's statistics do not see them (DAPO's
    overlong filtering)."""

    @model_validator(mode="before")
    @classmethod
    def fill_from_correction(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("correction") not in CORRECTIONS:
            return values
        return {**CORRECTIONS[values["correction"]], **values}

    @model_validator(mode="before")
    @classmethod
    def fill_kl_clamp(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "kl_clamp" in values:
            return values
        estimator = values.get("kl_estimator", cls.model_fields["kl_estimator"].default)
        unbounded = estimator in ("k1", "k2") or values.get("kl_ratio_weighted", False)
        return {**values, "kl_clamp": 0.0} if unbounded else values

    @model_validator(mode="after")
    def check_importance(self) -> PolicyConfig:
        low, high = self.rejection_band
        if not 0.0 <= low <= 1.0 <= high or low == high:
            raise ValueError(
                f"rejection_band = [{low}, {high}]: need 0 <= low <= 1 <= high and low < high, "
                "since engine and trainer that agree have a ratio of 1; [0.5, 2.0] is usual"
            )
        if self.importance_level == "sequence" and (
            not self.tis_cap or self.ratio_base == "engine"
        ):
            raise ValueError(
                "importance_level = 'sequence' needs tis_cap > 0 and ratio_base = 'trainer'; got "
                f"tis_cap = {self.tis_cap}, ratio_base = '{self.ratio_base}': set both, or leave "
                "importance_level out"
            )
        if (
            self.rejection_level == "none"
            and self.rejection_band != type(self).model_fields["rejection_band"].default
        ):
            raise ValueError(
                "rejection_band needs a rejection_level: 'token', 'sequence' or 'sequence_mean'"
            )
        return self

    @model_validator(mode="after")
    def check_policy(self) -> PolicyConfig:
        if self.dual_clip and self.dual_clip <= 1.0:
            raise ValueError(
                f"dual_clip = {self.dual_clip}: need more than 1 (3 is usual), or 0 to turn it off"
            )
        if self.dual_clip and self.surrogate != "clip":
            raise ValueError(
                f"dual_clip needs surrogate = 'clip', got '{self.surrogate}'; set dual_clip = 0"
            )
        if self.aggregation == "fixed_length" and self.fixed_length_tokens == 0:
            raise ValueError(
                "aggregation = 'fixed_length' (also dr_grpo) needs fixed_length_tokens; "
                "set it to the longest completion, the rollout's max_tokens"
            )
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator = 'k1' has a gradient of zero mean as a loss; use 'k2', 'k3' or "
                "'k3_plus', or kl_in = 'reward'"
            )
        if self.kl_in == "reward" and self.kl_estimator == "k3_plus":
            raise ValueError(
                "kl_estimator = 'k3_plus' differs from 'k3' by its gradient only; a reward has "
                "none: use 'k3'"
            )
        if self.kl_ratio_weighted and (self.kl_in == "reward" or self.kl_estimator != "k3"):
            raise ValueError(
                "kl_ratio_weighted corrects the gradient of k3 in the loss; got kl_in = "
                f"'{self.kl_in}', kl_estimator = '{self.kl_estimator}': set kl_in = 'loss' and "
                "kl_estimator = 'k3', or turn it off"
            )
        return self


class GrpoConfig(PolicyConfig):
    """Group-relative policy optimization and its variants."""

    kind: Literal["grpo"] = "grpo"
    variant: Variant = "grpo"
    """Row of named choices that fills every field below that is not set (and those of the policy
    loss)."""
    baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    """What is subtracted from a reward: its group's mean, the mean of its siblings, or nothing. A
    sample without siblings has advantage 0 (verl: its raw reward)."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What advantages are divided by: the group's standard deviation with G - 1 (verl, TRL), or the
    batch's over all sampled tokens, whose mean is subtracted too, with N (verl: N - 1)."""
    equal_groups: Literal["keep", "drop"] = "keep"
    """keep: groups that teach nothing still count in the loss's mean. drop: they are left out
    before batch statistics, and replaced by up to rollout.max_refills rounds of further prompts
    (dynamic sampling)."""
    filter_metric: Literal["accuracy", "score"] = "accuracy"
    """What "drop" looks at. accuracy keeps groups with 0 < number right < size, by eval.metric
    (DAPO, eq. 11); where no part of a weight other than 0 judges correctness, the score decides.
    score drops groups of equal scores."""

    @model_validator(mode="before")
    @classmethod
    def fill_from_variant(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        variant = values.get("variant", "grpo")
        return {**VARIANTS[variant], **values} if variant in get_args(Variant) else values


class PpoConfig(PolicyConfig):
    """Proximal policy optimization with a critic."""

    kind: Literal["ppo"] = "ppo"
    kl_in: Literal["loss", "reward"] = "reward"
    """Where the KL enters: a term of the loss, or a penalty on each token's reward before
    advantages."""
    kl_estimator: Estimator = "k1"
    """Per-token estimator: k1 log-ratio, k2 half its square, k3 unbiased and positive, k3_plus k3
    with k2 gradient."""
    gamma: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount per token."""
    bootstrap_truncated: bool = False
    """Add the critic's value after the last token to the return of a completion that reached
    rollout.max_tokens (Pardo et al. 2018, arXiv 1712.00378). Right where rewards withhold their
    verdict on such completions. Rewards that score them as they stand make max_tokens the end of
    the episode: the value after it is 0."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    """Weight of longer returns in generalized advantage estimation; 1 is Monte Carlo, 0
    one-step."""
    whiten: bool = True
    """Shift and scale the advantages of a step to mean 0 and variance 1 over its N tokens; the
    variance divides by N (verl: N - 1)."""
    value_clip: float = Field(default=0.2, ge=0.0)
    """How far a value may move from the critic's old one before its loss stops shrinking; 0 turns
    it off."""
    vf_coef: float = Field(default=0.5, ge=0.0)
    """Weight of the value loss (half the squared error) beside the policy loss. verl and OpenRLHF
    train the critic by itself on the same half, as with 1."""


ObjectiveConfig = Annotated[
    SftConfig | RmConfig | DpoConfig | GrpoConfig | PpoConfig, Field(discriminator="kind")
]
AnyObjective = SftConfig | RmConfig | DpoConfig | GrpoConfig | PpoConfig


def needs_reference(config: AnyObjective) -> bool:
    """Return whether the reference model's log-probs of each step's tokens are needed."""
    return config.kind == "dpo" or (isinstance(config, PolicyConfig) and config.kl_coef > 0.0)


def needs_policy_logprobs(config: AnyObjective) -> bool:
    """Return whether the trainer must compute the policy's log-probs of each step's tokens before
    the advantages."""
    return isinstance(config, PolicyConfig) and config.kl_coef > 0.0 and config.kl_in == "reward"


def corrects_importance(config: AnyObjective) -> bool:
    """Return whether the loss accounts for tokens that another policy chose, or has no ratio that
    would have to."""
    if not isinstance(config, PolicyConfig):
        return True
    starts_there = config.ratio_base == "engine" and config.surrogate != "reinforce"
    return config.tis_cap > 0.0 or config.rejection_level != "none" or starts_there


def needs_critic(config: AnyObjective) -> bool:
    """Return whether the trainer holds a critic: values before the step, value loss in it."""
    return config.kind == "ppo"


def needs_rollouts(config: AnyObjective) -> bool:
    """Return whether an engine and rewards are needed; otherwise data feeds the trainer
    directly."""
    return isinstance(config, PolicyConfig) or (
        isinstance(config, DpoConfig) and config.pairs == "online"
    )


def is_pairwise(config: AnyObjective) -> bool:
    """Return whether sequences are preference pairs, whose two members must share a micro-batch."""
    return config.kind in ("rm", "dpo")


def trains_scores(config: AnyObjective) -> bool:
    """Return whether a reward model is trained: `scores_S` from a scalar head, no log-probs."""
    return config.kind == "rm"


def needs_old_logprobs(config: AnyObjective, *, updates_per_batch: int) -> bool:
    """Return whether column "old_logprobs" must be computed before training on a batch.

    With a single update per batch the policy has not changed when its loss is computed: old equals
    new, and `LossInputs.old_logprobs_N` stays None.
    """
    return (
        isinstance(config, PolicyConfig)
        and config.ratio_base == "trainer"
        and updates_per_batch > 1
    )


def required_columns(config: AnyObjective) -> frozenset[str]:
    """Return the names of the `TrainSequence.columns` that `loss_sum` reads, except "old_logprobs"
    (see `needs_old_logprobs`)."""
    if isinstance(config, RmConfig):
        return frozenset()
    if isinstance(config, SftConfig):
        return frozenset({"loss_mask"})
    if isinstance(config, DpoConfig):
        return frozenset({"loss_mask", "reference_logprobs"})
    columns = {"loss_mask", "advantages", "logprobs"}
    if config.kl_coef > 0.0 and config.kl_in == "loss":
        columns.add("reference_logprobs")
    if config.kind == "ppo":
        columns |= {"values", "returns"}
    return frozenset(columns)
