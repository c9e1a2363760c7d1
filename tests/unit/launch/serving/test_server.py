"""What `gyre serve` refuses before it starts, and how a run's own template becomes a prompt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gyre.core.errors import InputError
from gyre.launch.serving.model import render_messages
from gyre.launch.serving.server import ServeArgs, say_ready
from gyre.runconfig import RunConfig, load_run_config
from gyre.text.messages import Message, Tool
from gyre.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["question: what is one? be brief"], vocab_size=300, min_share=0.0)
QUESTION = [Message(role="user", content="what is one?")]


def config(tmp_path: Path, **data: Any) -> RunConfig:
    path = tmp_path / "run.toml"
    rows = "\n".join(f"{name} = {json.dumps(value)}" for name, value in data.items())
    path.write_text(f'[model]\npath = "m"\n[objective]\nkind = "sft"\n[data]\n{rows}\n')
    return load_run_config(path, [])


def text_of(tmp_path: Path, messages: list[Message], **data: Any) -> str:
    return TOKENIZER.decode(render_messages(TOKENIZER, messages, (), config(tmp_path, **data)))


def test_a_run_is_asked_by_its_own_template_and_system_message(tmp_path) -> None:
    found = text_of(tmp_path, QUESTION, template="{system} question: {prompt}", system="be brief")
    assert found == "be brief question: what is one?"


def test_a_template_of_one_question_takes_no_conversation(tmp_path) -> None:
    for messages in (QUESTION * 2, [Message(role="system", content="be brief"), *QUESTION]):
        with pytest.raises(InputError, match="one question"):
            text_of(tmp_path, messages, template="question: {prompt}")


def test_a_conversation_brings_its_own_system_message_or_gets_that_of_the_run(tmp_path) -> None:
    own = [Message(role="system", content="a b"), *QUESTION]
    assert text_of(tmp_path, QUESTION, system="be brief") == "be brief\nwhat is one?\n"
    assert text_of(tmp_path, own, system="be brief") == "a b\nwhat is one?\n"


@pytest.mark.parametrize("template", ["chat", "question: {prompt}"])
def test_tools_that_no_template_shows_are_refused(template, tmp_path) -> None:
    with pytest.raises(InputError, match="shows no tools"):
        render_messages(TOKENIZER, QUESTION, [Tool(name="f")], config(tmp_path, template=template))


@pytest.mark.parametrize("as_json", [False, True])
def test_the_first_lines_name_the_api_and_the_page(tmp_path, capsys, as_json) -> None:
    args = ServeArgs(
        folder=tmp_path, config=config(tmp_path), name="m", host="127.0.0.1", port=0, replicas=1,
        tool_parser="auto", reasoning_parser="auto", insecure=False, keys=None, tls_cert=None,
        tls_key=None, receive_s=30, drain_s=30,
    )  # fmt: skip
    say_ready("http://127.0.0.1:8000", args, as_json=as_json)
    said = capsys.readouterr().out
    if as_json:
        assert json.loads(said) == {"url": "http://127.0.0.1:8000", "model": "m"}
    else:
        first, second, third = said.splitlines()
        assert first == "serving m on http://127.0.0.1:8000/v1"
        assert second == "  in a browser: http://127.0.0.1:8000"
        assert third.startswith("  curl http://127.0.0.1:8000/v1/chat/completions")


def test_the_server_imports_no_torch() -> None:
    """Tokenizer, templates, records, pool and sockets need none; it would cost seconds and memory."""
    program = (
        "import sys, gyre.cli.serve, gyre.launch.serving.server\n"
        "heavy = ('torch', 'transformers', 'safetensors', 'ray')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
