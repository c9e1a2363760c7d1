"""Staleness: by how many published versions a token is older than the weights that it trains. In:
versions of tokens, the versions published so far. Out: ages, groups that are too old, metrics.
Pure, but for StalenessBound, which emits what it drops.

A version counts updates, and a step may make several or none. The age of a token is the number of
versions that were published after the one that chose it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gyre.core.events import Emit
from gyre.core.records import Group
from gyre.loop.collect import InFlightGroup

MOST_PUBLISHED = 1024  # versions that are remembered; older tokens count as that old


def note_published(published: Sequence[int], version: int) -> tuple[int, ...]:
    """Return the versions published so far, ascending. A step without an update adds none."""
    if published and published[-1] >= version:
        return tuple(published)
    return (*published, version)[-MOST_PUBLISHED:]


def ages(versions: np.ndarray, published: Sequence[int]) -> np.ndarray:
    """Return how many versions were published after each of these."""
    return len(published) - np.searchsorted(np.asarray(published), versions, side="right")


def oldest_age(group: InFlightGroup, published: Sequence[int]) -> int:
    """Return the age of a group's oldest token; 0 without any."""
    chosen = [rollout.versions[rollout.sampled] for rollout in group.rollouts.values()]
    chosen += [partial.versions for partial in group.partials.values()]
    oldest = min((int(versions.min()) for versions in chosen if len(versions)), default=None)
    return 0 if oldest is None else int(ages(np.array([oldest]), published)[0])


def split_stale(
    groups: Sequence[InFlightGroup],
    published: Sequence[int],
    *,
    max_staleness: int,
    versions_ahead: int,
) -> tuple[list[InFlightGroup], list[InFlightGroup]]:
    """Return (groups to go on with, groups that would be too old when they are trained on), in
    order. `versions_ahead`: versions to be published until then. A bound of 0 drops none: only
    completions that max_tokens_per_iteration sets aside are old in that order."""
    if not max_staleness:
        return list(groups), []
    old = [
        oldest_age(group, published) > 0
        and oldest_age(group, published) + versions_ahead > max_staleness
        for group in groups
    ]
    kept = [group for group, is_old in zip(groups, old, strict=True) if not is_old]
    return kept, [group for group, is_old in zip(groups, old, strict=True) if is_old]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Ages of the tokens of one batch."""

    tokens: Mapping[int, int]  # tokens by age, ascending

    def metrics(self) -> dict[str, float]:
        """Return the metrics of `step.done`; none without a token."""
        count = sum(self.tokens.values())
        if not count:
            return {}
        return {
            "staleness_min": float(min(self.tokens)),
            "staleness_mean": sum(age * n for age, n in self.tokens.items()) / count,
            "staleness_max": float(max(self.tokens)),
            "stale_tokens_share": 1.0 - self.tokens.get(0, 0) / count,
        }


def staleness_of(groups: Sequence[Group], published: Sequence[int]) -> Staleness:
    """Count the tokens that the policy chose, by age."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return Staleness(tokens={})
    versions = np.concatenate([rollout.versions[rollout.sampled] for rollout in rollouts])
    found, counts = np.unique(ages(versions, published), return_counts=True)
    return Staleness(tokens=dict(zip(found.tolist(), counts.tolist(), strict=True)))


class StalenessBound:
    """Holds rollouts to `max_staleness`: knows the published versions, and drops what would be too
    old. A bound of 0, the synchronous order, drops and reports nothing."""

    def __init__(self, max_staleness: int, *, emit: Emit) -> None:
        self._max_staleness = max_staleness
        self._emit = emit
        self._step = 0  # that published the newest version
        self.published: tuple[int, ...] = ()  # versions, ascending

    def note_published(self, version: int, *, step: int) -> None:
        """Note that the engine has a version, the one of this step."""
        self.published, self._step = note_published(self.published, version), step

    def drop_stale(self, groups: Sequence[InFlightGroup], step: int) -> list[InFlightGroup]:
        """Return the groups without those that would be too old when this step trains."""
        kept, stale = split_stale(
            groups,
            self.published,
            max_staleness=self._max_staleness,
            versions_ahead=step - 1 - self._step,
        )
        if stale:
            parts = [partial.tokens for group in stale for partial in group.partials.values()]
            rollouts = [rollout for group in stale for rollout in group.rollouts.values()]
            parts += [rollout.tokens[rollout.sampled] for rollout in rollouts]
            tokens = sum(len(part) for part in parts)
            self._emit("drop.stale", step=step, count=len(stale), tokens=tokens)
        return kept

    def measure(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """Report the ages of a batch's tokens, and return their metrics."""
        if not self._max_staleness:
            return {}
        staleness = staleness_of(groups, self.published)
        self._emit("rollouts.staleness", step=step, tokens=dict(staleness.tokens))
        return staleness.metrics()
