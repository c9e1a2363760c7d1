"""Config of the loop: rollouts, cold start, evaluation, goal. In: TOML tables. Out: frozen
sections. No torch here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from gyre.core.config import Section
from gyre.core.records import Sampling
from gyre.core.rounding import ceil_div
from gyre.loop.repetition import RepetitionRule

SERVING_ONLY = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
)


# of one step, which is laid out whole in host memory before it is dealt to the trainer's ranks
MOST_SEQUENCES = 2**18
MOST_PATTERN_TOKENS = 1024  # compared for each token that is sampled


class RolloutConfig(Section):
    """What one loop step requests from the engine. Only sampling options that the trainer can
    reproduce: temperature and truncation."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts taken from the data per loop step."""
    completions_per_prompt: int = Field(default=8, ge=1)
    """Completions of each prompt: the group that rewards are compared in."""
    max_refills: int = Field(default=3, ge=0)
    """Where the objective drops groups that teach nothing (dapo): rounds of further prompts per
    step that replace them, one for each. When they are used up the step trains on what there is. 0
    replaces none. A step samples at most 1 + max_refills times its prompts; rewards are then waited
    for before the reference and critic passes."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Softmax temperature of rollouts."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus mass; below 1 the kept tokens travel with the rollout, and the trainer restricts its
    softmax to them."""
    top_k: int = Field(default=0, ge=0)
    """Tokens kept; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Keeps tokens with at least this times the best probability."""
    max_tokens: int = Field(default=128, ge=1)
    """Tokens chosen per completion at most."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""
    ignore_eos: bool = False
    """Go on past the end token: every completion has max_tokens. For benchmarks."""
    max_tokens_per_iteration: int = Field(default=0, ge=0)
    """Partial rollouts: a completion that has taken this many tokens in one loop step is set aside
    and continued in the next one, under the weights of then; 0 finishes each in its own step."""
    stop_repetition: int = Field(default=0, ge=0)
    """A completion ends early once its last tokens are one pattern this many times over; 0 turns it
    off. Its finish is "repetition". It is scored as it stands and trained on: mask_truncated and
    bootstrap_truncated do not concern it. Each completion is then a request of its own. vLLM:
    min_count of RepetitionDetectionParams."""
    repetition_pattern_tokens: tuple[int, int] = (8, 64)
    """Shortest and longest pattern that stop_repetition looks for. A shorter loop is found as a
    multiple of itself."""
    max_staleness: int = Field(default=0, ge=0, le=64)
    """Asynchronous training: versions by which the oldest token of a batch may be older than the
    weights that it trains. 0 is the synchronous order; 1 is one step off: the next rollouts run
    while a batch is trained on. Groups that max_tokens_per_iteration carries past the bound are
    dropped and counted. AReaL: max_head_offpolicyness; verl: staleness_threshold; NeMo-RL:
    max_trajectory_age_steps."""
    weight_update: Literal["drain", "continue"] = "drain"
    """With max_staleness above 0, what new weights do to rollouts under way. drain: they are handed
    over between two collections, so each has one version. continue: at once; running completions go
    on with the KV that they have, and each token carries the version that chose it (AReaL:
    interruptible generation; PipelineRL)."""
    deadline_s: float = Field(default=600.0, gt=0.0)
    """Longest wait for the rollouts of a step, and again for those of each refill."""
    reward_deadline_s: float = Field(default=120.0, gt=0.0)
    """Longest wait for rewards after the last rollout."""

    @model_validator(mode="before")
    @classmethod
    def refuse_what_cannot_be_trained_on(cls, values: Any) -> Any:
        for key in SERVING_ONLY if isinstance(values, dict) else ():
            if key in values:
                raise ValueError(
                    f"{key} is for serving only: the trainer computes the log-probs of rollouts "
                    "again from temperature "
                    "and truncation, and could not; leave it out, or use temperature, top_p, "
                    "top_k or min_p"
                )
        return values

    @model_validator(mode="after")
    def check_repetition(self) -> RolloutConfig:
        low, high = self.repetition_pattern_tokens
        if self.stop_repetition == 1:
            raise ValueError("stop_repetition = 1: need 2 or more, or 0 to turn it off")
        if not 1 <= low <= high <= MOST_PATTERN_TOKENS:
            raise ValueError(
                f"repetition_pattern_tokens = [{low}, {high}]: need 1 <= shortest <= longest <= "
                f"{MOST_PATTERN_TOKENS}"
            )
        return self

    @property
    def repetition(self) -> RepetitionRule | None:
        """Return what ends a completion early, or None."""
        if not self.stop_repetition:
            return None
        low, high = self.repetition_pattern_tokens
        return RepetitionRule(count=self.stop_repetition, min_pattern=low, max_pattern=high)

    @model_validator(mode="after")
    def check_weight_update(self) -> RolloutConfig:
        if self.weight_update == "continue" and not self.max_staleness:
            raise ValueError(
                "weight_update = 'continue' needs max_staleness of 1 or more: in the synchronous "
                "order no rollout runs while weights are handed over"
            )
        return self

    @property
    def lead(self) -> int:
        """Return how many collections may run ahead of the learner's step."""
        carries = most_carries(
            max_tokens=self.max_tokens, max_tokens_per_iteration=self.max_tokens_per_iteration
        )
        return lead_of(self.max_staleness, carries)

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_tokens=self.max_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            n=self.completions_per_prompt,
        )


def most_carries(*, max_tokens: int, max_tokens_per_iteration: int) -> int:
    """Return how often a completion can be set aside by the bound of one iteration (0: none)."""
    if not max_tokens_per_iteration:
        return 0
    return ceil_div(max_tokens, max_tokens_per_iteration) - 1


def lead_of(max_staleness: int, carries: int) -> int:
    """Return how many collections may run ahead.

    A completion that is carried over ages by one version each time. Where the bound allows it, as
    much is left for that; a bound above 0 always lets one collection run ahead.
    """
    return max(1, max_staleness - carries) if max_staleness else 0


def why_not_asynchronous(
    rollout: RolloutConfig,
    *,
    separate_weights: bool,
    needs_rollouts: bool,
    batch_invariant: bool,
    restarts_engine: bool,
) -> str | None:
    """Return why rollouts cannot run while the policy trains, or None. `separate_weights`: engines
    have devices and weights of their own."""
    if not rollout.max_staleness:
        return None
    wanted = f"rollout.max_staleness = {rollout.max_staleness}"
    if not needs_rollouts:
        return f"{wanted}: this objective trains on given data; leave it out"
    if not separate_weights:
        return (
            f"{wanted} needs engines with weights of their own, and here they read the trainer's "
            "storage or share its device: set cluster.kind = 'pod' and cluster.colocated = false, "
            "or max_staleness = 0"
        )
    if batch_invariant:
        return (
            f"{wanted} with engine.batch_invariant = true: equal log-probs need equal weights, and "
            "rollouts have older ones; leave one of the two out"
        )
    if restarts_engine:
        return (
            f"{wanted} with memory.leave.engine = 'destroy': the engine runs while the policy "
            "trains; leave one of the two out"
        )
    return None


class MetricConfig(Section):
    """The definition of correct: a reward part reaches a threshold."""

    part: str = ""
    """Name of the reward part; empty takes the first part that compares with a right answer, if
    there is one."""
    threshold: float | None = None
    """Smallest value of the part that counts as right; left out: the part's value for a right
    answer, else 1."""


class EvalConfig(Section):
    """Accuracy on held-out problems: greedy by default, scored by the rewards of the run."""

    num_problems: int = Field(default=0, ge=0)
    """Held-out problems per evaluation; 0 turns evaluation off."""
    every_steps: int = Field(default=0, ge=0)
    """Loop steps between evaluations, beside the first and the last; 0 leaves only those two."""
    metric: MetricConfig = MetricConfig()
    """What accuracy means: a reward part and its threshold. Without such a part the mean reward is
    reported."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0 is greedy."""
    max_tokens: int = Field(default=0, ge=0)
    """Tokens per completion at most; 0 takes rollout.max_tokens."""


class GoalConfig(Section):
    """The target of a run. `gyre train` reports whether it was reached, and with --check-goal fails
    if not."""

    metric: Literal["accuracy", "reward", "pair_accuracy", "preference_accuracy", "loss"] = (
        "accuracy"
    )
    """Which evaluation: accuracy of answers (eval.metric), their mean reward where there is none,
    accuracy of a reward model or of DPO on held-out pairs, or the held-out loss."""
    at_most_before: float | None = None
    """Largest value before the main stage."""
    at_least_after: float | None = None
    """Smallest value after it."""
    margin: float | None = None
    """Smallest gain from before to after."""

    @model_validator(mode="after")
    def check_marks(self) -> GoalConfig:
        if self.at_most_before is None and self.at_least_after is None and self.margin is None:
            raise ValueError("give at least one of at_most_before, at_least_after and margin")
        return self


class ColdStartConfig(Section):
    """A supervised stage before the main one."""

    steps: int = Field(default=400, ge=1)
    """Optimizer steps."""
    examples_per_step: int = Field(default=64, ge=1, le=MOST_SEQUENCES)
    """Examples per step."""
    learning_rate: float = Field(default=3e-3, ge=0.0, le=1.0)
    """Peak learning rate, as of trainer.learning_rate; falls to a tenth by a cosine."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up."""


class RunSection(Section):
    """The run's name, folder and seed."""

    name: str = Field(default="run", min_length=1)
    """Name of the run's folder under `folder`; a second run of the same name gets a number."""
    folder: str = "runs"
    """Where run folders are made."""
    seed: int = Field(default=0, ge=0)
    """Every draw of the run follows from it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute weights and activations: float32, bfloat16, float16 (losses are scaled), or auto:
    bfloat16 where the hardware multiplies it, else float16 on a GPU and float32 on a CPU."""
    threads: int = Field(default=0, ge=0)
    """CPU threads for tensors; 0 takes all cores."""
    stop_deadline_s: float = Field(default=30.0, ge=0.0)
    """Longest that Ctrl-C, SIGTERM or SIGHUP waits for the step in flight; then its rollouts are
    broken off and saved. A training pass that is still at it then is lost, and the newest snapshot
    stands."""
