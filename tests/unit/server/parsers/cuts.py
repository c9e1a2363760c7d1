"""Cuts: what the parser tests share. In: a text and places. Out: its pieces; what a parser makes of
them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from gyre.server.parsers.answer import AnswerParser
from gyre.server.parsers.reasoning import ReasoningParser
from gyre.server.parsers.spans import TextSpan
from gyre.server.parsers.tool_calls import ToolCallParser

CUTS = st.lists(st.integers(0, 200), max_size=12)


@dataclass
class Found:
    """A whole message, put together as a client does."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)] or [""]


def message_of(parser: AnswerParser, pieces: list[str]) -> Found:
    found = Found()
    for number, piece in enumerate(pieces):
        delta = parser.push(piece, is_last=number == len(pieces) - 1)
        found.content += delta.content
        found.reasoning += delta.reasoning
        for call in delta.calls:
            if call.index == len(found.calls):
                assert call.name, "a call begins with its name"
                found.calls.append((call.name, ""))
            else:
                assert not call.name and call.index == len(found.calls) - 1
            name, arguments = found.calls[call.index]
            found.calls[call.index] = (name, arguments + call.arguments)
    return found


def spans_of(parser: ToolCallParser | ReasoningParser, pieces: list[str]) -> list[TextSpan]:
    """All spans in the order of the text; those of one kind that follow each other are joined."""
    spans = [span for piece in pieces for span in parser.push(piece)] + parser.flush()
    joined: list[TextSpan] = []
    for span in sorted(spans, key=lambda span: span.start):
        if joined and joined[-1].kind == span.kind:
            last = joined.pop()
            span = TextSpan(kind=last.kind, text=last.text + span.text, start=last.start)
        joined.append(span)
    return joined


Make = Callable[[], ToolCallParser | ReasoningParser]


def check_spans(make: Make, text: str, cuts: list[int]) -> list[TextSpan]:
    """Cut as it may be, the spans are those of the whole, and they are the whole text."""
    whole = spans_of(make(), [text])
    assert "".join(span.text for span in whole) == text
    assert spans_of(make(), pieces_of(text, cuts)) == whole
    assert spans_of(make(), list(text) or [""]) == whole
    return whole
