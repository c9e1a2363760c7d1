"""Tool calls: however the text comes, the calls in it are the same, and no character is lost."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gyre.server.parsers.answer import AnswerParser
from gyre.server.parsers.tool_calls import FORMATS, ToolCallParser
from unit.server.parsers.cuts import CUTS, Found, check_spans, message_of, pieces_of
from unit.server.parsers.test_json_scanner import VALUES

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", "<|py", "</", ";", "{", "}"),
    *('{"name": ', '"name": ', '"f"', '"g"', ", ", '"arguments": ', '"parameters": ', "{}"),
    *(
        '{"a": 1}',
        '{"a": "<tool_call>"}',
        '"type": "function", ',
        '{"x": ',
        "\n",
        " ",
        "\n" * 300,
        "hello",
    ),
    *('{"name": "f", "arguments": {"a": [1, "}"]}}', '{"name": "g", "parameters": {}}'),
    *('{"arguments": {"a": 1}, "name": "f"}', '{"name": "f", "arguments": {"a": oops'),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)
MARKUP = re.compile(
    r'(\s|</?tool_call>|<\|python_tag\|>|[{}:;,"]|name|arguments|parameters|type|function)*'
)


def parse(text: str, form: str, cuts: list[int] | None = None) -> Found:
    parser = AnswerParser(tools=ToolCallParser(FORMATS[form]))
    return message_of(parser, pieces_of(text, cuts or []))


@given(text=TEXTS | st.text(), cuts=CUTS, form=st.sampled_from(sorted(FORMATS)))
@example(text='<tool_call>{"name": "f", "arguments": {"a": 1}}</tool', cuts=[], form="hermes")
def test_a_stream_says_what_the_whole_says_and_nothing_is_lost(text, cuts, form) -> None:
    spans = check_spans(lambda: ToolCallParser(FORMATS[form]), text, cuts)
    assert parse(text, form, cuts) == parse(text, form)
    for span in spans:  # what is left out says nothing by itself
        assert span.kind != "markup" or MARKUP.fullmatch(span.text)
    if not any(span.kind == "name" for span in spans):
        assert all(span.kind == "content" for span in spans)


NAMES = st.text(alphabet="abcXYZ_-019.", min_size=1, max_size=12)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(st.text(), VALUES, max_size=3), st.booleans()),
    min_size=1,
    max_size=3,
)


def write(name: str, arguments: str, *, member: str, name_first: bool) -> str:
    parts = [f'"name": {json.dumps(name)}', f'"{member}": {arguments}']
    return "{" + ", ".join(parts if name_first else parts[::-1]) + "}"


@given(
    calls=CALLS,
    before=st.sampled_from(["", "Let me see.\n", "\n\n"]),
    cuts=CUTS,
    is_ascii=st.booleans(),
    form=st.sampled_from(sorted(FORMATS)),
)
def test_calls_come_back_as_they_were_written(calls, before, cuts, is_ascii, form) -> None:
    member = "arguments" if form == "hermes" else "parameters"
    expected, texts = [], []
    for name, values, name_first in calls:
        arguments = json.dumps(values, ensure_ascii=is_ascii)
        expected.append((name, arguments))
        texts.append(write(name, arguments, member=member, name_first=name_first))
    if form == "hermes":
        text = "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in texts)
    else:
        text = "<|python_tag|>" + "; ".join(texts)
    found = parse(before + text, form, cuts)
    assert found == Found(content=before if before.strip() else "", calls=expected)
    for (_, arguments), (_, values, _) in zip(found.calls, calls, strict=True):
        assert json.loads(arguments) == values


HERMES = {
    # of vLLM's cases: no call, one, several, text before, a call without its closing tag
    "How can I help you?": Found("How can I help you?"),
    '<tool_call>\n{"name": "final_answer", "arguments": {"trigger": true}}\n</tool_call>': Found(
        calls=[("final_answer", '{"trigger": true}')]
    ),
    '<tool_call>\n{"name": "weather", "arguments": {"city": "SF", "unit": "celsius"}}': Found(
        calls=[("weather", '{"city": "SF", "unit": "celsius"}')]
    ),
    'Let me look.\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n'
    '{"name": "b", "arguments": {"x": [1]}}\n</tool_call>': Found(
        "Let me look.\n", calls=[("a", "{}"), ("b", '{"x": [1]}')]
    ),
    # text after a call stays; vLLM leaves it out
    '<tool_call>{"name": "a", "arguments": {}}</tool_call>\nDone.': Found(
        "\nDone.", calls=[("a", "{}")]
    ),
    # a call's own text in its arguments
    '<tool_call>{"name": "a", "arguments": {"t": "</tool_call> }"}}</tool_call>': Found(
        calls=[("a", '{"t": "</tool_call> }"}')]
    ),
    # no calls: all of it is content
    "<tool_call>look it up</tool_call>": Found("<tool_call>look it up</tool_call>"),
    '<tool_call>{"name": "a"}</tool_call>': Found('<tool_call>{"name": "a"}</tool_call>'),
    '<tool_call>{"name": "a", "arguments": "x"}</tool_call>': Found(
        '<tool_call>{"name": "a", "arguments": "x"}</tool_call>'
    ),
    "<tool_call>{'name': 'a', 'arguments': {}}</tool_call>": Found(
        "<tool_call>{'name': 'a', 'arguments': {}}</tool_call>"
    ),
    '<tool_call>{"name": "", "arguments": {}}</tool_call>': Found(
        '<tool_call>{"name": "", "arguments": {}}</tool_call>'
    ),
    '<tool_call>{"name": "a", "arguments": {}, "name": "b"}': Found(
        ', "name": "b"}', calls=[("a", "{}")]
    ),
    # one that is no call does not hide the next
    '<tool_call>oops <tool_call>{"name": "a", "arguments": {}}</tool_call>': Found(
        "<tool_call>oops ", calls=[("a", "{}")]
    ),
    '<tool_call>\n<tool_call>{"name": "a", "arguments": {}}</tool_call>': Found(
        "<tool_call>\n", calls=[("a", "{}")]
    ),
    # white space before a call is left out, as long as it can be held back
    "\n" * 256 + '<tool_call>{"name": "a", "arguments": {}}': Found(calls=[("a", "{}")]),
    "\n" * 257 + '<tool_call>{"name": "a", "arguments": {}}': Found(
        "\n" * 257, calls=[("a", "{}")]
    ),
    # broken off or broken in mid arguments
    '<tool_call>{"name": "a", "arguments": {"x": "un': Found(calls=[("a", '{"x": "un')]),
    '<tool_call>{"name": "a", "arguments": {"x": oops}}</tool_call>': Found(
        "oops}}</tool_call>", calls=[("a", '{"x": ')]
    ),
}
LLAMA = {
    "Hello {world}, {}": Found("Hello {world}, {}"),
    '{"name": "searchTool", "parameters": {"query": "test1"}}': Found(
        calls=[("searchTool", '{"query": "test1"}')]
    ),
    '{"name": "searchTool", "arguments": {"query": "test1"}}': Found(
        calls=[("searchTool", '{"query": "test1"}')]
    ),
    '{"name": "a", "parameters": {"x": 1}} ; {"name": "b", "parameters": {}}; '
    '{"name": "c", "parameters": {"y": {"z": {}}}}': Found(
        calls=[("a", '{"x": 1}'), ("b", "{}"), ("c", '{"y": {"z": {}}}')]
    ),
    '<|python_tag|>{"type": "function", "name": "a", "parameters": {"q": "x; y"}}': Found(
        calls=[("a", '{"q": "x; y"}')]
    ),
    'Here it is: {"name": "a", "parameters": {}} More?': Found(
        "Here it is:  More?", calls=[("a", "{}")]
    ),
    '<|python_tag|>brave_search.call(query="x")': Found(
        '<|python_tag|>brave_search.call(query="x")'
    ),
    '{"name": "a", "age": 3, "parameters": {}}': Found('{"name": "a", "age": 3, "parameters": {}}'),
    '{"answer": {"name": "a", "parameters": {}}}': Found('{"answer": }', calls=[("a", "{}")]),
    '{"name": "a", "parameters": {}};': Found(";", calls=[("a", "{}")]),
}


@pytest.mark.parametrize("text", HERMES)
@pytest.mark.parametrize("cuts", [[], list(range(200))])
def test_hermes(text, cuts) -> None:
    assert parse(text, "hermes", cuts) == HERMES[text]


@pytest.mark.parametrize("text", LLAMA)
@pytest.mark.parametrize("cuts", [[], list(range(200))])
def test_llama3_json(text, cuts) -> None:
    assert parse(text, "llama3_json", cuts) == LLAMA[text]


def test_arguments_leave_as_they_come() -> None:
    parser = AnswerParser(tools=ToolCallParser(FORMATS["hermes"]))
    sent = []
    for piece in [
        "<tool_",
        'call>{"name": "a", "argu',
        'ments": {"x',
        '": "lo',
        "ng",
        '"}}</tool_call>',
    ]:
        delta = parser.push(piece, is_last=piece.endswith("</tool_call>"))
        assert not delta.content
        sent.append([(call.index, call.name, call.arguments) for call in delta.calls])
    assert sent == [
        [],
        [],
        [(0, "a", '{"x')],
        [(0, "", '": "lo')],
        [(0, "", "ng")],
        [(0, "", '"}')],
    ]


def test_only_the_first_calls_are_told() -> None:
    one = '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>'
    parser = AnswerParser(tools=ToolCallParser(FORMATS["hermes"]), most_calls=1)
    assert message_of(parser, pieces_of(one * 3, list(range(200)))).calls == [("a", '{"x": 1}')]
