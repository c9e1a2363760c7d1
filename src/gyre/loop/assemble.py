"""Assemble: scored groups to one global, unpacked TrainBatch. In: groups, reference log-probs,
values, the objective. Out: the batch and its metrics. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gyre.core.records import (
    Evaluation,
    Group,
    Rollout,
    Score,
    ScorePart,
    TrainBatch,
    TrainSequence,
)
from gyre.core.scores import AccuracyMetric, is_right
from gyre.loop.refill import StepRollouts, drops_equal, filter_metric, find_equal
from gyre.objectives.advantages import Estimates, Sample, estimate, rank_pairs
from gyre.objectives.config import AnyObjective, DpoConfig, GrpoConfig, PpoConfig
from gyre.observability.intervals import mean_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Forward passes over `bare_batch` of the same groups; None where the objective needs none."""

    policy: Evaluation | None = None
    reference: Evaluation | None = None
    critic: Evaluation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    batch: TrainBatch
    num_equal_groups: int  # groups that teach nothing, by the objective's filter_metric
    num_dropped_groups: int  # of those, left out by the objective's equal_groups = "drop"
    num_truncated: int  # completions left out of the loss by the objective's mask_truncated
    num_groups_without_pair: int  # online DPO: no two rewards far enough apart
    metrics: Mapping[str, float]  # what only the groups as a whole can tell


def bare_batch(groups: Sequence[Group], *, step: int) -> TrainBatch:
    """Lay out tokens and masks only, for reference, critic and reward passes."""
    return TrainBatch(
        sequences=tuple(_sequence(rollout) for rollout in _rollouts(groups)), step=step
    )


def assemble(
    objective: AnyObjective,
    groups: Sequence[Group],
    passes: Passes,
    *,
    step: int,
    accuracy: AccuracyMetric | None = None,
) -> Assembled:
    """Build the batch that the objective trains on. `passes` are over bare_batch(groups), in its
    order; `accuracy` decides which completions are correct.

    Samples that no part could score are in no group and in no statistic. Groups that the objective
    drops are removed before any normalization over the batch.
    """
    if isinstance(objective, DpoConfig):
        return _pairs(objective, groups, passes, step)
    assert isinstance(objective, GrpoConfig | PpoConfig), f"{objective.kind} takes no rollouts"
    equal = find_equal(groups, filter_metric(objective, accuracy))
    dropped = equal if drops_equal(objective) else frozenset[str]()
    members = [member for member in _members(groups) if member.rollout.group_id not in dropped]
    samples = [_sample(objective, member, passes) for member in members]
    estimates = estimate(objective, samples)
    sequences = []
    for k, member in enumerate(members):
        if not samples[k].in_loss:
            continue
        columns = {"advantages": _spread(member.rollout, estimates.advantages[k])}
        if estimates.returns is not None:
            columns["returns"] = _spread(member.rollout, estimates.returns[k])
        sequence = _sequence(member.rollout, score=member.score.value)
        sequences.append(
            replace(
                sequence, columns={**sequence.columns, **columns, **_passed(passes, member.place)}
            )
        )
    return Assembled(
        batch=TrainBatch(sequences=tuple(sequences), step=step),
        num_equal_groups=len(equal),
        num_dropped_groups=len(dropped),
        num_truncated=len(members) - len(sequences),
        num_groups_without_pair=0,
        metrics=_metrics(len(equal), len(groups)) | _kl_in_reward(estimates, samples),
    )


def add_part(groups: Sequence[Group], name: str, weight: float, values: np.ndarray) -> list[Group]:
    """Add a reward model's values to the scores, one per rollout in order."""
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
            scores.append(
                replace(score, value=score.value + weight * part.value, parts=(*score.parts, part))
            )
        extended.append(replace(group, scores=tuple(scores)))
    return extended


def reward_metrics(groups: Sequence[Group], accuracy: AccuracyMetric | None) -> dict[str, float]:
    """Compute means over the rollouts of a step.

    They cover accuracy, length, finish reasons and tokens sampled by a policy older than the
    newest. Reward and each part are averaged over the completions that could be scored. Returns an
    empty mapping without groups.
    """
    scores = [score for group in groups for score in group.scores]
    scored = [score for score in scores if score.is_scored]
    rollouts = _rollouts(groups)
    if not rollouts:
        return {}
    values: dict[str, list[float]] = {}
    for score in scored:
        for part in score.parts:
            values.setdefault(part.name, []).append(part.value)
    metrics = {f"reward/{name}": float(np.mean(parts)) for name, parts in values.items()}
    if scored:
        metrics["reward"] = float(np.mean([score.value for score in scored]))
    if len(scored) < len(scores):
        metrics["unscored_share"] = 1.0 - len(scored) / len(scores)
    if accuracy is not None:
        metrics["train_accuracy"] = float(np.mean([is_right(score, accuracy) for score in scores]))
    metrics["length"] = float(np.mean([int(rollout.sampled.sum()) for rollout in rollouts]))
    metrics["cut_off_share"] = float(np.mean([rollout.finish == "length" for rollout in rollouts]))
    repeating = [rollout.finish == "repetition" for rollout in rollouts]
    if any(repeating):
        metrics["repetition_share"] = float(np.mean(repeating))
    versions = np.concatenate([rollout.versions[rollout.sampled] for rollout in rollouts])
    if len(versions):
        metrics["stale_tokens_share"] = float(np.mean(versions < versions.max()))
    return metrics


def reward_error(groups: Sequence[Group]) -> float | None:
    """Return the standard error of a step's mean reward, or None for fewer than two prompts. Each
    prompt is one observation, since its completions are correlated."""
    means = [[score.value for score in group.scores if score.is_scored] for group in groups]
    return mean_error([float(np.mean(values)) for values in means if values])


def num_unscored(groups: Sequence[Group]) -> int:
    """Count the completions that no part could score."""
    return sum(not score.is_scored for group in groups for score in group.scores)


def refill_metrics(
    objective: AnyObjective, rollouts: StepRollouts, assembled: Assembled, num_groups: int
) -> dict[str, float]:
    """Compute the cost of dynamic sampling.

    Of `num_groups` complete groups, counts those without a learning signal and the prompts (and
    completions) sampled per kept one. The latter is omitted where none was kept.
    """
    if not num_groups or not drops_equal(objective):
        return {}
    kept = num_groups - len(rollouts.dropped) - assembled.num_dropped_groups
    equal = {
        "equal_groups_share": 1.0 - kept / num_groups,
        "refilled_prompts": float(rollouts.num_refilled),
    }
    return equal | ({"sampled_per_kept": num_groups / kept} if kept else {})


def _pairs(objective: DpoConfig, groups: Sequence[Group], passes: Passes, step: int) -> Assembled:
    sequences: list[TrainSequence] = []
    without = start = 0
    for group in groups:
        scored = [i for i, score in enumerate(group.scores) if score.is_scored]
        pairs = rank_pairs(objective, np.array([group.scores[i].value for i in scored]))
        without += not pairs
        for best, worst in pairs:
            pair_id = len(sequences) // 2
            for member, chosen in ((scored[best], 1.0), (scored[worst], 0.0)):
                sequence = _sequence(group.rollouts[member], score=group.scores[member].value)
                columns = {**sequence.columns, **_passed(passes, start + member)}
                scalars = {**sequence.scalars, "chosen": chosen}
                sequences.append(
                    replace(sequence, columns=columns, scalars=scalars, pair_id=pair_id)
                )
        start += len(group.rollouts)
    num_equal = len(find_equal(groups, None))
    return Assembled(
        batch=TrainBatch(sequences=tuple(sequences), step=step),
        num_equal_groups=num_equal,
        num_dropped_groups=0,
        num_truncated=0,
        num_groups_without_pair=without,
        metrics=_metrics(num_equal, len(groups)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A completion that could be scored."""

    place: int  # in bare_batch of all groups
    rollout: Rollout
    score: Score


def _members(groups: Sequence[Group]) -> list[_Member]:
    scores = [score for group in groups for score in group.scores]
    return [
        _Member(place=place, rollout=rollout, score=score)
        for place, (rollout, score) in enumerate(zip(_rollouts(groups), scores, strict=True))
        if score.is_scored
    ]


def _metrics(num_equal_groups: int, num_groups: int) -> dict[str, float]:
    return {"equal_groups_share": num_equal_groups / num_groups} if num_groups else {}


def _kl_in_reward(estimates: Estimates, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean KL in the reward. The trainer reports only the KL in its loss."""
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
    assert rollout.logprob_kind == "processed", (
        f"{rollout.rollout_id} has {rollout.logprob_kind} log-probs, the trainer's are processed"
    )
    return TrainSequence(
        tokens=rollout.tokens,
        columns={"loss_mask": rollout.sampled, "logprobs": rollout.logprobs},
        scalars={} if score is None else {"score": score},
        group_id=rollout.group_id,
        temperature=rollout.sampling.temperature,
        support=rollout.support,
    )


def _sample(objective: GrpoConfig | PpoConfig, member: _Member, passes: Passes) -> Sample:
    rollout, i = member.rollout, member.place
    mask, truncated = rollout.sampled, rollout.finish == "length"
    critic, reference = passes.critic, passes.reference
    bootstraps = isinstance(objective, PpoConfig) and objective.bootstrap_truncated and truncated
    assert not bootstraps or (critic is not None and critic.per_sequence is not None), (
        "bootstrapping needs a critic"
    )
    return Sample(
        group_id=rollout.group_id,
        score=member.score.value,
        num_tokens=int(mask.sum()),
        # The trainer's, as the reference's are: the engine rounds otherwise, and that gap is no KL.
        logprobs_C=None if passes.policy is None else passes.policy.per_token[i][mask],
        reference_logprobs_C=None if reference is None else reference.per_token[i][mask],
        values_C=None if critic is None else critic.per_token[i][mask],
        last_value=float(critic.per_sequence[i])
        if bootstraps and critic and critic.per_sequence is not None
        else 0.0,
        in_loss=not (objective.mask_truncated and truncated),
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
    """Scatter the sampled tokens' values to their positions in the sequence, 0 elsewhere."""
    spread_T = np.zeros(len(rollout.tokens), dtype=np.float32)
    spread_T[rollout.sampled] = values_C
    return spread_T
