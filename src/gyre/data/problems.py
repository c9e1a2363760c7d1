"""Problem: one row or one procedural problem before rendering, and the split into training and
held-out (pure).

In: problems in file order. Out: `Split`. The split depends on the prompt's text alone, not on seed,
order, tokenizer or template. No run or objective thus trains on a prompt that another one is tested
on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gyre.core.seeds import derive_seed
from gyre.text.messages import Message, as_turns

CUT_CHARS = 1 << 16
_SPACE = re.compile(r"\s")

Prompting = str | tuple[Message, ...]  # a text of the user, or a conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One item of a source."""

    where: str  # "file:line" or "task:index", for messages
    prompt: Prompting
    task: Mapping[str, Any]  # becomes Prompt.task; JSON-able
    # the whole row, for responses and pairs; empty for procedural problems
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Problems in source order; no prompt is in both halves."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    num_duplicates: int  # dropped: equal to an earlier one
    num_overlapping: int  # dropped from train: prompt is in the held-out file


def prompt_key(prompt: Prompting) -> str:
    """Return the prompt's text with normalized white space: equal keys mean equal prompts."""
    text = prompt if isinstance(prompt, str) else json.dumps(as_turns(prompt), sort_keys=True)
    return " ".join(piece for piece in (" ".join(part.split()) for part in _parts(text)) if piece)


def _parts(text: str) -> Iterator[str]:
    """Split the text at white space about every CUT_CHARS: splitting a long one at once takes many
    times its memory."""
    start = 0
    while len(text) - start > CUT_CHARS and (found := _SPACE.search(text, start + CUT_CHARS)):
        yield text[start : found.start()]
        start = found.end()
    yield text[start:]


def is_held_out(key: str, fraction: float) -> bool:
    """Return True for `fraction` of all keys."""
    return derive_seed("held_out", key) < fraction * 2**63


def by_prompt(problem: Problem) -> Hashable:
    """Return the identity under which problems with the same prompt are duplicates."""
    return prompt_key(problem.prompt)


def split_by_hash(
    problems: Iterable[Problem], fraction: float, identity: Callable[[Problem], Hashable]
) -> Split:
    """Drop duplicates, then split by the hash of the prompt."""
    kept, num_duplicates = _without_repeats(problems, identity)
    flags = [is_held_out(prompt_key(problem.prompt), fraction) for problem in kept]
    return Split(
        train=tuple(p for p, held_out in zip(kept, flags, strict=True) if not held_out),
        held_out=tuple(p for p, held_out in zip(kept, flags, strict=True) if held_out),
        num_duplicates=num_duplicates,
        num_overlapping=0,
    )


def split_by_file(
    train: Iterable[Problem], held_out: Iterable[Problem], identity: Callable[[Problem], Hashable]
) -> Split:
    """Combine two given files; a prompt in both stays held out."""
    kept, train_duplicates = _without_repeats(train, identity)
    tested, test_duplicates = _without_repeats(held_out, identity)
    keys = {prompt_key(problem.prompt) for problem in tested}
    unseen = tuple(problem for problem in kept if prompt_key(problem.prompt) not in keys)
    return Split(
        train=unseen,
        held_out=tuple(tested),
        num_duplicates=train_duplicates + test_duplicates,
        num_overlapping=len(kept) - len(unseen),
    )


def _without_repeats(
    problems: Iterable[Problem], identity: Callable[[Problem], Hashable]
) -> tuple[list[Problem], int]:
    first: dict[Hashable, Problem] = {}
    count = 0
    for problem in problems:
        first.setdefault(identity(problem), problem)
        count += 1
    return list(first.values()), count - len(first)
