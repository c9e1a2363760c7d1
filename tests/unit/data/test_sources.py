"""Files to prompts: JSONL, gzip, parquet, `datasets`; what bad input says; what is dropped and
counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from gyre.core.errors import ConfigError, InputError
from gyre.data.config import DataConfig
from gyre.data.rows import as_json
from gyre.data.sources import load_prompts
from gyre.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["How many? 1"], vocab_size=262)
GSM8K = [
    {
        "question": f"Ann has {n} apples and buys {n + 1}. How many?",
        "answer": f"{n} + {n + 1}\n#### 1,{n:03d}",
        "level": n,
    }
    for n in range(40)
]


class Events(list):
    """Collects what is emitted."""

    def __call__(self, kind: str, **fields: Any) -> None:
        json.dumps(fields)
        self.append((kind, fields))

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self if name == kind]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gsm8k(path: Path, **changes: Any) -> DataConfig:
    settings = {
        "source": "jsonl",
        "prompt_field": "question",
        "answer_pattern": "#### (.+)",
        "held_out_fraction": 0.3,
    }
    return DataConfig(path=str(path), **(settings | changes))


def test_gsm8k_rows_become_prompts(tmp_path: Path) -> None:
    settings = gsm8k(write_jsonl(tmp_path / "rows.jsonl", GSM8K), system="Think.")
    events = Events()
    found = load_prompts(settings, TOKENIZER, emit=events)
    prompts = [*found.train, *found.held_out]
    assert sorted(p.task["answer"] for p in prompts) == [f"1,{n:03d}" for n in range(40)]
    for prompt in prompts:
        level = prompt.task["level"]
        assert prompt.text == f"Think.\nAnn has {level} apples and buys {level + 1}. How many?\n"
        assert TOKENIZER.decode(prompt.tokens) == prompt.text
        assert prompt.tokens.dtype == np.int32
        assert prompt.source == "jsonl/rows.jsonl"
    assert len({p.prompt_id for p in prompts}) == 40
    assert events.named("data.loaded")[0]["train"] == len(found.train) == 40 - len(found.held_out)
    assert found.held_out


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "datasets", "datasets with splits"])
def test_every_format_gives_what_jsonl_gives(tmp_path: Path, kind: str) -> None:
    plain = load_prompts(
        gsm8k(write_jsonl(tmp_path / "rows.jsonl", GSM8K)), TOKENIZER, emit=Events()
    )
    path = tmp_path / f"other.{kind.split()[0]}"
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GSM8K), path)
    else:
        import datasets

        data = datasets.Dataset.from_list(GSM8K)
        (datasets.DatasetDict({"train": data}) if "splits" in kind else data).save_to_disk(
            str(path)
        )
    settings = gsm8k(path, source=kind.split()[0].removesuffix(".gz"))
    other = load_prompts(settings, TOKENIZER, emit=Events())
    for ours, theirs in ((plain.train, other.train), (plain.held_out, other.held_out)):
        assert [(p.text, p.task) for p in ours] == [(p.text, p.task) for p in theirs]


def test_splits_of_a_data_set(tmp_path: Path) -> None:
    import datasets

    halves = {
        "train": datasets.Dataset.from_list(GSM8K[:30]),
        "test": datasets.Dataset.from_list(GSM8K[25:]),
    }
    datasets.DatasetDict(halves).save_to_disk(str(tmp_path / "saved"))
    events = Events()
    settings = gsm8k(tmp_path / "saved", source="datasets", held_out_split="test")
    found = load_prompts(settings, TOKENIZER, emit=events)
    assert sorted(p.task["level"] for p in found.train) == list(range(25))
    assert sorted(p.task["level"] for p in found.held_out) == list(range(25, 40))
    assert events.named("data.loaded")[0]["dropped"]["in_held_out"] == 5
    with pytest.raises(InputError, match="no split 'dev'; it has train, test"):
        load_prompts(
            gsm8k(tmp_path / "saved", source="datasets", split="dev"), TOKENIZER, emit=Events()
        )


def test_given_held_out_file(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", GSM8K[:30] + GSM8K[:2])
    held_out = write_jsonl(tmp_path / "test.jsonl", GSM8K[28:])
    events = Events()
    found = load_prompts(gsm8k(train, held_out_path=str(held_out)), TOKENIZER, emit=events)
    assert (len(found.train), len(found.held_out)) == (28, 12)
    dropped = events.named("data.loaded")[0]["dropped"]
    assert dropped == {"duplicate": 2, "in_held_out": 2, "overlong": 0}


def test_code_problems_keep_their_tests(tmp_path: Path) -> None:
    """A function against tests and a program with stdin and stdout: whatever a row holds reaches
    the reward."""
    rows = [
        {
            "prompt": "Write add(a, b).",
            "kind": "function",
            "entry": "add",
            "tests": ["assert add(1, 2) == 3"],
        },
        {
            "prompt": "Double the input.",
            "kind": "program",
            "tests": [{"stdin": "2\n", "stdout": "4\n"}],
            "limit_s": 1.5,
        },
    ]
    settings = DataConfig(
        source="jsonl",
        path=str(write_jsonl(tmp_path / "code.jsonl", rows)),
        answer_field="",
        held_out_fraction=0,
    )
    found = load_prompts(settings, TOKENIZER, emit=Events())
    assert [dict(p.task) for p in found.train] == [
        {k: v for k, v in row.items() if k != "prompt"} for row in rows
    ]
    assert found.held_out == ()


def test_conversations_as_prompts(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": turns, "answer": 4}])
    settings = DataConfig(source="jsonl", path=str(path), held_out_fraction=0, system="S")
    (prompt,) = load_prompts(settings, TOKENIZER, emit=Events()).train
    assert prompt.text == "S\n1\n2<|end|>3\n"
    assert prompt.task["answer"] == 4


BAD_ROWS = [
    (
        '{"question": "q"}',
        r"rows\.jsonl:2: field 'answer' is missing; the row has question",
        "data.answer_field",
    ),
    (
        '{"question": null, "answer": "#### 1"}',
        r":2: field 'question' is null",
        "data.prompt_field",
    ),
    ('{"question": "  ", "answer": "#### 1"}', r":2: field 'question' holds '  '", "empty prompts"),
    (
        '{"question": [{"role": "user"}], "answer": "#### 1"}',
        r":2: field 'question' holds \[",
        "message",
    ),
    ('{"question": 7, "answer": "#### 1"}', r":2: field 'question' holds 7", "message"),
    ('{"question": "q", "answer": "one"}', r":2: data.answer_pattern .* holds 'one'", "GSM8K"),
    ('{"question": "q", "answer": ', r":2: not a JSON object in UTF-8", "one JSON object a line"),
    (
        '["q", "a"]',
        r":2: need a JSON object with named fields, got \['q', 'a'\]",
        "one object a line",
    ),
    (
        '{"question": "cut \\ud83d", "answer": "#### 1"}',
        r":2: the row holds half a surrogate pair",
        "UTF-8",
    ),
]


@pytest.mark.parametrize(("line", "message", "hint"), BAD_ROWS)
def test_a_bad_row_is_named_with_what_to_do(
    tmp_path: Path, line: str, message: str, hint: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GSM8K[0]) + "\n" + line + "\n")
    with pytest.raises(InputError, match=message) as caught:
        load_prompts(gsm8k(path), TOKENIZER, emit=Events())
    assert hint in caught.value.hint


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(InputError, match=r"rows\.jsonl:1: not a JSON object in UTF-8"):
        load_prompts(gsm8k(path), TOKENIZER, emit=Events())


def test_files_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist") as caught:
        load_prompts(gsm8k(tmp_path / "none.jsonl"), TOKENIZER, emit=Events())
    assert "data.path" in caught.value.hint
    with pytest.raises(InputError, match="is not a file"):
        load_prompts(gsm8k(tmp_path), TOKENIZER, emit=Events())
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in GSM8K).encode())[:-20])
    with pytest.raises(InputError, match=r"cut\.jsonl\.gz: unreadable after line \d+"):
        load_prompts(gsm8k(cut), TOKENIZER, emit=Events())
    (tmp_path / "no.parquet").write_bytes(b"not parquet")
    with pytest.raises(InputError, match="not readable as parquet"):
        load_prompts(gsm8k(tmp_path / "no.parquet", source="parquet"), TOKENIZER, emit=Events())
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="train half is empty"):
        load_prompts(gsm8k(tmp_path / "empty.jsonl"), TOKENIZER, emit=Events())
    with pytest.raises(InputError, match="held-out half is empty"):
        path = write_jsonl(tmp_path / "one.jsonl", GSM8K[:1])
        load_prompts(gsm8k(path, held_out_fraction=1e-9), TOKENIZER, emit=Events())


def test_overlong_prompts_stop_or_are_counted(tmp_path: Path) -> None:
    rows = [*GSM8K, {"question": "long " * 50, "answer": "#### 1"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        InputError,
        match=r"rows\.jsonl:41: the prompt has 2\d\d tokens; data.max_prompt_tokens = 100",
    ) as caught:
        load_prompts(gsm8k(path, max_prompt_tokens=100), TOKENIZER, emit=Events())
    assert 'data.overlong = "drop"' in caught.value.hint
    events = Events()
    found = load_prompts(
        gsm8k(path, max_prompt_tokens=100, overlong="drop"), TOKENIZER, emit=events
    )
    assert len(found.train) + len(found.held_out) == 40
    assert events.named("data.loaded")[0]["dropped"]["overlong"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "jsonl"}, "needs path"),
        ({"source": "json", "path": "x"}, "source"),
        ({"path": "x"}, "of no use"),
        ({"source": "jsonl", "path": "x", "held_out_split": "test"}, "takes held_out_path"),
        ({"source": "datasets", "path": "x", "held_out_path": "y"}, "takes held_out_split"),
        ({"template": "Q: "}, "holds {prompt}"),
        ({"held_out_fraction": 1.0}, "held_out_fraction"),
        ({"promt_field": "x"}, "did you mean 'prompt_field'"),
    ],
)
def test_config_faults(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(**changes)


def test_an_answer_pattern_whose_group_stayed_empty_is_not_found(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "q", "answer": "5 or abc"}])
    with pytest.raises(InputError, match=r":1: data.answer_pattern .* holds '5 or abc'"):
        load_prompts(
            gsm8k(path, answer_pattern="a(x)?b", held_out_fraction=0), TOKENIZER, emit=Events()
        )
    found = load_prompts(
        gsm8k(path, answer_pattern="([0-9])|abc", held_out_fraction=0), TOKENIZER, emit=Events()
    )
    assert [prompt.task["answer"] for prompt in found.train] == ["5"]


def test_answer_pattern_that_is_no_pattern(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", GSM8K)
    with pytest.raises(ConfigError, match="not a regular expression"):
        load_prompts(gsm8k(path, answer_pattern="(("), TOKENIZER, emit=Events())


def test_every_config_field_is_described() -> None:
    assert [name for name, field in DataConfig.model_fields.items() if not field.description] == []


def test_values_become_json() -> None:
    import datetime

    value = {
        "a": (1, np.int64(2)),
        "b": np.array([[1.5]]),
        3: datetime.date(2024, 1, 2),
        "c": None,
        "d": True,
    }
    assert as_json(value) == {"a": [1, 2], "b": [[1.5]], "3": "2024-01-02", "c": None, "d": True}
