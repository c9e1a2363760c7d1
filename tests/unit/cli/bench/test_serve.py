"""gyre bench serve: what the command line makes of its options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gyre.benchmark.loads import PrefixLoad, RandomLoad, RequestPlace, TextLoad
from gyre.cli.bench.serve import BenchServeArgs, make_settings
from gyre.core.errors import GyreError
from gyre.text.tokenizer import train_tokenizer


def args(**changed: Any) -> BenchServeArgs:
    values = {
        "url": "http://127.0.0.1:8000",
        "load": "random",
        "input_tokens": 32,
        "output_tokens": 16,
        "spread": 0.0,
        "file": None,
        "tokenizer": None,
        "prefixes": 4,
        "prefix_tokens": 64,
        "zipf": 1.0,
        "concurrency": "",
        "rate": "",
        "requests": 0,
        "seconds": 0.0,
        "warm_up": 8,
        "stream": True,
        "endpoint": "completions",
        "model": "",
        "api_key_file": None,
        "temperature": 0.0,
        "ignore_eos": None,
        "timeout_s": 60.0,
        "max_connections": 64,
        "client_rate": True,
        "seed": 0,
        "output": None,
    }
    return BenchServeArgs(**(values | changed))


def test_levels_are_closed_loops_then_open_ones() -> None:
    levels = make_settings(args(concurrency="1,8", rate="2.5", requests=20)).levels
    assert [(level.concurrency, level.rate_per_s, level.requests) for level in levels] == [
        (1, 0.0, 20),
        (8, 0.0, 20),
        (0, 2.5, 20),
    ]
    assert [level.concurrency for level in make_settings(args()).levels] == [1, 8, 32]
    (timed,) = make_settings(args(rate="4", seconds=30.0)).levels
    assert (timed.requests, timed.seconds, timed.warm_up) == (0, 30.0, 8)


def test_each_kind_of_load_is_made(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    turns = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
    file.write_text(json.dumps([{"conversations": turns}] * 12))
    assert isinstance(make_settings(args()).load, RandomLoad)
    assert isinstance(make_settings(args(load="prefix")).load, PrefixLoad)
    text = make_settings(args(load="sharegpt", file=file))
    assert isinstance(text.load, TextLoad) and not text.ignore_eos
    assert text.load.per_level == 128
    assert make_settings(args()).ignore_eos


def test_with_a_tokenizer_answers_are_as_long_as_the_recorded_ones(tmp_path: Path) -> None:
    train_tokenizer(["one and two"], vocab_size=300).save(tmp_path)
    turns = [{"from": "human", "value": "abcdefg"}, {"from": "gpt", "value": "vwxyz"}]
    file = tmp_path / "f.json"
    file.write_text(json.dumps([{"conversations": turns}]))
    settings = make_settings(args(load="sharegpt", file=file, tokenizer=tmp_path))
    drawn = settings.load.draw(RequestPlace(level=1, warm_up=False, index=0))
    assert (drawn.text, drawn.max_tokens, settings.ignore_eos) == ("abcdefg", 5, True)


def test_the_key_is_read_from_its_file_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-secret\n")
    settings = make_settings(args(api_key_file=file))
    assert settings.api_key == "sk-secret" and "sk-secret" not in repr(settings)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"load": "sonnet"}, "--load sonnet: accepted are random, sharegpt, prefix"),
        ({"endpoint": "responses"}, "--endpoint responses: accepted are chat, completions"),
        ({"concurrency": "1,x"}, "--concurrency 1,x"),
        ({"concurrency": "0"}, "--concurrency 0"),
        ({"rate": "-2"}, "--rate -2"),
        ({"rate": "nan"}, "--rate nan"),
        ({"requests": 5, "seconds": 5.0}, "--requests and --seconds"),
        ({"load": "sharegpt"}, "needs the conversations"),
        ({"load": "sharegpt", "file": Path("/nowhere/f.json")}, "--file /nowhere/f.json"),
        ({"url": "127.0.0.1:8000"}, "URL"),
        ({"api_key_file": Path("/nowhere/key")}, "--api-key-file /nowhere/key"),
    ],
)
def test_what_cannot_be_played_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(GyreError) as raised:
        make_settings(args(**changed))
    assert said in raised.value.message


def test_a_file_that_holds_more_than_a_key_is_refused_unseen(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret one\r\nX-Other: 1")
    with pytest.raises(GyreError) as raised:
        make_settings(args(api_key_file=file))
    assert "secret" not in raised.value.message
