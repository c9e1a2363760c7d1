"""Evaluate: the policy's quality on held-out problems. In: held-out prompts or sequences, engine,
scorer. Out: an Outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gyre.core.contracts import PolicyTrainer, RolloutEngine, Scorer
from gyre.core.errors import InputError
from gyre.core.events import Emit
from gyre.core.records import Prompt, Sampling, TrainBatch
from gyre.core.scores import AccuracyMetric, is_right
from gyre.loop.collect import Collector, RequestRules, Window, as_group, keep_scores, open_groups
from gyre.loop.config import EvalConfig, RolloutConfig
from gyre.loop.failures import find_failures, lower_failed
from gyre.loop.ports import TextPort
from gyre.loop.scoring import Scoring
from gyre.observability.intervals import (
    mean_error,
    normal_interval,
    ratio_error,
    share_error,
    wilson_interval,
)

# A run that was resumed after an evaluation has not made it. Under a salt of their own, what
# evaluations leave in the engine's prefix cache is never found by rollouts, and being older it is
# given up before anything of theirs: so the rollouts that follow meet the same beginnings, in both
# runs.
EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One evaluation."""

    metric: str  # "accuracy", "reward", "pair_accuracy", "preference_accuracy" or "loss"
    value: float
    n: int  # problems, pairs or sequences
    meaning: str  # what the value is, in words
    standard_error: float | None  # None where n is too small to tell
    interval: tuple[float, float] | None  # 95 %: Wilson's of a share, the normal one of a mean
    detail: Mapping[str, float]  # further means


class Rollouts:
    """Evaluates by generating: accuracy by the named metric, or the mean reward without one."""

    def __init__(
        self,
        engine: RolloutEngine,
        scorer: Scorer,
        text: TextPort,
        rollout: RolloutConfig,
        config: EvalConfig,
        *,
        accuracy: AccuracyMetric | None,
        seed: int,
        emit: Emit,
        window: Window | None = None,
    ) -> None:
        self._window = window
        self._engine = engine
        self._scorer = scorer
        self._text = text
        self._seed = seed
        self._emit = emit
        self._accuracy = accuracy
        self._rollout = rollout
        self._length_key = "eval.max_tokens" if config.max_tokens else "rollout.max_tokens"
        self._sampling = Sampling(
            temperature=config.temperature,
            max_tokens=config.max_tokens or rollout.max_tokens,
            stop=rollout.stop,
        )

    async def run(self, prompts: Sequence[Prompt]) -> Outcome:
        """Sample each problem once. The same problems get the same seeds at every evaluation."""
        groups = open_groups(prompts, run_seed=self._seed, step=0)
        async with Scoring(self._scorer, deadline_s=self._rollout.reward_deadline_s) as scoring:
            collector = Collector(
                self._engine,
                scoring,
                self._text,
                RequestRules(sampling=self._sampling, tenant_salt=EVALUATION),
                deadline_s=self._rollout.deadline_s,
                emit=self._emit,
                length_key=self._length_key,
                window=self._window,
            )
            await collector.run(groups)
            keep_scores(groups, await scoring.finish())
        done = lower_failed([as_group(group) for group in groups])
        for failure in find_failures(done):
            self._emit("warn.reward_failed", where="evaluation", **failure.fields())
        rewards = [group.scores[0].value for group in done if group.scores[0].is_scored]
        if not rewards and self._accuracy is None:
            raise InputError(
                f"none of the {len(done)} completions of the evaluation could be scored",
                hint="warn.reward_failed in events.jsonl says which reward failed, and how",
            )
        rollouts = [rollout for group in done for rollout in group.rollouts]
        detail = {
            **({"reward": float(np.mean(rewards))} if rewards else {}),
            "length": float(np.mean([int(rollout.sampled.sum()) for rollout in rollouts])),
            "cut_off_share": float(np.mean([rollout.finish == "length" for rollout in rollouts])),
        }
        if self._accuracy is None:
            return mean_outcome(rewards, detail)
        right = [is_right(group.scores[0], self._accuracy) for group in done]
        return share_outcome("accuracy", right, self._accuracy.meaning, detail)


def share_outcome(
    metric: str, hits: Sequence[float], meaning: str, detail: Mapping[str, float]
) -> Outcome:
    """Summarize a share of trials, each a hit (1), a miss (0) or a tie (0.5)."""
    value, n = float(np.mean(hits)), len(hits)
    return Outcome(
        metric=metric,
        value=value,
        n=n,
        meaning=meaning,
        standard_error=share_error(value, n),
        interval=wilson_interval(value, n),
        detail=detail,
    )


def mean_outcome(rewards: Sequence[float], detail: Mapping[str, float]) -> Outcome:
    """Summarize the mean of rewards, which is not a share."""
    value, error = float(np.mean(rewards)), mean_error(rewards)
    return Outcome(
        metric="reward",
        value=value,
        n=len(rewards),
        meaning="mean reward of a completion, the weighted sum of its parts",
        standard_error=error,
        interval=normal_interval(value, error),
        detail=detail,
    )


async def pair_accuracy(trainer: PolicyTrainer, batch: TrainBatch) -> Outcome:
    """Return the share of held-out pairs whose chosen member the reward model scores higher."""
    scored = await trainer.evaluate(batch, "reward")
    assert scored.per_sequence is not None
    margins = scored.per_sequence[0::2] - scored.per_sequence[1::2]
    meaning = "share of pairs whose chosen member the reward model scores higher"
    return share_outcome(
        "pair_accuracy", preferred(margins), meaning, {"margin": float(np.mean(margins))}
    )


async def preference_accuracy(trainer: PolicyTrainer, batch: TrainBatch) -> Outcome:
    """Return the share of held-out pairs whose chosen member gained more log-prob over the
    reference than the rejected one."""
    policy, reference = (
        await trainer.evaluate(batch, "policy"),
        await trainer.evaluate(batch, "reference"),
    )
    gains = [
        float((p - r)[s.columns["loss_mask"]].sum())
        for p, r, s in zip(policy.per_token, reference.per_token, batch.sequences, strict=True)
    ]
    margins = np.array(gains[0::2]) - np.array(gains[1::2])
    meaning = (
        "share of pairs whose chosen member gained more log-prob over the reference than "
        "the rejected one"
    )
    return share_outcome(
        "preference_accuracy", preferred(margins), meaning, {"margin": float(np.mean(margins))}
    )


async def held_out_loss(trainer: PolicyTrainer, batch: TrainBatch) -> Outcome:
    """Return the mean negative log-prob of the held-out targets."""
    policy = await trainer.evaluate(batch, "policy")
    masks = [sequence.columns["loss_mask"] for sequence in batch.sequences]
    totals = [-float(p[m].sum()) for p, m in zip(policy.per_token, masks, strict=True)]
    tokens = [int(mask.sum()) for mask in masks]
    value, error = sum(totals) / max(1, sum(tokens)), ratio_error(totals, tokens)
    return Outcome(
        metric="loss",
        value=value,
        n=len(masks),
        meaning="mean negative log-prob of a target token, in nats",
        standard_error=error,
        interval=normal_interval(value, error),
        detail={},
    )


def preferred(margins: np.ndarray) -> list[float]:
    """Return which pairs were ranked correctly. A tie counts half, so that an untrained model
    scores 0.5."""
    return np.heaviside(margins, 0.5).tolist()
