"""Collection: the rollouts of one step with their rewards under way, while it waits to be trained
on. In: groups, a Scoring. Out: complete groups; a record for snapshots, and from one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gyre.loop.collect import InFlightGroup, count_begun, keep_scores, split_whole
from gyre.loop.refill import StepRollouts
from gyre.loop.scoring import Scoring


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionRecord:
    """A collection whose rollouts are complete, as a snapshot keeps it."""

    step: int
    groups: list[InFlightGroup]  # complete, with the scores that there are
    dropped: list[str]  # of these, by id, without a learning signal
    refills: int
    num_refilled: int
    num_missing: int
    num_carried: int  # groups that went on in the next collection


@dataclass(slots=True, kw_only=True)
class Collection:
    """One step's groups, from the begin of their rollouts until they are trained on."""

    step: int
    groups: list[InFlightGroup]  # in the order in which they were opened; rollouts add to them
    scoring: Scoring
    size: int  # completions per prompt
    rollouts: StepRollouts | None = None  # None while they are under way
    whole: list[InFlightGroup] = field(default_factory=list)  # then: to be trained on
    carried: list[InFlightGroup] = field(default_factory=list)  # not finished in this step
    num_carried: int = 0
    begun_tokens: list[dict[int, int]] = field(init=False)  # of the groups that it began with

    def __post_init__(self) -> None:
        self.begun_tokens = [count_begun(group, self.size) for group in self.groups]

    def complete(self, rollouts: StepRollouts) -> None:
        """Note that no rollout is under way."""
        self.rollouts = rollouts
        self.whole, self.carried = split_whole(rollouts.groups, self.size)
        self.num_carried = len(self.carried)

    def note_begun(self) -> None:
        """Write into each group what it had at the begin, and the scores so far, as another attempt
        needs them to go on."""
        fresh = [dict.fromkeys(range(self.size), 0)] * (len(self.groups) - len(self.begun_tokens))
        for group, begun in zip(self.groups, [*self.begun_tokens, *fresh], strict=True):
            group.begun_tokens = dict(begun)
        self.note_scores()

    def note_scores(self) -> None:
        """Store the scores so far with their rollouts."""
        known = self.groups if self.rollouts is None else self.rollouts.groups
        keep_scores(known, self.scoring.so_far())

    def record(self) -> CollectionRecord:
        """Return what a snapshot keeps of a complete collection."""
        assert self.rollouts is not None
        self.note_scores()
        return CollectionRecord(
            step=self.step,
            groups=list(self.whole),
            dropped=sorted(self.rollouts.dropped),
            refills=self.rollouts.refills,
            num_refilled=self.rollouts.num_refilled,
            num_missing=self.rollouts.num_missing,
            num_carried=self.num_carried,
        )

    @staticmethod
    def restored(record: CollectionRecord, scoring: Scoring, *, size: int) -> Collection:
        """Return the collection of a record; rollouts without a score are scored now."""
        collection = Collection(
            step=record.step, groups=list(record.groups), scoring=scoring, size=size
        )
        offer_unscored(record.groups, scoring)
        collection.complete(
            StepRollouts(
                groups=collection.groups,
                dropped=frozenset(record.dropped),
                refills=record.refills,
                num_refilled=record.num_refilled,
                num_missing=record.num_missing,
                windows=[],
            )
        )
        collection.num_carried = record.num_carried
        return collection


def offer_unscored(groups: Sequence[InFlightGroup], scoring: Scoring) -> None:
    """Give the rewards what a broken off attempt had not scored."""
    for group in groups:
        for sample, rollout in group.rollouts.items():
            if sample not in group.scores:
                scoring.offer(rollout)
