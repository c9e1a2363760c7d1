"""Which parsers a chat template leads to, and what the command line may say instead."""

from __future__ import annotations

import pytest

from gyre.core.errors import ConfigError
from gyre.server.parsers.choose import CALL_FORMATS, AnswerFormat, choose_format
from gyre.text.tokenizer import PLAIN_TEMPLATE
from tool_templates import CODER_TOOLS, HERMES_TOOLS, LLAMA_TOOLS, QWEN_TOOLS
from unit.text.test_hub import LLAMA_CHAT, QWEN_CHAT

SPECIAL = {"<tool_call>": 7, "<think>": 8, "<|im_end|>": 9}


def choose(template: str, tools: str = "auto", reasoning: str = "auto") -> AnswerFormat:
    return choose_format(
        template,
        takes_tools="tools" in template,
        tool_parser=tools,
        reasoning_parser=reasoning,
        special_ids=SPECIAL,
    )


@pytest.mark.parametrize(
    ("template", "calls", "thinks"),
    [
        (QWEN_TOOLS, "hermes", True),
        (HERMES_TOOLS, "hermes", False),
        (CODER_TOOLS, "qwen3_coder", False),
        (LLAMA_TOOLS, "llama3_json", False),
        ("{{ tools }}<|python_tag|>", "llama3_json", False),
        (QWEN_CHAT, None, True),
        (LLAMA_CHAT, None, False),
        (PLAIN_TEMPLATE, None, False),
        ("{{ m.split('</think>') }}", None, True),
    ],
)
def test_the_template_decides(template, calls, thinks) -> None:
    form = choose(template)
    assert form.calls == (CALL_FORMATS[calls] if calls else None) and form.thinks == thinks
    assert bool(form.tools_refusal) == ("tools" not in template)


def test_the_command_line_decides_otherwise() -> None:
    form = choose(QWEN_TOOLS, "llama3_json", "none")
    assert form.calls == CALL_FORMATS["llama3_json"] and not form.thinks
    form = choose("{{ tools }}", "none", "think")  # calls are content
    assert form.calls is None and form.thinks and not form.tools_refusal
    assert "--tool-parser" in choose("{{ tools }}").tools_refusal
    assert "shows no tools" in choose(LLAMA_CHAT, "hermes").tools_refusal


@pytest.mark.parametrize("given", [("xml", "auto"), ("auto", "deepseek")])
def test_a_parser_that_is_not_there_is_refused_with_those_that_are(given) -> None:
    with pytest.raises(ConfigError, match="no such parser") as caught:
        choose(QWEN_TOOLS, *given)
    assert "none" in caught.value.hint


def test_special_tokens_are_kept_for_the_parsers_that_are_used() -> None:
    assert choose(QWEN_TOOLS).kept_ids(with_tools=True) == {7, 8}
    assert choose(QWEN_TOOLS).kept_ids(with_tools=False) == {8}
    assert choose(HERMES_TOOLS).kept_ids(with_tools=False) == frozenset()


@pytest.mark.parametrize(
    ("prompt_end", "reasoning"),
    [("<think>\n", "so"), ("<think>", "so"), ("<think>\n\n</think>\n\n", ""), ("a\n", "")],
)
def test_the_end_of_the_prompt_says_where_the_answer_begins(prompt_end, reasoning) -> None:
    parser = choose(QWEN_TOOLS).make_parser(prompt_end=prompt_end, with_tools=False)
    delta = parser.push("so", is_last=True)
    assert (delta.reasoning, delta.content) == (reasoning, "so".removeprefix(reasoning))
