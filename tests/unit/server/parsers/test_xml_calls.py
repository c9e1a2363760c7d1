"""Qwen3-Coder's calls: however the text comes, the calls in it are the same, with the values that the
tools' schemas ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gyre.server.parsers.answer import AnswerParser
from gyre.server.parsers.xml_calls import XmlCallParser
from gyre.server.parsers.xml_values import as_json, find_type
from gyre.text.messages import Tool
from unit.server.parsers.cuts import CUTS, Found, message_of, pieces_of

TYPES: dict[str, Any] = {
    "city": {"type": "string"},
    "state": {"type": "string"},
    "unit": {"type": "string", "enum": ["fahrenheit", "celsius"]},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "exact": {"type": "boolean"},
    "where": {"type": "object"},
    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "count": {"type": ["integer", "null"]},
}
TOOLS = [
    Tool(name="weather", parameters={"type": "object", "properties": TYPES}),
    Tool(name="stop"),
]


def parse(text: str, cuts: list[int] | None = None, **more: Any) -> Found:
    parser = AnswerParser(tools=XmlCallParser(TOOLS), **more)
    return message_of(parser, pieces_of(text, cuts or []))


def read(found: Found) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in found.calls]


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=weather>",
        "<function=other>",
        "<function=",
        "weather",
    ),
    *("<parameter=city>", "<parameter=days>", "<parameter=note>", "<parameter=x", "</parameter>"),
    *("</function>", "</", "<", ">", "\n", " ", "\n" * 300, "Paris", "7", "null", '"', "\\", "ü"),
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@given(text=TEXTS | st.text(), cuts=CUTS)
@example(text="<function=weather><parameter=city>\n\n</parameter>", cuts=[])
def test_a_stream_says_what_the_whole_says(text, cuts) -> None:
    whole = parse(text)
    assert parse(text, cuts) == whole == parse(text, list(range(200)))
    if "<function=" not in text:
        assert whole == Found(content=text)


@pytest.mark.parametrize(
    "text", ["<tool_call>", "<tool_call>\n<func", "<function=a b>", "<tool_call>x"]
)
def test_what_is_no_call_is_content(text) -> None:
    assert parse(text, list(range(200))) == Found(content=text)


TEXT_VALUES = st.text().filter(lambda text: not any(mark in text for mark in ("<", "\x00")))
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "city": TEXT_VALUES,
        "days": st.integers(),
        "share": st.floats(allow_nan=False, allow_infinity=False),
        "exact": st.booleans(),
        "where": st.dictionaries(TEXT_VALUES, st.integers(), max_size=3),
        "tags": st.lists(TEXT_VALUES, max_size=3) | st.none(),
        "note": TEXT_VALUES.filter(lambda text: text.lower() not in ("null", "none")) | st.none(),
        "count": st.integers() | st.none(),
        "unknown": TEXT_VALUES,
    },
)


def write(name: str, values: dict[str, Any]) -> str:
    """As Qwen3-Coder's chat template writes a call."""
    text = f"<tool_call>\n<function={name}>\n"
    for key, value in values.items():
        said = value if isinstance(value, str) else json.dumps(value)
        text += f"<parameter={key}>\n{said}\n</parameter>\n"
    return text + "</function>\n</tool_call>"


@given(
    calls=st.lists(VALUES, min_size=1, max_size=3), before=st.sampled_from(["", "So.\n"]), cuts=CUTS
)
def test_calls_come_back_as_they_were_written(calls, before, cuts) -> None:
    text = before + "\n".join(write("weather", values) for values in calls)
    found = parse(text, cuts)
    assert found.content == before and read(found) == [("weather", values) for values in calls]


DALLAS = {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}
INNER = write("other", {"x": "1"})
# the cases of vLLM's own tests of its parser, and what it answers there
PEERS: dict[str, tuple[str, list[Any]]] = {
    "no call at all": ("no call at all", []),
    write("weather", DALLAS): ("", [("weather", DALLAS)]),
    "Let me see." + write("weather", DALLAS): ("Let me see.", [("weather", DALLAS)]),
    write("weather", {"where": {"width": 10}}).replace("10", "10, \n "
    '"height": 20'): ("", [("weather", {"where": {"width": 10, "height": 20}})]),
    write("weather", DALLAS) + "\n" + write("weather", {"city": "Orlando"}): (
        "",
        [("weather", DALLAS), ("weather", {"city": "Orlando"})],
    ),
    # no tags around the function, or only the closing one
    write("weather", DALLAS)[12:-13]: ("", [("weather", DALLAS)]),
    "I look.\n\n" + write("weather", DALLAS)[12:]: ("I look.\n\n", [("weather", DALLAS)]),
    # a parameter without its closing tag
    write("weather", DALLAS).replace("Dallas\n</parameter>", "Dallas"): ("", [("weather", DALLAS)]),
    write("weather", DALLAS).replace("fahrenheit\n</parameter>", "fahrenheit"): (
        "",
        [("weather", DALLAS)],
    ),
    # values on the tag's own line
    "<tool_call>\n<function=weather>\n<parameter=city>Dallas</parameter>\n"
    "<parameter=where>{\"key\": 1}</parameter>\n</function>\n</tool_call>": (
        "",
        [("weather", {"city": "Dallas", "where": {"key": 1}})],
    ),
    # a name that breaks off does not hide the next call
    "<tool_call>\n<function=bad\n</function>\n</tool_call>\n" + write("weather", {"city": "Dallas"}): (
        "<tool_call>\n<function=bad\n</function>\n</tool_call>\n",
        [("weather", {"city": "Dallas"})],
    ),
    # tags in prose, and in a value: what does not end it is part of it
    "A bare <tool_call> in text." + write("stop", {}): ("A bare <tool_call> in text.", [("stop", {})]),
    "<function={{ name }}> in a template": ("<function={{ name }}> in a template", []),
    write("weather", {"city": "print('</parameter>') # </function>"}): (
        "",
        [("weather", {"city": "print('</parameter>') # </function>"})],
    ),
    write("weather", {"city": "a\n<parameter=unknown>\nb"}): (
        "",
        [("weather", {"city": "a\n<parameter=unknown>\nb"})],
    ),
    # after the call
    write("stop", {}) + "\nDone.": ("\nDone.", [("stop", {})]),
    # the model ended before the function did
    write("weather", DALLAS).partition("</function>")[0]: ("", [("weather", DALLAS)]),
}  # fmt: skip


@pytest.mark.parametrize("text", PEERS)
@pytest.mark.parametrize("cuts", [[], list(range(200))])
def test_the_cases_of_vllm(text, cuts) -> None:
    found = parse(text, cuts)
    assert (found.content, read(found)) == PEERS[text]


def test_a_text_leaves_as_it_comes_and_a_number_whole() -> None:
    parser = AnswerParser(tools=XmlCallParser(TOOLS))
    sent = []
    pieces = [
        "<tool_call>\n<func",
        "tion=weather>\n<para",
        "meter=city>\nPa",
        'r"is',
        "\n</para",
        "meter>",
    ]
    pieces += ["\n<parameter=days>\n1", "2\n</parameter>\n</fun", "ction>\n</tool_call>"]
    for piece in pieces:
        delta = parser.push(piece, is_last=piece.endswith("</tool_call>"))
        assert not delta.content
        sent.append("".join(call.arguments for call in delta.calls))
    assert sent == ["", "{", '"city": "Pa', 'r\\"is', "", "", '", "days": ', "", "12}"]


def test_an_answer_that_was_cut_off_has_what_came() -> None:
    found = parse(write("weather", DALLAS).partition("las")[0])
    assert found == Found(calls=[("weather", '{"city": "Dal')])
    assert parse("<tool_call>\n<function=weather>\n<parameter=days>\n1").calls == [
        ("weather", '{"days": ')
    ]


@pytest.mark.parametrize(
    ("begun", "arguments"),
    [
        ("<function=stop>", "{}"),
        ("<function=weather>\n<parameter=city>\nParis\n</parameter>", '{"city": "Paris'),
    ],
)
def test_white_space_without_end_is_not_held_back(begun, arguments) -> None:
    """Before a parameter it ends the call; behind a closing tag it says that this one is text."""
    parser = AnswerParser(tools=XmlCallParser(TOOLS))
    deltas = [parser.push(f"<tool_call>\n{begun}", is_last=False)]
    deltas += [parser.push("\n" * 100, is_last=False) for _ in range(5)]
    told = "".join(call.arguments for delta in deltas for call in delta.calls)
    assert told.startswith(arguments) and (told == "{}" or told.endswith("\\n" * 100))


def test_only_the_first_calls_are_told() -> None:
    found = parse(write("stop", {}) * 3, list(range(200)), most_calls=1)
    assert found == Found(calls=[("stop", "{}")])


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "integer"}, "42", 42),
        ({"type": "integer"}, "4.5", "4.5"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),  # Python reads no more digits than 4300
        ({"type": "uint8"}, "7", 7),
        ({"type": "float"}, "3.14", 3.14),
        ({"type": "number"}, "3.0", 3),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "nan", "nan"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "maybe", "maybe"),
        ({"type": "boolean"}, "none", None),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, "42", "42"),
        ({"enum": ["a"]}, "1", "1"),
        ({}, "1", "1"),
        (None, "[1]", "[1]"),
        ({"type": ["integer", "null"]}, "42", 42),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": 5}, "1", "1"),
        ({"oneOf": True, "type": None}, "1", "1"),
        ({"oneOf": [{"type": "null"}, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "object"}, {"type": "null"}]}, "null", None),
        ({"type": "object"}, "{'a': (1, None)}", {"a": [1, None]}),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        ({"type": "object"}, "open('x')", "open('x')"),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"type": "array"}, "[NaN]", "[NaN]"),
    ],
)
def test_a_value_has_the_type_that_its_schema_asks_for(schema, text, expected) -> None:
    found = json.loads(as_json(text, find_type(schema)))
    assert found == expected and type(found) is type(expected)
