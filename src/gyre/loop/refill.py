"""Dynamic sampling: which groups have no learning signal, and how many prompts replace them. In:
scored groups, the objective, what counts as right. Out: the groups to drop, and the rollouts of a
step.

    groups ──▶ roll out ──▶ scores ──▶ equal groups dropped ──▶ as many further prompts,
                                                                at most max_refills times

Yu et al. 2025, arXiv 2503.14476, eq. 11: a group is kept with 0 < number right < size. The
decisions are pure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gyre.core.contracts import PromptSource
from gyre.core.records import Group, Score
from gyre.core.scores import AccuracyMetric, is_right
from gyre.loop.collect import (
    Collector,
    InFlightGroup,
    as_group,
    keep_scores,
    open_groups,
    split_whole,
)
from gyre.loop.config import RolloutConfig
from gyre.loop.failures import lower_failed
from gyre.loop.scoring import Scoring
from gyre.objectives.config import AnyObjective, GrpoConfig
from gyre.observability.overlap import Interval


def filter_metric(
    objective: AnyObjective, accuracy: AccuracyMetric | None
) -> AccuracyMetric | None:
    """Return the metric by which groups of this objective count as equal, or None for equal scores.
    A part of weight 0 is only observed, so it decides nothing."""
    if not _asks_for_accuracy(objective) or accuracy is None or not accuracy.rewarded:
        return None
    return accuracy


def why_filtered_by_score(objective: AnyObjective, accuracy: AccuracyMetric | None) -> str:
    """Explain why the filter uses the score instead of correctness; "" where it does not."""
    if not _asks_for_accuracy(objective) or filter_metric(objective, accuracy) is not None:
        return ""
    why = (
        "no reward part judges correctness"
        if accuracy is None
        else f"part '{accuracy.part}' has weight 0"
    )
    return f"objective.filter_metric = 'accuracy', and {why}: the score decides"


def _asks_for_accuracy(objective: AnyObjective) -> bool:
    return (
        drops_equal(objective)
        and isinstance(objective, GrpoConfig)
        and objective.filter_metric == "accuracy"
    )


def drops_equal(objective: AnyObjective) -> bool:
    """Return whether groups without a learning signal are removed from the batch."""
    return isinstance(objective, GrpoConfig) and objective.equal_groups == "drop"


def is_equal(scores: Sequence[Score], metric: AccuracyMetric | None) -> bool:
    """Return whether no scored sibling is better than another: none or all are correct, or all
    scores are equal. Samples that no part could score do not count. A group with fewer than two
    others is equal."""
    scored = [score for score in scores if score.is_scored]
    if len(scored) < 2:
        return True
    if metric is None:
        return len({score.value for score in scored}) == 1
    return sum(is_right(score, metric) for score in scored) in (0, len(scored))


def find_equal(groups: Sequence[Group], metric: AccuracyMetric | None) -> frozenset[str]:
    """Return the ids of groups without a learning signal. A failed part counts as the least value
    that it gave in any of them."""
    return frozenset(
        group.group_id for group in lower_failed(groups) if is_equal(group.scores, metric)
    )


def num_missing(*, wanted: int, kept: int, in_flight: int) -> int:
    """Return how many more prompts a step needs: one per dropped group. Groups in flight keep their
    places, so the number of groups never exceeds the target and no kept group is discarded."""
    return max(0, wanted - kept - in_flight)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The rollouts of one step."""

    groups: list[InFlightGroup]  # all, in the order in which they were opened
    dropped: frozenset[str]  # ids of whole groups that teach nothing, as far as it was looked
    refills: int  # rounds made
    num_refilled: int  # prompts sampled in them
    num_missing: int  # prompts still missing when the rounds were used up
    windows: list[Interval]  # when rollouts were being generated


class PromptFeed:
    """Rolls out a step's prompts, and replacements for groups without a learning signal."""

    def __init__(self, source: PromptSource, config: RolloutConfig, *, seed: int) -> None:
        self._source = source
        self._config = config
        self._seed = seed

    async def roll_out(
        self,
        groups: list[InFlightGroup],
        collector: Collector,
        scoring: Scoring,
        *,
        step: int,
        max_refills: int,
        metric: AccuracyMetric | None,
    ) -> StepRollouts:
        """Resume the groups in flight, then fill up with new prompts.

        New groups are appended to `groups`, where the caller finds them after an interruption. Ends
        after 1 + max_refills rounds: a pure function of seed, data cursor and scores. Without
        refills it neither waits for scores nor drops groups.
        """
        config = self._config
        # of a step that was broken off
        refills = max((group.refill for group in groups), default=0)
        groups += self._begin(
            max(0, config.prompts_per_step - len(groups)), step, first=0, refill=0
        )
        windows: list[Interval] = []
        dropped: frozenset[str] = frozenset()
        missing = 0
        todo = list(groups)
        while True:
            from_s = time.monotonic()
            await collector.run(todo)
            windows.append((from_s, time.monotonic()))
            if not max_refills:
                break
            keep_scores(groups, await scoring.finish())
            whole, in_flight = split_whole(groups, config.completions_per_prompt)
            dropped = find_equal([as_group(group) for group in whole], metric)
            kept = len(whole) - len(dropped)
            missing = num_missing(
                wanted=config.prompts_per_step, kept=kept, in_flight=len(in_flight)
            )
            if not missing or refills == max_refills:
                break
            refills += 1
            todo = self._begin(missing, step, first=len(groups), refill=refills)
            groups += todo
        return StepRollouts(
            groups=groups,
            dropped=dropped,
            refills=refills,
            num_refilled=sum(group.refill > 0 for group in groups),
            num_missing=missing,
            windows=windows,
        )

    def _begin(self, count: int, step: int, *, first: int, refill: int) -> list[InFlightGroup]:
        prompts = self._source.take(count) if count else ()
        return open_groups(prompts, run_seed=self._seed, step=step, first=first, refill=refill)
