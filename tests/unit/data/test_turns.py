"""Where the prompt ends: no row shows the model the response that it is to learn."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from gyre.core.errors import InputError
from gyre.data.config import DataConfig
from gyre.data.examples import load_examples
from gyre.data.pairs import load_pairs
from gyre.data.problems import prompt_key
from gyre.data.sources import load_prompts
from gyre.data.turns import take_prompt
from gyre.text.messages import Message
from unit.data.test_sources import Events, write_jsonl
from unit.text.test_tokenizer import TOKENIZER

USER, MODEL = ({"role": "user", "content": "ask"}, {"role": "assistant", "content": "SECRET"})
OTHER = {"role": "assistant", "content": "worse"}
FOUR = [USER, {"role": "assistant", "content": "first"}, {"role": "user", "content": "more"}, MODEL]


def jsonl(folder: Path, *rows: Any, **settings: Any) -> DataConfig:
    path = write_jsonl(folder / "rows.jsonl", list(rows))
    return DataConfig(source="jsonl", path=str(path), held_out_fraction=0, **settings)


@pytest.mark.parametrize("turns", [[USER, MODEL], FOUR])
def test_a_conversation_is_split_before_its_last_turn(
    tmp_path: Path, turns: list[dict[str, str]]
) -> None:
    both = jsonl(
        tmp_path,
        {"messages": turns},
        prompt_field="messages",
        response_field="messages",
        answer_field="",
    )
    (example,) = load_examples(both, TOKENIZER, emit=Events()).train
    mask = example.columns["loss_mask"]
    assert TOKENIZER.decode(example.tokens[mask]) == "SECRET<|end|>"
    assert "SECRET" not in TOKENIZER.decode(example.tokens[~mask])
    events = Events()
    (prompt,) = load_prompts(both, TOKENIZER, emit=events).train
    assert "SECRET" not in prompt.text and prompt.text.endswith(turns[-2]["content"] + "\n")
    assert events.named("data.loaded")[0]["split_turns"] == 1


def test_turns_are_the_records_that_chat_and_serving_have() -> None:
    asked = take_prompt({"prompt": FOUR}, "rows.jsonl:1", DataConfig(source="jsonl", path="x"))
    assert asked == tuple(Message(**turn) for turn in FOUR[:3])


@pytest.mark.parametrize("prompt_field", ["prompt", "chosen", "rejected"])
@pytest.mark.parametrize("before", [[USER], FOUR[:3]])
def test_a_pair_of_conversations_shares_its_prompt(
    tmp_path: Path, prompt_field: str, before: list[Any]
) -> None:
    row = {"chosen": [*before, MODEL], "rejected": [*before, OTHER]}
    (pair,) = load_pairs(
        jsonl(tmp_path, row, prompt_field=prompt_field), TOKENIZER, emit=Events()
    ).train
    for sequence, said in zip(pair, ("SECRET", "worse"), strict=True):
        mask = sequence.columns["loss_mask"]
        assert TOKENIZER.decode(sequence.tokens[mask]) == said + "<|end|>"
        prompt = TOKENIZER.decode(sequence.tokens[~mask])
        assert (
            "SECRET" not in prompt
            and "worse" not in prompt
            and prompt.endswith(before[-1]["content"] + "\n")
        )


REFUSED = {
    "two places": ({"prompt": [USER, MODEL], "response": "SECRET"}, {}, "not sure"),
    "a text as both": ({"prompt": "ask SECRET"}, {"response_field": "prompt"}, "both 'prompt'"),
    "no turn before": ({"prompt": [MODEL]}, {"response_field": "prompt"}, "ends with nothing"),
    "two answers": ({"prompt": [USER, MODEL, MODEL]}, {"response_field": "prompt"}, "'assistant'"),
    "another name": (
        {"prompt": [USER, {"role": "model", "content": "SECRET"}], "response": "x"},
        {},
        "'model'",
    ),
    "calls": (
        {"prompt": [USER, {**OTHER, "tool_calls": [1]}, FOUR[2]], "response": "x"},
        {},
        "'tool_calls'",
    ),
    "a call": (
        {"prompt": [USER, {**MODEL, "function_call": {"a": 1}}]},
        {"response_field": "prompt"},
        "_call'",
    ),
    "reasoning": (
        {"prompt": [USER, {**MODEL, "reasoning_content": "so"}]},
        {"response_field": "prompt"},
        "_content'",
    ),
    "other turns": ({"prompt": "what", "response": FOUR}, {}, "are not the prompt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_sure_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    row, settings, words = REFUSED[name]
    good = {"prompt": [USER, MODEL]} if settings else {"prompt": "ask", "response": "x"}
    with pytest.raises(InputError, match=rf"rows\.jsonl:2: .*{words}"):
        load_examples(jsonl(tmp_path, good, row, **settings), TOKENIZER, emit=Events())


def test_keys_of_a_message_that_say_nothing_are_fine(tmp_path: Path) -> None:
    turns = [
        USER,
        {**OTHER, "reasoning_content": "so"},
        {**FOUR[2], "name": "x"},
        {**MODEL, "tool_calls": None},
    ]
    rows = jsonl(tmp_path, {"prompt": turns}, response_field="prompt", answer_field="")
    assert len(load_examples(rows, TOKENIZER, emit=Events()).train) == 1


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "ask SECRET", "rejected": "ask worse"},
        {"chosen": FOUR, "rejected": [{"role": "user", "content": "else"}, OTHER]},
        {"chosen": [MODEL], "rejected": [OTHER]},
    ],
)
@pytest.mark.parametrize("prompt_field", ["prompt", "chosen"])
def test_pairs_without_a_sure_prompt_are_refused(
    tmp_path: Path, row: Any, prompt_field: str
) -> None:
    with pytest.raises(InputError, match=r"rows\.jsonl:1: "):
        load_pairs(jsonl(tmp_path, row, prompt_field=prompt_field), TOKENIZER, emit=Events())


@pytest.mark.parametrize(
    "line",
    ['{"prompt": "a", "n": ' + "9" * 5000 + "}", '{"prompt": "a", "n": ' + "[" * 900 + "]" * 900 + "}",
     '{"prompt": "a", "n": ' + '{"a":' * 200 + "1" + "}" * 201, "[" * 100_000],
)  # fmt: skip
def test_deep_nesting_and_huge_integers_are_row_errors(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "fine"}\n' + line + "\n")
    config = DataConfig(
        source="jsonl", path=str(tmp_path / "rows.jsonl"), answer_field="", held_out_fraction=0
    )
    with pytest.raises(InputError, match=r"rows\.jsonl:2: "):
        load_prompts(config, TOKENIZER, emit=Events())


def test_an_integer_past_64_bits_is_kept_by_its_digits(tmp_path: Path) -> None:
    (prompt,) = load_prompts(
        jsonl(tmp_path, {"prompt": "a", "answer": 10**40}), TOKENIZER, emit=Events()
    ).train
    assert prompt.task["answer"] == str(10**40)


def test_a_long_line_is_dropped_before_it_is_encoded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in characters that reach the encoder, which takes hundreds of bytes for each."""
    config = jsonl(
        tmp_path,
        {"prompt": "1 2" * 1_000_000, "response": "x"},
        {"prompt": "ask", "response": "3 4" * 1_000_000},
        {"prompt": "ask", "response": "x"},
        max_prompt_tokens=64,
        max_sequence_tokens=128,
        overlong="drop",
    )
    longest = 0
    encode = TOKENIZER.encode

    def seen(text: str) -> Any:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(text)

    monkeypatch.setattr(TOKENIZER, "encode", seen)
    events = Events()
    assert len(load_examples(config, TOKENIZER, emit=events).train) == 1
    assert events.named("data.loaded")[0]["dropped"]["overlong"] == 2
    assert longest < 1000


@pytest.mark.parametrize(
    "text", ["a b " * 60_000, "x" * 300_000, " " * 300_000, " a" + "b \n" * 99_999 + " "]
)
def test_the_key_of_a_long_prompt_is_that_of_its_words(text: str) -> None:
    expected = " ".join(text.split())
    tracemalloc.start()
    assert prompt_key(text) == expected
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 * len(text)


def test_rows_of_parquet_are_bounded_too(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    value: Any = 1
    for _ in range(80):
        value = [value]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "a", "n": value}]), tmp_path / "rows.parquet"
    )
    config = DataConfig(
        source="parquet", path=str(tmp_path / "rows.parquet"), answer_field="", held_out_fraction=0
    )
    with pytest.raises(InputError, match="nested"):
        load_prompts(config, TOKENIZER, emit=Events())


def test_rows_stay_json(tmp_path: Path) -> None:
    row = {"prompt": "a", "answer": -(2**63), "tests": [2**64 - 1, 2**64]}
    (prompt,) = load_prompts(jsonl(tmp_path, row), TOKENIZER, emit=Events()).train
    assert json.loads(json.dumps(dict(prompt.task))) == {
        "answer": -(2**63),
        "tests": [2**64 - 1, str(2**64)],
    }
