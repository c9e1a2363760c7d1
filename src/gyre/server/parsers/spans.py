"""Spans: what the pieces of an answer's text are. In: text and markers. Out: spans that together
are the whole text, so that nothing of it is lost, and what of a text must be held back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MOST_BLANK = 256  # white space that is held back; a longer one is content
_BLANK = re.compile(r"\s*")
Kind = Literal["content", "reasoning", "name", "arguments", "markup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpan:
    """A run of an answer's text. "markup" is what only says where the others begin and end."""

    kind: Kind
    text: str
    start: int  # characters before it


def held_chars(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins a marker. Pure."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def find_blank_end(text: str, start: int) -> int:
    """Return the place of the first character from `start` on that is not white space. Pure."""
    found = _BLANK.match(text, start)
    assert found is not None  # it matches nothing at all, too
    return found.end()
