"""Sizes: the four named batch sizes, and every other batch number as arithmetic on them. Pure.

In: Sizes, lengths in tokens. Out: DerivedSizes with notes where something does not divide, or ConfigError where it
cannot work. Callers: `planner.decide`.
"""

from __future__ import annotations

from gyre.core.errors import ConfigError
from gyre.planner.plan import DerivedSizes, PlanInputs, Sizes


def longest_sequence(inputs: PlanInputs) -> int:
    return inputs.max_prompt_tokens + inputs.max_completion_tokens


def check_lengths(inputs: PlanInputs) -> None:
    longest, context = longest_sequence(inputs), inputs.model.context_tokens
    if longest > context:
        raise ConfigError(
            f"a prompt of {inputs.max_prompt_tokens} and a completion of {inputs.max_completion_tokens} tokens need "
            f"{longest} tokens of context, the model has {context}",
            hint=f"lower data.max_prompt_tokens or the sampling's max_tokens by {longest - context}",
        )
    for name in ("prompts_per_step", "completions_per_prompt", "max_prompt_tokens"):
        if getattr(inputs, name) < 1:
            raise ConfigError(f"{name} = {getattr(inputs, name)}: need at least 1")


def derive(sizes: Sizes, inputs: PlanInputs) -> DerivedSizes:
    """All numbers that follow, and what is uneven about them."""
    sequences = sizes.prompts_per_step * sizes.completions_per_prompt
    longest = longest_sequence(inputs)
    if sizes.tokens_per_chunk < longest:
        raise ConfigError(
            f"tokens_per_chunk = {sizes.tokens_per_chunk} cannot hold a sequence of {longest} tokens "
            f"({inputs.max_prompt_tokens} prompt + {inputs.max_completion_tokens} completion)",
            hint=f"set tokens_per_chunk to at least {longest}: a sequence is never split",
        )
    if not 1 <= sizes.sequences_per_update <= sequences:
        raise ConfigError(
            f"sequences_per_update = {sizes.sequences_per_update}: a step has {sequences} sequences "
            f"({sizes.prompts_per_step} prompts × {sizes.completions_per_prompt})",
            hint=f"choose 1 to {sequences}, best a divisor of it",
        )
    updates = -(-sequences // sizes.sequences_per_update)
    last = sequences - (updates - 1) * sizes.sequences_per_update
    per_chunk = sizes.tokens_per_chunk // longest
    return DerivedSizes(
        sequences_per_step=sequences,
        updates_per_step=updates * inputs.epochs_per_batch,
        sequences_in_last_update=last,
        longest_sequence_tokens=longest,
        expected_tokens_per_step=sequences * (inputs.max_prompt_tokens + inputs.max_completion_tokens // 2),
        most_tokens_per_step=sequences * longest,
        chunks_per_update=-(-sizes.sequences_per_update // per_chunk),
        notes=tuple(_notes(sizes, sequences, last, longest)),
    )


def _notes(sizes: Sizes, sequences: int, last: int, longest: int) -> list[str]:
    notes = []
    if last != sizes.sequences_per_update:
        divisor = max(d for d in range(1, sizes.sequences_per_update + 1) if sequences % d == 0)
        notes.append(
            f"{sequences} sequences per step do not divide by sequences_per_update = {sizes.sequences_per_update}: "
            f"the last update of an epoch has {last}; {divisor} would divide"
        )
    if sizes.sequences_per_update % sizes.completions_per_prompt and sizes.completions_per_prompt > 1:
        notes.append(
            f"an update of {sizes.sequences_per_update} sequences cuts through the groups of "
            f"{sizes.completions_per_prompt}: siblings of one prompt train in different updates"
        )
    if (waste := sizes.tokens_per_chunk % longest) and sizes.tokens_per_chunk // longest < 4:
        notes.append(
            f"a chunk holds {sizes.tokens_per_chunk // longest} sequences of full length and {waste} tokens "
            "that only shorter ones can fill"
        )
    return notes
