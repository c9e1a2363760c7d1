"""Echo: a prompt as its completions repeat it. In: the prompt's text and tokens, their log-probs.
Out: the `logprobs` of OpenAI's API for it, and where each token's text begins.

P prompt tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre.core.records import PromptLogprobs
from gyre.server.generation import as_alternatives
from gyre.text.detokenizer import Detokenizer
from gyre.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """One prompt."""

    text: str  # as it was asked, without the prefix
    tokens: np.ndarray  # int32 [P]
    prefix_tokens: int  # of these are the model's own beginning, which has no text

    def logprobs(self, told: PromptLogprobs | None, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the columns of a text completion's `logprobs`. The first token has no value."""
        assert told is not None, "the engine told no prompt log-probs"

        @functools.cache  # the same few tokens are best at many places
        def text_of(token: int) -> str:
            return tokenizer.decode([token])

        words = [text_of(token) for token in self.tokens.tolist()]
        values = told.logprobs.tolist()
        pairs = zip(told.top_ids.tolist(), told.top_logprobs.tolist(), strict=True)
        best = [
            as_alternatives(
                [(text_of(i), value) for i, value in zip(ids, likely, strict=True)], own
            )
            for (ids, likely), own in zip(pairs, zip(words, values, strict=True), strict=True)
        ]
        places = TokenOffsets(tokenizer, 0, skip_special=False)
        return {
            "tokens": words,
            "token_logprobs": [None, *values[1:]],
            "top_logprobs": [None, *best[1:]],
            "text_offset": [0] * self.prefix_tokens
            + places.push(self.tokens[self.prefix_tokens :].tolist()),
            "versions": [None] * len(words),  # nothing chose them
        }


class TokenOffsets:
    """Where the text of each token begins, in characters. A token that continues a character
    begins where the character does."""

    def __init__(self, tokenizer: Tokenizer, start: int, *, skip_special: bool) -> None:
        self._words = Detokenizer(tokenizer, skip_special=skip_special)
        self._place = start

    def push(self, tokens: Iterable[int]) -> list[int]:
        """Return the places of the tokens that follow."""
        places = []
        for token in tokens:
            places.append(self._place)
            self._place += len(self._words.push([int(token)]))
        return places
