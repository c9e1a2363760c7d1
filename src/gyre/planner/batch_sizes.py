"""Batch sizes: the four named batch sizes, and all other batch numbers as arithmetic. Pure.

In: Sizes, lengths in tokens. Out: DerivedSizes with notes where something does not divide, or
ConfigError where it cannot work.
"""

from __future__ import annotations

import math

from gyre.core.errors import ConfigError
from gyre.core.rounding import ceil_div
from gyre.planner.plan import DerivedSizes, PlanInputs, Sizes


def longest_sequence(inputs: PlanInputs) -> int:
    return inputs.max_prompt_tokens + inputs.max_completion_tokens


def check_lengths(inputs: PlanInputs) -> None:
    longest, context = longest_sequence(inputs), inputs.model.context_tokens
    if longest > context:
        raise ConfigError(
            f"a prompt of {inputs.max_prompt_tokens} and a completion of "
            f"{inputs.max_completion_tokens} tokens need "
            f"{longest} tokens of context, the model has {context}",
            hint="lower data.max_prompt_tokens or the sampling's max_tokens by "
            f"{longest - context}",
        )
    for name in ("prompts_per_step", "completions_per_prompt", "max_prompt_tokens"):
        if getattr(inputs, name) < 1:
            raise ConfigError(f"{name} = {getattr(inputs, name)}: need at least 1")


def derive(sizes: Sizes, inputs: PlanInputs, *, max_running: int = 0) -> DerivedSizes:
    """Return all numbers that follow, and what is uneven about them. `max_running`: of an engine, 0
    without one."""
    sequences = sizes.prompts_per_step * sizes.completions_per_prompt
    longest = longest_sequence(inputs)
    if sizes.tokens_per_chunk < longest:
        raise ConfigError(
            f"tokens_per_chunk = {sizes.tokens_per_chunk} cannot hold a sequence of {longest} "
            "tokens "
            f"({inputs.max_prompt_tokens} prompt + {inputs.max_completion_tokens} completion)",
            hint=f"set tokens_per_chunk to at least {longest}: a sequence is never split",
        )
    if not 1 <= sizes.sequences_per_update <= sequences:
        raise ConfigError(
            f"sequences_per_update = {sizes.sequences_per_update}: a step has {sequences} "
            "sequences "
            f"({sizes.prompts_per_step} prompts × {sizes.completions_per_prompt})",
            hint=f"choose 1 to {sequences}, best a divisor of it",
        )
    updates = ceil_div(sequences, sizes.sequences_per_update)
    last = sequences - (updates - 1) * sizes.sequences_per_update
    per_chunk = sizes.tokens_per_chunk // longest
    at_once = completions_at_once(sizes, inputs, max_running)
    return DerivedSizes(
        sequences_per_step=sequences,
        updates_per_step=updates * inputs.epochs_per_batch,
        sequences_in_last_update=last,
        longest_sequence_tokens=longest,
        expected_tokens_per_step=sequences
        * (inputs.max_prompt_tokens + inputs.max_completion_tokens // 2),
        most_tokens_per_step=sequences * longest,
        chunks_per_update=ceil_div(sizes.sequences_per_update, per_chunk),
        longest_queue=max(0, min(sequences, at_once) - inputs.engines * max_running)
        if max_running
        else 0,
        submissions=ceil_div(sequences, at_once) if max_running else 1,
        most_sampled_per_step=sequences * (1 + inputs.max_refills) if max_running else 0,
        notes=tuple(_notes(sizes, sequences, last, longest)),
    )


def completions_at_once(sizes: Sizes, inputs: PlanInputs, max_running: int) -> int:
    """Completions of a step that are submitted together: what one engine lets run and wait, in
    whole groups."""
    size, sequences = (
        sizes.completions_per_prompt,
        sizes.prompts_per_step * sizes.completions_per_prompt,
    )
    most = sequences
    if inputs.max_queued is not None:
        most = min(most, max_running + inputs.max_queued)
    if inputs.max_queued_tokens is not None:
        most = min(most, max(1, inputs.max_queued_tokens // inputs.max_prompt_tokens) * size)
    return most // size * size or most


def _notes(sizes: Sizes, sequences: int, last: int, longest: int) -> list[str]:
    notes = []
    if last != sizes.sequences_per_update:
        divisor = largest_divisor(sequences, sizes.sequences_per_update)
        notes.append(
            f"{sequences} sequences per step do not divide by sequences_per_update = "
            f"{sizes.sequences_per_update}: "
            f"the last update of an epoch has {last}; {divisor} would divide"
        )
    if sizes.sequences_per_update % sizes.completions_per_prompt:
        notes.append(
            f"an update of {sizes.sequences_per_update} sequences cuts through the groups of "
            f"{sizes.completions_per_prompt}: siblings of one prompt train in different updates"
        )
    if (waste := sizes.tokens_per_chunk % longest) and sizes.tokens_per_chunk // longest < 4:
        notes.append(
            f"a chunk holds {sizes.tokens_per_chunk // longest} sequences of full length and "
            f"{waste} tokens "
            "that only shorter ones can fill"
        )
    return notes


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of a number up to `most`; it takes the root of the number's
    steps."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return max(d for pair in small for d in (pair, number // pair) if d <= most)
