"""Choose: how a model writes its reasoning and its tool calls. In: its chat template's text, and
what the command line says. Out: an AnswerFormat, or a ConfigError. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gyre.core.errors import ConfigError
from gyre.server.parsers.answer import AnswerParser
from gyre.server.parsers.reasoning import CLOSER, OPENER, ReasoningParser
from gyre.server.parsers.tool_calls import FORMATS, CallFormat, ToolCallParser
from gyre.server.parsers.xml_calls import QWEN3_CODER, XML_FORMAT, XmlCallParser
from gyre.text.messages import Tool

AUTO, NONE, THINK = "auto", "none", "think"
CALL_FORMATS: Mapping[str, CallFormat] = {**FORMATS, QWEN3_CODER: XML_FORMAT}
TOOL_PARSERS = (AUTO, *CALL_FORMATS, NONE)
REASONING_PARSERS = (AUTO, THINK, NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """How the text of an answer becomes a message."""

    calls: CallFormat | None = None
    thinks: bool = False  # reasoning stands in <think>…</think>
    tools_refusal: str = "the model's chat template shows no tools; describe them in the prompt"
    # ids of the markers that are one token each: a tokenizer may skip them as special
    marker_ids: Mapping[str, int] = field(default_factory=dict)

    def kept_ids(self, *, with_tools: bool) -> frozenset[int]:
        """Return the ids that must appear in the text for the parsers to see them."""
        markers = (OPENER, CLOSER) if self.thinks else ()
        if with_tools and self.calls is not None:
            markers += self.calls.markers
        return frozenset(self.marker_ids[name] for name in markers if name in self.marker_ids)

    def make_parser(
        self,
        *,
        prompt_end: str,
        with_tools: bool,
        tools: Sequence[Tool] = (),
        most_calls: int | None = None,
    ) -> AnswerParser:
        """Return the parser of one completion. `prompt_end` is the end of the prompt's text, where
        a template may have opened the reasoning. `tools` have the types of XML parameters."""
        is_open = prompt_end.rstrip().endswith(OPENER)
        calls = self.calls if with_tools else None
        return AnswerParser(
            reasoning=ReasoningParser(is_open=is_open) if self.thinks else None,
            tools=None if calls is None else _make_call_parser(calls, tools),
            most_calls=most_calls,
        )


def _make_call_parser(calls: CallFormat, tools: Sequence[Tool]) -> ToolCallParser | XmlCallParser:
    return XmlCallParser(tools) if calls.is_xml else ToolCallParser(calls)


def choose_format(
    template: str,
    *,
    takes_tools: bool,
    tool_parser: str,
    reasoning_parser: str,
    special_ids: Mapping[str, int],
) -> AnswerFormat:
    """Return the format. "auto" decides by the text of the chat template; `special_ids` are the
    tokenizer's special tokens."""
    check_parsers(tool_parser, reasoning_parser)
    name = find_call_format(template) if tool_parser == AUTO else tool_parser
    thinks = reasoning_parser == THINK
    if reasoning_parser == AUTO:
        thinks = OPENER in template or CLOSER in template
    refusal = "" if takes_tools else AnswerFormat().tools_refusal
    if takes_tools and not name:
        names = ", ".join((*CALL_FORMATS, NONE))
        refusal = (
            "the chat template does not say how the model writes its calls; start the server with "
            f"--tool-parser and one of {names}"
        )
    return AnswerFormat(
        calls=CALL_FORMATS.get(name), thinks=thinks, tools_refusal=refusal, marker_ids=special_ids
    )


def find_call_format(template: str) -> str:
    """Return the name of the format that a chat template shows the model; "" when it shows none
    that is known."""
    if "<function=" in template and "<parameter=" in template:
        return QWEN3_CODER
    if "<tool_call>" in template:
        return "hermes"
    quotes = ('"parameters"', "'parameters'", '\\"parameters\\"')
    if "<|python_tag|>" in template or any(quoted in template for quoted in quotes):
        return "llama3_json"
    return ""


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """ConfigError for a name that the command line does not have."""
    _check("--tool-parser", tool_parser, TOOL_PARSERS)
    _check("--reasoning-parser", reasoning_parser, REASONING_PARSERS)


def _check(flag: str, value: str, accepted: Iterable[str]) -> None:
    if value not in accepted:
        raise ConfigError(f"{flag} {value}: no such parser", hint=f"give {', '.join(accepted)}")
