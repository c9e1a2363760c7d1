"""Answer: the text of one completion to the fields of a chat message. In: pieces of text. Out: what
each adds to content, reasoning and tool calls; together they are the same however it was cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gyre.server.parsers.reasoning import ReasoningParser
from gyre.server.parsers.spans import TextSpan
from gyre.server.parsers.tool_calls import ToolCallParser
from gyre.server.parsers.xml_calls import XmlCallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """What a piece adds to one tool call."""

    index: int
    name: str  # with the first delta of a call; "" in later ones
    arguments: str  # the next characters of the JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelta:
    """What a piece adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class AnswerParser:
    """The message of one completion. A parser that is None leaves the text to the next one."""

    def __init__(
        self,
        *,
        reasoning: ReasoningParser | None = None,
        tools: ToolCallParser | XmlCallParser | None = None,
        most_calls: int | None = None,
    ) -> None:
        """Begin a message. Calls after the first `most_calls` are left out."""
        self._reasoning = reasoning
        self._tools = tools
        self._most_calls = most_calls
        self._calls = 0  # that have begun, with those that are left out

    @property
    def has_call(self) -> bool:
        return self._calls > 0

    def push(self, text: str, *, is_last: bool) -> AnswerDelta:
        """Add text; return what is certain now. `is_last` ends the message."""
        content, reasoning = text, ""
        if self._reasoning is not None:
            spans = self._reasoning.push(text)
            spans += self._reasoning.flush() if is_last else []
            content, reasoning = _join(spans, "content"), _join(spans, "reasoning")
        calls: list[CallDelta] = []
        if self._tools is not None:
            spans = self._tools.push(content)
            spans += self._tools.flush() if is_last else []
            content, calls = _join(spans, "content"), self._find_calls(spans)
        return AnswerDelta(content=content, reasoning=reasoning, calls=tuple(calls))

    def _find_calls(self, spans: Iterable[TextSpan]) -> list[CallDelta]:
        """Return one delta for each call in the spans."""
        found: dict[int, CallDelta] = {}
        for span in spans:
            if span.kind not in ("name", "arguments"):
                continue
            self._calls += span.kind == "name"
            index = self._calls - 1
            if self._most_calls is not None and index >= self._most_calls:
                continue
            old = found.get(index, CallDelta(index=index, name="", arguments=""))
            field = {span.kind: getattr(old, span.kind) + span.text}
            found[index] = replace(old, **field)
        return list(found.values())


def _join(spans: Iterable[TextSpan], kind: str) -> str:
    return "".join(span.text for span in spans if span.kind == kind)
