"""What `gyre serve` refuses before it starts, and how a run's own template becomes a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gyre.core.errors import ConfigError, InputError
from gyre.launch.serving.server import bind, refuse_open_bind, render_messages
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


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_what_others_reach_is_refused_without_insecure(host) -> None:
    with pytest.raises(ConfigError, match="no key is asked for"):
        refuse_open_bind(host, insecure=False, has_keys=False)
    refuse_open_bind(host, insecure=True, has_keys=False)
    refuse_open_bind(host, insecure=False, has_keys=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_is_not(host) -> None:
    refuse_open_bind(host, insecure=False, has_keys=False)


def test_a_taken_port_is_said() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)
