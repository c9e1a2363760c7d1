"""Config of the fakes: what `kind = "fake"` selects for source, engine, trainer and scorer.
Torch-free.

With all four the whole loop turns in a second without a model: the source asks sums, the engine
answers with an accuracy that rises with the weight version, the scorer compares, the trainer counts
tokens and advances the version.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gyre.core.config import Section


class FakeSourceConfig(Section):
    """Sums of two small numbers, in bytes."""

    kind: Literal["fake"] = "fake"
    num_prompts: int = Field(default=64, ge=1)
    """Different sums, held-out ones included."""
    held_out_fraction: float = Field(default=0.25, ge=0.0, lt=1.0)
    """Share of sums that are held out."""
    seed: int = 0
    """Chooses the sums."""


class FakeEngineConfig(Section):
    """An engine that recites a script."""

    kind: Literal["fake"] = "fake"
    start_accuracy: float = Field(default=0.25, ge=0.0, le=1.0)
    """Share of right answers at weight version 0."""
    gain_per_version: float = Field(default=0.1, ge=0.0, le=1.0)
    """What each version adds to the accuracy."""
    context_tokens: int = Field(default=1024, ge=2)
    """Longest prompt with its completion; longer requests are refused."""
    max_running: int = Field(default=64, ge=1)
    """Completions that advance at the same time; the others wait."""
    logprob: float = Field(default=-0.5, le=0.0)
    """Log-probability that every token is said to have had, in nats."""
    token_delay_s: float = Field(default=0.0, ge=0.0)
    """Pause after each round of tokens, in seconds."""
    drain_deadline_s: float = Field(default=60.0, gt=0.0)
    """How long a commit with policy drain waits for running requests, in seconds."""


class FakeTrainerConfig(Section):
    """A trainer that counts."""

    kind: Literal["fake"] = "fake"
    sequences_per_update: int = Field(default=0, ge=0)
    """Sequences per counted update; 0 takes all of a step's."""
    logprob: float = Field(default=-0.5, le=0.0)
    """Log-probability of every target under policy and reference, in nats; equal to the engine's
    for no gap."""
    step_delay_s: float = Field(default=0.0, ge=0.0)
    """How long a step takes, in seconds."""


class FakeScorerConfig(Section):
    """A scorer that compares a completion's text with its task's answer."""

    kind: Literal["fake"] = "fake"
    delay_s: float = Field(default=0.0, ge=0.0)
    """How long each rollout takes to score, in seconds."""
