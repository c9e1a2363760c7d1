"""Answer text: the text of one completion as it may be sent. In: its tokens, as they are chosen.
Out: pieces that never change once sent: whole characters, and nothing of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gyre.text.detokenizer import Detokenizer
from gyre.text.tokenizer import Tokenizer


class AnswerText:
    """Text of one completion, incrementally."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._words = Detokenizer(tokenizer, skip_special=True)
        self._stops = tuple(stops)
        self._held = ""  # may be the beginning of a stop string

    def push(self, tokens: np.ndarray, finish: str | None) -> str:
        """Add tokens int32 [c]; return the text that can be sent now. With `finish`, all of it."""
        text = self._held + self._words.push(tokens)
        if finish is not None:
            text += self._words.flush()
            return cut_at_stop(text, self._stops) if finish == "stop" else text
        kept = held_chars(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string in it. Pure."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def held_chars(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a stop string. Pure."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
