"""Reasoning: split off at the beginning of an answer, however it comes, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.server.parsers.answer import AnswerParser
from gyre.server.parsers.reasoning import ReasoningParser
from gyre.server.parsers.tool_calls import FORMATS, ToolCallParser
from unit.server.parsers.cuts import CUTS, Found, check_spans, message_of, pieces_of

FRAGMENTS = ["<think>", "</think>", "<thi", "</", "\n", " ", "\n" * 300, "so", "<tool_call>", "nk>"]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def parse(text: str, *, is_open: bool, cuts: list[int]) -> Found:
    parser = AnswerParser(
        reasoning=ReasoningParser(is_open=is_open), tools=ToolCallParser(FORMATS["hermes"])
    )
    return message_of(parser, pieces_of(text, cuts))


@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join) | st.text(),
    cuts=CUTS,
    is_open=st.booleans(),
)
def test_a_stream_says_what_the_whole_says_and_nothing_is_lost(text, cuts, is_open) -> None:
    spans = check_spans(lambda: ReasoningParser(is_open=is_open), text, cuts)
    for span in spans:
        assert span.kind != "markup" or span.text.strip() in (
            "<think>",
            "</think>",
            "<think></think>",
        )
    assert parse(text, is_open=is_open, cuts=cuts) == parse(text, is_open=is_open, cuts=[])


CASES = [
    # of vLLM's cases: simple, no end, no reasoning, several lines, opened by the prompt or not
    ("<think>so</think>It is 2.", False, Found("It is 2.", "so")),
    ("<think>so</think>It is 2.", True, Found("It is 2.", "so")),
    ("so</think>It is 2.", True, Found("It is 2.", "so")),
    ("so</think>It is 2.", False, Found("so</think>It is 2.")),
    ("<think>so and so", False, Found("", "so and so")),
    ("so and so", True, Found("", "so and so")),
    ("It is 2.", False, Found("It is 2.")),
    ("<think>\na\nb\n</think>\n\nIt is 2.", False, Found("\n\nIt is 2.", "\na\nb\n")),
    ("\n<think></think>2", False, Found("2", "")),
    ("I say <think>a</think>.", False, Found("I say <think>a</think>.")),
    # a call that is only thought of is none
    (f"<think>try {CALL}?</think>\n\n{CALL}", False, Found("", f"try {CALL}?", [("f", "{}")])),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cuts", [[], list(range(200))])
def test_reasoning(case, cuts) -> None:
    text, is_open, expected = case
    assert parse(text, is_open=is_open, cuts=cuts) == expected
