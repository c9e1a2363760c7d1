"""Python results: what a call of `gyre.Engine` returns. In: pieces of completions. Out: frozen
records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gyre.server.generation import TextDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer of the model."""

    index: int  # which of the n
    text: str  # without special tokens, up to a stop string
    tokens: tuple[int, ...]  # all that were chosen, the end token and those of a stop string too
    finish_reason: str  # "stop", or "length" where max_tokens ended it
    logprobs: tuple[float, ...] | None  # of the plain softmax, where they were asked for
    # token id to log-prob, best first, at each token
    top_logprobs: tuple[Mapping[int, float], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt."""

    prompt_tokens: tuple[int, ...]
    completions: tuple[CompletionOutput, ...]  # n of them, by index

    @property
    def text(self) -> str:
        """Return the text of the first completion: the only one unless n was given."""
        return self.completions[0].text


def as_completions(
    parts: Sequence[TextDelta], *, logprobs: bool, alternatives: bool
) -> tuple[CompletionOutput, ...]:
    """Join pieces to completions, by index."""
    found: dict[int, list[TextDelta]] = {}
    for part in parts:
        found.setdefault(part.index, []).append(part)
    return tuple(
        _completion(index, found[index], logprobs=logprobs, alternatives=alternatives)
        for index in sorted(found)
    )


def _completion(
    index: int, parts: Sequence[TextDelta], *, logprobs: bool, alternatives: bool
) -> CompletionOutput:
    told = [
        dict(zip(ids.tolist(), values.tolist(), strict=True))
        for part in parts
        if part.top_ids is not None and part.top_logprobs is not None
        for ids, values in zip(part.top_ids, part.top_logprobs, strict=True)
    ]
    values = tuple(float(value) for part in parts for value in part.logprobs)
    return CompletionOutput(
        index=index,
        text="".join(part.text for part in parts),
        tokens=tuple(int(token) for part in parts for token in part.tokens),
        finish_reason=parts[-1].finish or "",
        logprobs=values if logprobs else None,
        top_logprobs=tuple(told) if logprobs and alternatives else None,
    )
