"""Parallel config: how the state of each trained or frozen model is sharded over ranks. In: TOML
tables `[parallel]`, `[parallel.critic]`, `[parallel.reference]`, `[parallel.reward]`. Out: frozen
sections. No torch here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gyre.core.config import Section

Zero = Literal[0, 1, 2, 3]
SumGradients = Literal["chunk", "update"]


class SplitConfig(Section):
    """Sharding of one model; omitted keys inherit from `[parallel]`."""

    zero: Zero | None = None
    """As `parallel.zero`."""
    shard_ranks: int | None = Field(default=None, ge=0)
    """As `parallel.shard_ranks`."""


class ParallelConfig(Section):
    """Sharding over the trainer's ranks. A single process holds everything regardless."""

    zero: Zero = 1
    """What is sharded: 0 nothing, 1 optimizer state, 2 also gradients and, between updates,
    weights, 3 also weights during an update. A frozen model has weights only: it is whole with 0
    and 1."""
    shard_ranks: int = Field(default=0, ge=0)
    """Ranks that share one copy of the state; must divide the number of ranks. 0 takes all; less
    makes several copies that are kept equal (hybrid sharding)."""
    sum_gradients: SumGradients = "chunk"
    """With zero 2 and 3, when gradients are summed over ranks: after each chunk (4 bytes per
    parameter, sharded), or once per update (4 more bytes per parameter on every rank while an
    update has several chunks, less traffic)."""
    timeout_s: float = Field(default=120.0, gt=0.0)
    """Longest that a rank waits for the others in one collective; then the step ends and names who
    was missing."""
    critic: SplitConfig = Field(default_factory=SplitConfig)
    """The critic."""
    reference: SplitConfig = Field(default_factory=SplitConfig)
    """The reference model."""
    reward: SplitConfig = Field(default_factory=SplitConfig)
    """The reward model."""

    def of(self, model: Literal["actor", "critic", "reference", "reward"]) -> tuple[Zero, int]:
        """Return (zero, shard_ranks) of a model."""
        own = SplitConfig() if model == "actor" else getattr(self, model)
        zero = self.zero if own.zero is None else own.zero
        return zero, self.shard_ranks if own.shard_ranks is None else own.shard_ranks
