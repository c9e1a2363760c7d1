"""Credits: when a collection may begin, and when the engine is free of rollouts. In: what collector
and learner tell. Out: the next state, and the answers. Pure.

    collector   begin ──▶ end ──▶ begin …    while a credit is left.
    learner     want(step) ──▶ has(step)? ──▶ train, hold, hand over, release ──▶ want(step + 1).

A collection is the rollouts of one step, and collections are numbered by their steps. Collection c
may begin while the learner is at step c - lead or later. So at most `lead` versions are published
between its begin and its training. With lead 0 the two take turns.

This is the capacity of AReaL, counted in batches (Fu et al. 2025, arXiv 2505.24298,
"Staleness-Aware Training").
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Credits:
    """The state of both tasks, as far as one waits for the other."""

    lead: int  # collections that may run ahead of the learner's step
    last: int  # no collection follows it
    collected: int  # the newest collection that has ended
    wanted: int  # step of the learner
    collecting: bool = False  # the next collection is under way
    held: bool = False  # the learner wants the engine for itself

    @property
    def may_begin(self) -> bool:
        """Return whether the next collection may begin now."""
        following = self.collected + 1
        has_credit = following - self.wanted <= self.lead and following <= self.last
        return has_credit and not self.collecting and not self.held

    @property
    def is_at_rest(self) -> bool:
        """Return whether the engine has no rollouts and gets none until `release`."""
        return self.held and not self.collecting

    def has(self, step: int) -> bool:
        """Return whether the batch of this step is complete."""
        return step <= self.collected

    def want(self, step: int) -> Credits:
        """Note the step that the learner begins with."""
        assert self.wanted <= step, f"step {step} after step {self.wanted}"
        assert not self.held, "the learner would wait for a collection that it holds off"
        return replace(self, wanted=step)

    def begin(self) -> Credits:
        """Note that the next collection begins."""
        assert self.may_begin, self
        return replace(self, collecting=True)

    def end(self) -> Credits:
        """Note that the collection under way has ended."""
        assert self.collecting, self
        return replace(self, collecting=False, collected=self.collected + 1)

    def hold(self) -> Credits:
        """Let no further collection begin."""
        assert not self.held, "held twice"
        return replace(self, held=True)

    def release(self) -> Credits:
        """Let collections begin again."""
        assert self.held, "released without a hold"
        return replace(self, held=False)
