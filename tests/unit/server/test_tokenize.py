"""/tokenize: a text is the tokens that a completion would read, a conversation those of the model's
chat template, as transformers has them; what does not go together is refused by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from api_cases import Api, api
from gyre.engine.frontend.admission import RequestLimits
from gyre.launch.serving.model import served_model
from gyre.runconfig.run_config import load_run_config
from gyre.server.generation import ServedModel
from gyre.text.tokenizer import load_tokenizer
from tool_templates import QWEN_TOOLS
from unit.text.test_chat_template import folder_with
from unit.text.test_hub import hub_folder

CONTEXT = 4096
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 12 + 345? 日本"},
    {"role": "assistant", "content": "357"},
    {"role": "user", "content": "And what is the answer?"},
]
TOOL = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("hub")
    found = {kind: hub_folder(base / kind, kind) for kind in ("llama", "qwen")}
    specials = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
    return found | {"tools": folder_with(base / "tools", QWEN_TOOLS, *specials)}


def serve(folder: Path, tmp_path: Path, *, template: str = "chat") -> ServedModel:
    """The model as `gyre serve` makes it."""
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[objective]\nkind = "sft"\n')
    tokenizer = load_tokenizer(folder)
    limits = RequestLimits(
        vocab_size=tokenizer.vocab_size,
        context_tokens=CONTEXT,
        cache_tokens=CONTEXT,
        can_decode=True,
        eos_ids=tokenizer.eos_ids,
    )
    return served_model(
        tokenizer, load_run_config(path, [f"data.template={template}"]), "m", limits
    )


def ask(model: ServedModel, *bodies: dict[str, Any]) -> list[httpx.Response]:
    async def go() -> list[httpx.Response]:
        async with api(model=model) as on:
            return [await post(on, body) for body in bodies]

    async def post(on: Api, body: dict[str, Any]) -> httpx.Response:
        return await on.post("/tokenize", **body)

    return asyncio.run(asyncio.wait_for(go(), 60))


def tokens_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["count"] == len(told["tokens"]) and told["max_model_len"] == CONTEXT
    return told["tokens"]


@pytest.mark.parametrize("kind", ["llama", "qwen"])
@pytest.mark.parametrize("prompted", [None, True, False])
def test_messages_become_the_ids_of_the_chat_template(folders, tmp_path, kind, prompted) -> None:
    theirs = AutoTokenizer.from_pretrained(folders[kind]).apply_chat_template(
        TURNS, add_generation_prompt=prompted is not False, return_dict=True
    )["input_ids"]
    (answer,) = ask(
        serve(folders[kind], tmp_path), {"messages": TURNS, "add_generation_prompt": prompted}
    )
    assert tokens_of(answer) == theirs


def test_tools_are_shown_with_messages(folders, tmp_path) -> None:
    theirs = AutoTokenizer.from_pretrained(folders["tools"]).apply_chat_template(
        TURNS, tools=[TOOL], add_generation_prompt=False, return_dict=True
    )["input_ids"]
    body = {"messages": TURNS, "add_generation_prompt": False}
    shown, bare = ask(serve(folders["tools"], tmp_path), body | {"tools": [TOOL]}, body)
    assert tokens_of(shown) == theirs != tokens_of(bare)


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_a_beginning_token_is_put_before_a_prompt_and_on_request_before_messages(
    folders, tmp_path, kind
) -> None:
    """Of the vocabulary that has one. A prompt alone is what a completion of it reads."""
    model = serve(folders[kind], tmp_path)
    begin = list(model.tokenizer.prefix_ids)
    assert len(begin) == (kind == "llama")
    text = "What is 12 + 345?"
    bare = model.tokenizer.encode(text).tolist()
    for body, before in (
        ({"prompt": text}, begin),
        ({"prompt": text, "add_special_tokens": True}, begin),
        ({"prompt": text, "add_special_tokens": None}, begin),
        ({"prompt": text, "add_special_tokens": False}, []),
    ):
        (answer,) = ask(model, body)
        assert tokens_of(answer) == before + bare, body
    theirs = AutoTokenizer.from_pretrained(folders[kind])(text)["input_ids"]
    assert theirs == begin + bare
    plain, more = ask(model, {"messages": TURNS}, {"messages": TURNS, "add_special_tokens": True})
    assert tokens_of(more) == begin + tokens_of(plain)


def test_a_prompt_costs_a_completion_what_tokenize_counts(folders, tmp_path) -> None:
    """Of a vocabulary with a beginning token."""
    model = serve(folders["llama"], tmp_path)

    async def go() -> tuple[int, int]:
        async with api(lambda *_: [model.tokenizer.end_id], model=model) as on:
            told = await on.post("/tokenize", prompt="What is 12?")
            answer = await on.post("/v1/completions", model="m", prompt="What is 12?")
            return told.json()["count"], answer.json()["usage"]["prompt_tokens"]

    counted, read = asyncio.run(asyncio.wait_for(go(), 60))
    assert counted == read


@pytest.mark.parametrize("kind", ["llama", "tools"])
def test_a_conversation_beyond_the_context_is_counted_as_a_text_is(folders, tmp_path, kind) -> None:
    text = "1 2 " * (4 * CONTEXT)
    model = serve(folders[kind], tmp_path)
    conversation, plain = ask(
        model, {"messages": [{"role": "user", "content": text}]}, {"prompt": text}
    )
    assert len(tokens_of(conversation)) > len(tokens_of(plain)) > CONTEXT


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "prompt", "either a prompt or messages"),
        ({"prompt": "a", "messages": TURNS}, "prompt", "either a prompt or messages"),
        ({"prompt": "a", "tools": [TOOL]}, "tools", "need messages"),
        (
            {"prompt": "a", "add_generation_prompt": False},
            "add_generation_prompt",
            "need messages",
        ),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "poet", "content": "a"}]}, "messages.0.role", "not accepted"),
        ({"messages": TURNS, "tools": [TOOL]}, "tools", "shows no tools"),
        ({"messages": TURNS, "add_generation_prompt": "no"}, "add_generation_prompt", "boolean"),
        ({"prompt": "a", "return_token_strs": True}, "return_token_strs", "/detokenize"),
        (
            {"messages": TURNS, "continue_final_message": True},
            "continue_final_message",
            "not continued",
        ),
        ({"messages": TURNS, "chat_template": "{{ 1 }}"}, "chat_template", "its own template"),
        ({"messages": [{"role": "user", "content": "x" * (1 << 21)}]}, "messages", "131072 tokens"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(folders, tmp_path, body, param, said) -> None:
    (answer,) = ask(serve(folders["qwen"], tmp_path), body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert said in error["message"]


def test_what_a_client_of_vllm_spells_out_by_default_is_accepted(folders, tmp_path) -> None:
    spelled = {
        "model": "m",
        "add_generation_prompt": True,
        "return_token_strs": False,
        "continue_final_message": False,
        "chat_template": None,
        "chat_template_kwargs": None,
        "tools": None,
    }
    model = serve(folders["qwen"], tmp_path)
    for body in ({"prompt": "What?"}, {"messages": TURNS}):
        plain, same = ask(model, body, body | spelled)
        assert tokens_of(same) == tokens_of(plain)


def test_a_template_of_the_run_has_no_end_to_leave_out(folders, tmp_path) -> None:
    model = serve(folders["qwen"], tmp_path, template="Q: {prompt}\\nA:")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    whole, refused = ask(model, body, body | {"add_generation_prompt": False})
    assert model.tokenizer.decode(tokens_of(whole)).startswith("Q: hi")
    assert refused.status_code == 400
    assert "where the model's turn begins" in refused.json()["error"]["message"]
