"""Assemble: scored groups to one global, unpacked TrainBatch. In: groups, reference log-probs, values, the objective.
Out: the batch and what to report of it. Pure. Caller: loop.controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre.core.records import Evaluation, Group, Rollout, Score, ScorePart, TrainBatch, TrainSequence
from gyre.loop.accuracy import AccuracyMetric, is_right
from gyre.objectives.advantages import Estimates, Sample, equal_groups, estimate, rank_pairs
from gyre.objectives.config import AnyObjective, DpoConfig, GrpoConfig, PpoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Forward passes over `bare_batch` of the same groups; None where the objective needs none."""

    policy: Evaluation | None = None
    reference: Evaluation | None = None
    critic: Evaluation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    batch: TrainBatch
    num_equal_groups: int  # groups whose scores were all equal
    num_dropped_groups: int  # of those, left out by the objective's equal_groups = "drop"
    num_groups_without_pair: int  # online DPO: no two rewards far enough apart
    metrics: Mapping[str, float]  # what only the groups as a whole can tell


def bare_batch(groups: Sequence[Group], *, step: int) -> TrainBatch:
    """Tokens and masks only: what reference, critic and reward passes need."""
    return TrainBatch(sequences=tuple(_sequence(rollout) for rollout in _rollouts(groups)), step=step)


def assemble(objective: AnyObjective, groups: Sequence[Group], passes: Passes, *, step: int) -> Assembled:
    """Lay out what the objective trains on. `passes` are over bare_batch(groups), in its order."""
    if isinstance(objective, DpoConfig):
        return _pairs(objective, groups, passes, step)
    assert isinstance(objective, GrpoConfig | PpoConfig), f"{objective.kind} takes no rollouts"
    rollouts = _rollouts(groups)
    scores = [score for group in groups for score in group.scores]
    samples = [_sample(r, s, i, passes) for i, (r, s) in enumerate(zip(rollouts, scores, strict=True))]
    estimates = estimate(objective, samples)
    drops = isinstance(objective, GrpoConfig) and objective.equal_groups == "drop"
    dropped = estimates.equal_groups if drops else ()
    sequences = []
    for i, rollout in enumerate(rollouts):
        if rollout.group_id in dropped:
            continue
        columns = {"advantages": _spread(rollout, estimates.advantages[i])}
        if estimates.returns is not None:
            columns["returns"] = _spread(rollout, estimates.returns[i])
        sequence = _sequence(rollout, score=scores[i].value)
        sequences.append(replace(sequence, columns={**sequence.columns, **columns, **_passed(passes, i)}))
    return Assembled(
        batch=TrainBatch(sequences=tuple(sequences), step=step),
        num_equal_groups=len(estimates.equal_groups),
        num_dropped_groups=len(dropped),
        num_groups_without_pair=0,
        metrics=_metrics(len(estimates.equal_groups), len(groups)) | _kl_in_reward(estimates, samples),
    )


def add_part(groups: Sequence[Group], name: str, weight: float, values: np.ndarray) -> list[Group]:
    """Add a reward model's verdicts to the scores, one per rollout in order."""
    verdicts = iter(values.tolist())
    extended = []
    for group in groups:
        scores = []
        for score in group.scores:
            value = next(verdicts)
            finite = bool(np.isfinite(value))
            part = ScorePart(
                name=name,
                value=value if finite else 0.0,
                weight=weight,
                reason=f"reward model: {value:.4f}",
                outcome="ok" if finite else "invalid",
            )
            scores.append(replace(score, value=score.value + weight * part.value, parts=(*score.parts, part)))
        extended.append(replace(group, scores=tuple(scores)))
    return extended


def reward_metrics(groups: Sequence[Group], accuracy: AccuracyMetric | None) -> dict[str, float]:
    """Means over the rollouts of a step: the reward, each part, accuracy, length, how completions ended."""
    scores = [score for group in groups for score in group.scores]
    rollouts = _rollouts(groups)
    values: dict[str, list[float]] = {}
    for score in scores:
        for part in score.parts:
            values.setdefault(part.name, []).append(part.value)
    metrics = {f"reward/{name}": float(np.mean(parts)) for name, parts in values.items()}
    metrics["reward"] = float(np.mean([score.value for score in scores]))
    if accuracy is not None:
        metrics["train_accuracy"] = float(np.mean([is_right(score, accuracy) for score in scores]))
    metrics["length"] = float(np.mean([int(rollout.sampled.sum()) for rollout in rollouts]))
    metrics["cut_off_share"] = float(np.mean([rollout.finish == "length" for rollout in rollouts]))
    return metrics


def _pairs(objective: DpoConfig, groups: Sequence[Group], passes: Passes, step: int) -> Assembled:
    rewards = [np.array([score.value for score in group.scores]) for group in groups]
    sequences: list[TrainSequence] = []
    without = start = 0
    for group, rewards_G in zip(groups, rewards, strict=True):
        pairs = rank_pairs(objective, rewards_G)
        without += not pairs
        for best, worst in pairs:
            pair_id = len(sequences) // 2
            for member, chosen in ((best, 1.0), (worst, 0.0)):
                sequence = _sequence(group.rollouts[member], score=group.scores[member].value)
                columns = {**sequence.columns, **_passed(passes, start + member)}
                scalars = {**sequence.scalars, "chosen": chosen}
                sequences.append(replace(sequence, columns=columns, scalars=scalars, pair_id=pair_id))
        start += len(group.rollouts)
    num_equal = len(equal_groups(rewards))
    return Assembled(
        batch=TrainBatch(sequences=tuple(sequences), step=step),
        num_equal_groups=num_equal,
        num_dropped_groups=0,
        num_groups_without_pair=without,
        metrics=_metrics(num_equal, len(groups)),
    )


def _metrics(num_equal_groups: int, num_groups: int) -> dict[str, float]:
    return {"equal_groups_share": num_equal_groups / num_groups} if num_groups else {}


def _kl_in_reward(estimates: Estimates, samples: Sequence[Sample]) -> dict[str, float]:
    """The trainer reports the KL that it has in its loss; one that is in the reward is known here alone."""
    tokens = sum(sample.num_tokens for sample in samples)
    if estimates.kls is None or not tokens:
        return {}
    return {
        "kl_reference": sum(estimates.kls) / tokens,
        "kl_bounded_fraction": sum(estimates.kls_bounded or ()) / tokens,
    }


def _rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def _sequence(rollout: Rollout, *, score: float | None = None) -> TrainSequence:
    return TrainSequence(
        tokens=rollout.tokens,
        columns={"loss_mask": rollout.sampled, "logprobs": rollout.logprobs},
        scalars={} if score is None else {"score": score},
        group_id=rollout.group_id,
        temperature=rollout.sampling.temperature,
        support=rollout.support,
    )


def _sample(rollout: Rollout, score: Score, i: int, passes: Passes) -> Sample:
    mask = rollout.sampled
    critic, reference = passes.critic, passes.reference
    cut_off = rollout.finish == "length" and critic is not None and critic.per_sequence is not None
    return Sample(
        group_id=rollout.group_id,
        score=score.value,
        num_tokens=int(mask.sum()),
        # The trainer's, as the reference's are: the engine rounds otherwise, and that gap is no KL.
        logprobs_C=None if passes.policy is None else passes.policy.per_token[i][mask],
        reference_logprobs_C=None if reference is None else reference.per_token[i][mask],
        values_C=None if critic is None else critic.per_token[i][mask],
        last_value=float(critic.per_sequence[i]) if cut_off and critic and critic.per_sequence is not None else 0.0,
    )


def _passed(passes: Passes, i: int) -> dict[str, np.ndarray]:
    columns = {}
    if passes.policy is not None:
        columns["policy_logprobs"] = passes.policy.per_token[i]
    if passes.reference is not None:
        columns["reference_logprobs"] = passes.reference.per_token[i]
    if passes.critic is not None:
        columns["values"] = passes.critic.per_token[i]
    return columns


def _spread(rollout: Rollout, values_C: np.ndarray) -> np.ndarray:
    """Values of the sampled tokens at their places in the sequence, 0 elsewhere."""
    spread_T = np.zeros(len(rollout.tokens), dtype=np.float32)
    spread_T[rollout.sampled] = values_C
    return spread_T
