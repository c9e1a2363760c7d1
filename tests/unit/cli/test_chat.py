"""A conversation with a small random model: what it takes for a turn, where an answer ends, Ctrl-C
and end of input."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_cases import make_decoder_of
from gyre.cli.chat import _typed
from gyre.core.errors import EngineRefused
from gyre.launch.chat import chat
from gyre.models.hub.export import export_hub
from gyre.runconfig.run_config import RunConfig, parse_run_config
from unit.data.test_examples import TOKENIZER

CONTEXT = 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    TOKENIZER.save(folder / "tokenizer")
    decoder = make_decoder_of(vocab_size=TOKENIZER.vocab_size, context_tokens=CONTEXT)
    export_hub(
        decoder, folder / "export", dtype=torch.float32, tokenizer_files=folder / "tokenizer"
    )
    return folder / "export"


def config_of(model: Path, **tables: Any) -> RunConfig:
    tree = {
        "model": {"path": str(model)},
        "objective": {"kind": "sft"},
        "run": {"device": "cpu", "dtype": "float32"},
    }
    return parse_run_config({**tree, "engine": {"page_tokens": 8}, **tables}, where="chat.toml")


def talk(
    model: Path,
    turns: Any,
    write: Any = None,
    *,
    interactive: bool = False,
    max_tokens: int = 6,
    **tables: Any,
):
    notes: list[str] = []
    found = chat(
        model,
        config_of(model, **tables),
        iter(turns),
        write or (lambda piece: None),
        notes.append,
        interactive=interactive,
        max_tokens=max_tokens,
        temperature=0.0,
        seed=0,
    )
    return found["answers"], notes


def test_a_second_turn_sees_the_first_until_new(model: Path) -> None:
    answers, _ = talk(model, ["1 + 2 =", "and 3 more?", "/new", "and 3 more?"])
    alone, _ = talk(model, ["and 3 more?"])
    assert len(answers) == 3
    assert answers[2] == alone[0] != answers[1]


def test_a_template_of_one_question_answers_each_turn_by_itself(model: Path) -> None:
    data = {"template": "{system}|{prompt}\n", "system": "S"}
    answers, notes = talk(model, ["1 + 2 =", "1 + 2 =", "4 + 4 ="], data=data)
    assert answers[0] == answers[1] and len(answers) == 3
    assert [note for note in notes if "one question" in note]


def test_an_answer_takes_what_context_and_cache_have_room_for(model: Path) -> None:
    for num_pages in (5, 12):  # 40 tokens; 96, as the context
        for max_tokens in (0, 10_000):
            answers, notes = talk(
                model,
                ["1 + 2 ="],
                max_tokens=max_tokens,
                engine={"page_tokens": 8, "num_pages": num_pages},
            )
            assert answers[0] and ("context is full" in "".join(notes)), (
                "it ends by length, and says so"
            )
    assert not talk(model, ["1 + 2 ="], max_tokens=6)[1]


def test_a_turn_that_is_refused_ends_a_single_question_and_not_a_conversation(model: Path) -> None:
    long = "1 + 2 = " * CONTEXT
    with pytest.raises(EngineRefused, match="context"):
        talk(model, [long])
    answers, notes = talk(model, [long, "1 + 2 ="], interactive=True)
    assert len(answers) == 1 and "/new" in notes[0]


def test_ctrl_c_ends_the_answer_and_the_conversation_goes_on(model: Path) -> None:
    said: list[str] = []

    def write(piece: str) -> None:
        if not said:
            os.kill(os.getpid(), signal.SIGINT)
        said.append(piece)

    answers, notes = talk(model, ["1 + 2 =", "and more?"], write, interactive=True, max_tokens=0)
    assert len(answers) == 1 and any("stopped" in note for note in notes)
    said.clear()
    with pytest.raises(KeyboardInterrupt):
        talk(model, ["1 + 2 ="], write, max_tokens=0)


def test_ctrl_c_while_nothing_is_answered_ends_the_chat_at_once(model: Path) -> None:
    heard: list[str] = []

    def turns() -> Iterator[str]:
        yield "1 + 2 ="
        os.kill(os.getpid(), signal.SIGINT)
        heard.append("the terminal goes on waiting for a line")

    with pytest.raises(KeyboardInterrupt):
        talk(model, turns(), interactive=True)
    assert not heard


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_end_of_input_ends_the_chat_and_stdout_has_no_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("one \n\n  \ntwo"))
    assert list(_typed()) == ["one ", "two"]
    out, err = capsys.readouterr()
    assert out == "" and err.count("> ") == 5 and err.endswith("\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("three\n"))
    assert list(_typed()) == ["three"] and capsys.readouterr() == ("", "")
