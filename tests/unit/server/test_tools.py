"""Tools and reasoning through the API: the openai client asks, and an engine recites what a model
would write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from fakes.config import FakeEngineConfig
from fakes.engine import ScriptedEngine
from gyre.core.records import Request
from gyre.server.app import make_app
from gyre.server.generation import ServedModel
from gyre.server.parsers.choose import choose_format
from gyre.text.render import render_prompt
from gyre.text.tokenizer import Tokenizer, load_tokenizer
from tool_templates import CODER_TOOLS, LLAMA_TOOLS, QWEN_TOOLS
from unit.text.test_chat_template import folder_with
from unit.text.test_hub import QWEN_CHAT

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
OPENING = QWEN_TOOLS.rstrip().replace(
    "assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}"
)
ASKED: list[Any] = [{"role": "user", "content": "Which weather?"}]


class Weather(BaseModel):
    city: str
    unit: Literal["C", "F"]
    days: list[int] = []


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather",
            "parameters": Weather.model_json_schema(),
        },
    }
]
ARGUMENTS = '{"city": "Zürich 日本", "unit": "C", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    """One for each kind of template; with "special" the markers are special tokens of it."""
    texts = {
        "qwen": QWEN_TOOLS,
        "coder": CODER_TOOLS,
        "llama": LLAMA_TOOLS,
        "opening": OPENING,
        "plain": QWEN_CHAT,
    }
    found = {}
    for name, template in texts.items():
        folder: Path = tmp_path_factory.mktemp(name)
        found[name] = load_tokenizer(
            folder_with(folder, template, "<|endoftext|>", "<|im_end|>", "<|im_start|>")
        )
    folder = tmp_path_factory.mktemp("special")
    found["special"] = load_tokenizer(
        folder_with(folder, QWEN_TOOLS, "<|endoftext|>", "<|im_end|>", "<|im_start|>", *MARKERS)
    )
    return found


class Server:
    """The API over one tokenizer; each completion recites one of `replies`."""

    def __init__(
        self, tokenizer: Tokenizer, *replies: str, tools: str = "auto", reasoning: str = "auto"
    ) -> None:
        self.prompts: list[str] = []
        scripts = [[*tokenizer.encode(text).tolist(), tokenizer.end_id] for text in replies]

        def script(request: Request, index: int, version: int) -> Sequence[int]:
            self.prompts.append(tokenizer.decode(request.tokens))
            return scripts[index % len(scripts)]

        def render(messages: Any, tools: Any) -> Any:
            return render_prompt(tokenizer, messages, tools=tools)[0]

        self.engine = ScriptedEngine(
            script,
            emit=lambda kind, **fields: None,
            config=FakeEngineConfig(context_tokens=4096),
            eos_ids=tokenizer.eos_ids,
            decode=lambda ids: tokenizer.decode(ids),
        )
        model = ServedModel(
            name="m",
            tokenizer=tokenizer,
            context_tokens=4096,
            render=render,
            find_refusal=lambda request: None,
            answer_format=choose_format(
                tokenizer.tool_template_source,
                takes_tools=tokenizer.takes_tools,
                tool_parser=tools,
                reasoning_parser=reasoning,
                special_ids=tokenizer.special_ids,
            ),
        )
        self.app = make_app(self.engine, model, emit=lambda kind, **fields: None)

    def run(self, work: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
        async def go() -> Any:
            await self.engine.start(dummy=False)
            transport = httpx.ASGITransport(app=self.app)
            async with (
                httpx.AsyncClient(transport=transport) as http,
                openai.AsyncOpenAI(
                    base_url="http://m/v1", api_key="none", max_retries=0, http_client=http
                ) as client,
            ):
                return await work(client)

        return asyncio.run(asyncio.wait_for(go(), 60))

    def ask(self, **fields: Any) -> Any:
        """The whole answer, after checking that a stream says the same."""
        body = {"model": "m", "messages": ASKED, "tools": TOOLS} | fields

        async def work(client: openai.AsyncOpenAI) -> Any:
            whole = await client.chat.completions.create(**body)
            stream = await client.chat.completions.create(**body, stream=True)
            return whole, [event async for event in stream]

        whole, events = self.run(work)
        for choice in whole.choices:
            told = joined(events, choice.index)
            assert told["finish"] == choice.finish_reason
            assert told["content"] == (choice.message.content or "")
            assert told["reasoning"] == getattr(choice.message, "reasoning_content", "")
            calls = [
                (c.function.name, c.function.arguments) for c in choice.message.tool_calls or []
            ]
            assert told["calls"] == calls
            if choice.logprobs:
                assert told["tokens"] == [one.token for one in choice.logprobs.content]
        return whole


def joined(events: list[Any], index: int) -> dict[str, Any]:
    """What a client makes of a stream."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "finish": None, "tokens": []}
    calls: list[list[str]] = []
    ids: list[str] = []
    for event in events:
        for choice in event.choices:
            if choice.index != index:
                continue
            assert found["finish"] is None, "nothing comes after the end"
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning_content", "")
            for call in choice.delta.tool_calls or []:
                if call.index == len(calls):
                    calls.append([call.function.name, ""])
                    ids.append(call.id)
                    assert call.type == "function"
                else:
                    assert call.index == len(calls) - 1
                    assert call.id is None and call.function.name is None
                calls[-1][1] += call.function.arguments
            if choice.logprobs:
                found["tokens"] += [one.token for one in choice.logprobs.content]
            found["finish"] = choice.finish_reason
    assert len(set(ids)) == len(ids)
    return found | {"calls": [tuple(call) for call in calls]}


@pytest.mark.parametrize("kind", ["qwen", "special"])
def test_a_call_fits_its_schema(kind, tokenizers) -> None:
    server = Server(tokenizers[kind], f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}")
    (choice,) = server.ask(logprobs=True).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "\n\nI look.\n"
    assert choice.message.reasoning_content == "\nhm\n"
    assert len({call.id for call in choice.message.tool_calls}) == 2
    for call in choice.message.tool_calls:
        assert call.function.arguments == ARGUMENTS
        weather = Weather.model_validate_json(call.function.arguments, strict=True)
        assert weather == Weather(city="Zürich 日本", unit="C", days=[1, 2])
    assert len(choice.logprobs.content) == server.ask().usage.completion_tokens


def test_a_call_as_xml_has_the_types_of_its_schema(tokenizers) -> None:
    """And what a client sends back is shown to the model as it had written it."""
    call = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nZürich 日本\n</parameter>\n"
        "<parameter=unit>\nC\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
    )
    server = Server(tokenizers["coder"], f"I look.\n{call}")
    (choice,) = server.ask(logprobs=True).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.\n")
    (found,) = choice.message.tool_calls
    assert found.function.arguments == ARGUMENTS
    turn = choice.message.model_dump(exclude_none=True)
    answered = {"role": "tool", "tool_call_id": found.id, "content": "rain"}
    server.ask(messages=[*ASKED, turn, answered])
    assert call in server.prompts[-1]


def test_a_call_without_words_has_no_content(tokenizers) -> None:
    (choice,) = Server(tokenizers["qwen"], CALL).ask().choices
    assert choice.message.content is None and choice.finish_reason == "tool_calls"


def test_llama_calls(tokenizers) -> None:
    text = f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}'
    for reply in (text, text.removeprefix("<|python_tag|>")):
        (choice,) = Server(tokenizers["llama"], reply).ask().choices
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)


def test_completions_of_one_request_are_parsed_apart(tokenizers) -> None:
    server = Server(tokenizers["qwen"], CALL, "<think>no</think>It rains.", "<tool_call>{oops")
    choices = server.ask(n=3).choices
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "stop"]
    assert [choice.message.content for choice in choices] == [None, "It rains.", "<tool_call>{oops"]
    assert not choices[1].message.tool_calls and choices[1].message.reasoning_content == "no"
    assert not choices[2].message.tool_calls


def test_arguments_that_are_cut_off_end_with_length(tokenizers) -> None:
    (choice,) = Server(tokenizers["qwen"], CALL).ask(max_tokens=60).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "length" and ARGUMENTS.startswith(call.function.arguments)
    assert 0 < len(call.function.arguments) < len(ARGUMENTS)


def test_a_stop_string_ends_the_answer_before_it(tokenizers) -> None:
    (choice,) = Server(tokenizers["qwen"], f"I look.\n{CALL}").ask(stop=["ook", "Zür"]).choices
    assert (choice.message.content, choice.finish_reason) == ("I l", "stop")
    (choice,) = Server(tokenizers["qwen"], CALL).ask(stop="</tool_call>").choices
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS
    assert choice.finish_reason == "tool_calls"


def test_a_prompt_may_open_the_reasoning(tokenizers) -> None:
    server = Server(tokenizers["opening"], f"hm</think>{CALL}")
    (choice,) = server.ask().choices
    assert server.prompts[0].endswith("<think>\n")
    assert choice.message.reasoning_content == "hm" and len(choice.message.tool_calls) == 1
    (choice,) = Server(tokenizers["opening"], "hm").ask(tools=openai.NOT_GIVEN).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", None)


def test_parsers_can_be_turned_off(tokenizers) -> None:
    text = f"<think>hm</think>{CALL}"
    (choice,) = Server(tokenizers["qwen"], text, tools="none", reasoning="none").ask().choices
    assert choice.message.content == text and choice.finish_reason == "stop"


def test_with_choice_none_the_model_is_shown_no_tools(tokenizers) -> None:
    server = Server(tokenizers["qwen"], CALL)
    (choice,) = server.ask(tool_choice="none").choices
    assert choice.message.content == CALL and not choice.message.tool_calls
    assert "<tools>" not in server.prompts[0]
    server.ask(tool_choice="auto")
    assert '"name": "weather"' in server.prompts[-1]


def test_without_parallel_calls_the_first_is_kept(tokenizers) -> None:
    (choice,) = Server(tokenizers["qwen"], CALL * 2).ask(parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_conversation_goes_on_with_the_tools_answer(as_dict, tokenizers) -> None:
    server = Server(tokenizers["qwen"], f"<think>hm</think>{CALL}")
    message = server.ask().choices[0].message
    answer = {
        "role": "tool",
        "tool_call_id": message.tool_calls[0].id,
        "content": [{"type": "text", "text": "rain"}],
    }
    server.ask(messages=[*ASKED, message.model_dump() if as_dict else message, answer])
    turns = server.prompts[-1]
    assert f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>" in turns
    assert "<tool_response>\nrain\n</tool_response>" in turns


def turn(**fields: Any) -> dict[str, Any]:
    return {"messages": [*ASKED, {"role": "assistant"} | fields]}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return turn(tool_calls=[{"id": "c", "type": "function", "function": function}])


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


DEEP = json.loads('{"a": ' * 80 + "1" + "}" * 80)
ARGUMENTS_AT = "messages.1.tool_calls.0.function.arguments"
REFUSED = [
    ({"tool_choice": "required"}, "tool_choice", "grammar"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "grammar"),
    ({"tool_choice": "maybe"}, "tool_choice", "'auto' or 'none'"),
    ({"tool_choice": "auto", "tools": None}, "tool_choice", "need tools"),
    ({"tools": []}, "tools", "at least 1"),
    (tool(strict=True), "tools.0.function.strict", "grammar"),
    (tool(name="not a name"), "tools.0.function.name", "pattern"),
    (tool(parameters=DEEP), "tools.0.function.parameters", "deeper than 64"),
    ({"functions": []}, "functions", "as tools"),
    (call("{"), ARGUMENTS_AT, "no JSON"),
    (call("[1]"), ARGUMENTS_AT, "need a JSON object"),
    (call('{"a": NaN}'), ARGUMENTS_AT, "NaN"),
    (call('{"a":' * 100_000), ARGUMENTS_AT, "no JSON"),
    (call(json.dumps(DEEP)), ARGUMENTS_AT, "deeper than 64"),
    (call('{"a": ' + "9" * 5000 + "}"), ARGUMENTS_AT, "no JSON"),
    (turn(), "messages.1.content", "need a text"),
    (turn(role="tool", content="x"), "messages.1.tool_call_id", "need the id"),
    (
        turn(**call("{}")["messages"][1] | {"role": "user"}),
        "messages.1.tool_calls",
        "assistant",
    ),
]


@pytest.mark.parametrize(("changed", "param", "message"), REFUSED)
def test_what_cannot_be_done_is_refused_by_name(changed, param, message, tokenizers) -> None:
    error = refusal(Server(tokenizers["qwen"], "x"), changed)
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert message in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "tools"),
        ({"tools": None} | call("{}"), "messages"),
        (
            {"tools": None, "messages": [{"role": "tool", "content": "", "tool_call_id": "c"}]},
            "messages",
        ),
    ],
)
def test_a_model_whose_template_shows_no_tools_is_given_none(fields, param, tokenizers) -> None:
    error = refusal(Server(tokenizers["plain"], "x"), fields)
    assert error["param"] == param and "shows no tools" in error["message"]


def test_a_template_with_tools_of_an_unknown_form_needs_a_parser(tokenizers) -> None:
    server = Server(tokenizers["qwen"], "x")
    form = choose_format(
        "{{ tools }}", takes_tools=True, tool_parser="auto", reasoning_parser="auto", special_ids={}
    )
    assert form.calls is None and "--tool-parser" in form.tools_refusal
    assert refusal(server, {"tool_choice": "required"})["param"] == "tool_choice"


def refusal(server: Server, changed: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "m", "messages": ASKED, "tools": TOOLS} | changed

    async def work(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**body)
        return caught.value.body

    return server.run(work)
