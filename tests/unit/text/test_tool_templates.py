"""Tools and calls in chat templates: the text is that of transformers, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from gyre.core.errors import InputError
from gyre.text.chat_template import ChatTemplate
from gyre.text.messages import Message, Tool, ToolCall, as_schemas, as_turns, count_chars
from gyre.text.render import render_prompt
from gyre.text.tokenizer import load_tokenizer, train_tokenizer
from tool_templates import HERMES_TOOLS, TEMPLATES
from unit.text.test_chat_template import folder_with
from unit.text.test_hub import LLAMA_CHAT, QWEN_CHAT

# what a person writes who follows the documentation of transformers
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": 'a "city" <é>'},
        "days": {"type": "array", "items": {"type": "integer"}},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
}
THEIR_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tell it's sunny", "parameters": CITY},
    },
    {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    },
]
ARGUMENTS = {"city": "Zürich", "days": [1, 2], "deep": {"b": None, "a": [True, 1.5]}}
THEIRS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        ],
    },
    {"role": "tool", "name": "weather", "content": '{"sun": true}'},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "Thanks"},
]
OUR_TOOLS = [
    Tool(name="weather", description="Tell it's sunny", parameters=CITY),
    Tool(name="now"),
]
OURS = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="Which weather?"),
    Message(
        role="assistant", tool_calls=(ToolCall(id="call_1", name="weather", arguments=ARGUMENTS),)
    ),
    Message(role="tool", name="weather", tool_call_id="call_1", content='{"sun": true}'),
    Message(role="assistant", content="Sunny."),
    Message(role="user", content="Thanks"),
]


def folder_of(folder: Path, template: str) -> Path:
    return folder_with(folder, template, "<|endoftext|>", "<|im_end|>", "<|im_start|>")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", [2, 4, 6])
def test_the_text_is_that_of_transformers(name, turns, tmp_path) -> None:
    folder = folder_of(tmp_path, TEMPLATES[name])
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        THEIRS[:turns], tools=THEIR_TOOLS, add_generation_prompt=True, tokenize=False
    )
    tokens, text = render_prompt(ours, OURS[:turns], tools=OUR_TOOLS)
    assert text == expected and "weather" in text and "now" in text
    assert tokens.tolist() == theirs(expected, add_special_tokens=False)["input_ids"]


def test_several_calls_and_reasoning_are_those_of_transformers(tmp_path) -> None:
    folder = folder_of(tmp_path, TEMPLATES["qwen"])
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    answers = [{"role": "tool", "content": text} for text in ("9:00", "10:00")]
    theirs = [
        THEIRS[1],
        {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": [call] * 2},
        *answers,
    ]
    ours = [
        OURS[1],
        Message(
            role="assistant",
            reasoning_content="so",
            tool_calls=tuple(ToolCall(id=name, name="now", arguments={}) for name in "ab"),
        ),
        *(Message(role="tool", content=one["content"], tool_call_id="a") for one in answers),
    ]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        theirs, tools=THEIR_TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert render_prompt(load_tokenizer(folder), ours, tools=OUR_TOOLS)[1] == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_shows_tools_is_known(name, tmp_path) -> None:
    assert load_tokenizer(folder_of(tmp_path, TEMPLATES[name])).takes_tools


@pytest.mark.parametrize(
    "template",
    [
        QWEN_CHAT,
        LLAMA_CHAT,
        "{# tools #}{% set tools = [1] %}{{ tools }} tools",
        "{% for m in messages %}{{ m.tools }}<|im_end|>{% endfor %}",
    ],
)
def test_one_that_shows_none_is_known_too(template, tmp_path) -> None:
    ours = load_tokenizer(folder_of(tmp_path, template))
    assert not ours.takes_tools
    with pytest.raises(InputError, match="shows no tools"):
        render_prompt(ours, "1", tools=OUR_TOOLS)


def test_a_template_of_its_own_for_tools_is_taken_where_there_are_any(tmp_path) -> None:
    folder = folder_of(tmp_path, QWEN_CHAT)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    several = [
        {"name": "default", "template": QWEN_CHAT},
        {"name": "tool_use", "template": HERMES_TOOLS.replace("tools or []", "tools")},
    ]
    settings["chat_template"] = several
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.takes_tools and "<tool_call>" in ours.tool_template_source
    for tools, their_tools in (((), None), (OUR_TOOLS, THEIR_TOOLS)):
        expected = theirs.apply_chat_template(
            THEIRS[:4], tools=their_tools, add_generation_prompt=True, tokenize=False
        )
        assert render_prompt(ours, OURS[:4], tools=tools)[1] == expected


def test_our_own_tokenizer_shows_none() -> None:
    ours = train_tokenizer(["one and one"], vocab_size=300, min_share=0.0)
    assert not ours.takes_tools
    with pytest.raises(InputError, match="shows no tools"):
        render_prompt(ours, OURS[1:2], tools=OUR_TOOLS)


def test_a_template_may_write_what_it_was_given_and_no_more() -> None:
    # 4 times the tools and a MiB: twelve copies of them are refused
    big = Tool(name="f", description="x" * (1 << 20))
    for copies, is_refused in ((4, False), (12, True)):
        template = ChatTemplate(f"{{{{ (tools | string) * {copies} }}}}", {}, where="f")
        if is_refused:
            with pytest.raises(InputError, match="writes more than"):
                template.render([[Message(role="user")]], {}, tools=[big])
        else:
            assert len(template.render([[Message(role="user")]], {}, tools=[big])[0]) > 4 << 20


def test_characters_of_nested_values_are_counted() -> None:
    turns = as_turns(OURS[2:3])
    assert count_chars(turns) > sum(map(len, ("weather", "Zürich", "call_1", "arguments")))
    assert count_chars({"ab": ["c", {"d": "e"}, 10]}) == 7
    assert as_schemas([]) is None
    assert as_schemas(OUR_TOOLS) == THEIR_TOOLS
