"""Reasoning: what a model thinks before it answers, `<think>…</think>`. In: pieces of text, and
whether the prompt has opened it. Out: spans.
"""

from __future__ import annotations

from gyre.server.parsers.spans import MOST_BLANK, Kind, TextSpan, find_blank_end, held_chars

OPENER, CLOSER = "<think>", "</think>"


class ReasoningParser:
    """The reasoning of one completion. It may stand only at the beginning."""

    def __init__(self, *, is_open: bool) -> None:
        """Begin a completion; with `is_open` the prompt ended with the opening tag."""
        self._is_open = is_open
        self._text = ""  # what no span has yet
        self._start = 0  # the characters before it
        self._step = self._begin

    def push(self, text: str) -> list[TextSpan]:
        """Add text; return the spans that are certain now."""
        return self._go(text, is_last=False)

    def flush(self) -> list[TextSpan]:
        """Return the spans of what was held back. Ends the text."""
        return self._go("", is_last=True)

    def _go(self, text: str, *, is_last: bool) -> list[TextSpan]:
        self._text += text
        spans: list[TextSpan] = []
        while self._text and self._step(spans, is_last):
            pass
        return spans

    def _begin(self, spans: list[TextSpan], is_last: bool) -> bool:
        blank = find_blank_end(self._text, 0)
        begun = self._text[blank : blank + len(OPENER)] if blank <= MOST_BLANK else "-"
        if begun == OPENER:
            self._take(spans, "markup", blank + len(OPENER))
            self._step = self._think
        elif OPENER.startswith(begun) and not is_last:
            return False
        else:
            self._step = self._think if self._is_open else self._answer
        return True

    def _think(self, spans: list[TextSpan], is_last: bool) -> bool:
        place = self._text.find(CLOSER)
        if place >= 0:
            self._take(spans, "reasoning", place)
            self._take(spans, "markup", len(CLOSER))
            self._step = self._answer
            return True
        kept = 0 if is_last else held_chars(self._text, [CLOSER])
        self._take(spans, "reasoning", len(self._text) - kept)
        return False

    def _answer(self, spans: list[TextSpan], is_last: bool) -> bool:
        self._take(spans, "content", len(self._text))
        return False

    def _take(self, spans: list[TextSpan], kind: Kind, length: int) -> None:
        if length:
            spans.append(TextSpan(kind=kind, text=self._text[:length], start=self._start))
        self._text, self._start = self._text[length:], self._start + length
