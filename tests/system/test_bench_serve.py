"""gyre bench serve against gyre serve: two processes as a user starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from system_models import save_checkpoint

from gyre.text.tokenizer import load_tokenizer
from scraped import counts_changed, read_samples
from served import Served, serving

pytestmark = pytest.mark.slow

GYRE = [sys.executable, "-c", "from gyre.cli.main import main; main()"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "qwen", "qwen3")


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "stderr"
    with serving(folder, log, "--set", "run.threads=1") as found:
        yield found


def bench(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [*GYRE, "bench", "serve", url, "--no-client-rate", *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120)


def told(ran: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


LENGTHS = "--input-tokens", "40", "--output-tokens", "12", "--warm-up", "2"


def test_tokens_are_those_that_were_asked(served, tmp_path) -> None:
    output = tmp_path / "found.json"
    levels = "--concurrency", "1,4", "--rate", "50", "--requests", "6"
    ran = bench(served.url, *LENGTHS, *levels, "--json", "--output", str(output))
    found = told(ran)
    assert found == json.loads(output.read_text())
    assert found["model"] == "qwen" and not found["interrupted"]
    assert [level["name"] for level in found["levels"]] == [
        "concurrency 1",
        "concurrency 4",
        "50/s",
    ]
    for level in found["levels"]:
        assert (level["ok"], level["failed"], level["without_usage"]) == (6, 0, 0)
        assert level["prompt_tokens"] == 6 * 40 and level["completion_tokens"] == 6 * 12
        assert level["ttft"]["count"] == 6 and level["itl"]["count"] > 0
        assert 0.0 < level["ttft"]["p50_ms"] <= level["e2e"]["p99_ms"]
    assert "level 3/3, 50/s: 6 answered of 6" in ran.stderr


def test_a_chat_is_fitted_and_a_table_printed(served) -> None:
    levels = "--concurrency", "2", "--requests", "4"
    ran = bench(served.url, *LENGTHS, *levels, "--endpoint", "chat", "--no-stream")
    assert ran.returncode == 0, ran.stderr
    rows = dict(line.strip(" │").split("│", 1) for line in ran.stdout.splitlines() if "│" in line)
    found = {name.strip(): value.strip() for name, value in rows.items()}
    assert found["ok"] == "4" and found["failed"] == "0"
    assert abs(float(found["prompt tokens"]) - 40) < 8 and found["answer tokens"] == "12.0"


def test_shared_prefixes_are_found_in_the_cache(served) -> None:
    """By each request but the first of each prefix, whole; and nothing of what it has alone."""
    load = "--load", "prefix", "--prefixes", "2", "--prefix-tokens", "128", "--input-tokens", "8"
    levels = "--output-tokens", "4", "--concurrency", "1", "--requests", "8", "--warm-up", "0"
    before = read_samples(httpx.get(f"{served.url}/metrics", timeout=30).text)
    (level,) = told(bench(served.url, *load, *levels, "--json"))["levels"]
    after = read_samples(httpx.get(f"{served.url}/metrics", timeout=30).text)
    assert level["ok"] == 8 and level["prompt_tokens"] == 8 * 136
    changed = counts_changed(before, after)
    assert changed["vllm:prefix_cache_queries_total", "engine=0"] == 8 * 136
    assert changed["vllm:prefix_cache_hits_total", "engine=0"] == (8 - 2) * 128


def conversation(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


ANSWERED = [
    ("How many apples does Weng have?", "She has twelve apples, and gives away four."),
    ("What is left of ten after three?", "Seven are left."),
    ("How long is the way to school?", "It is two miles, of which she walks one each morning."),
]


def test_conversations_of_a_file_get_answers_of_the_recorded_lengths(
    served, folder, tmp_path
) -> None:
    """Each that is usable is asked once: first questions alone, without what follows the answer."""
    rows = [
        *(conversation(("human", asked), ("gpt", said)) for asked, said in ANSWERED[:2]),
        conversation(("system", "Be short."), ("human", ANSWERED[2][0]), ("gpt", ANSWERED[2][1]))
        | {"more": 1},
        conversation(("human", "Nobody answers this question?")),
        conversation(("human", "Is this answer far too short?"), ("gpt", "a")),
        conversation(("gpt", "An answer without its question.")),
    ]
    rows[0]["conversations"] += [{"from": "human", "value": "And then?"}]
    file = tmp_path / "shared.json"
    file.write_text(json.dumps(rows))
    load = "--load", "sharegpt", "--file", str(file), "--tokenizer", str(folder)
    levels = "--concurrency", "1", "--requests", "3", "--warm-up", "0"
    (level,) = told(bench(served.url, *load, *levels, "--json"))["levels"]
    assert (level["ok"], level["failed"]) == (3, 0)
    tokenizer = load_tokenizer(folder)
    questions, answers = (
        sum(len(tokenizer.encode(turns[at])) for turns in ANSWERED) for at in (0, 1)
    )
    assert (level["prompt_tokens"], level["completion_tokens"]) == (questions, answers)


def test_ctrl_c_prints_what_was_measured(served) -> None:
    argv = [*GYRE, "bench", "serve", served.url, "--no-client-rate", "--json", *LENGTHS]
    process = subprocess.Popen(
        [*argv, "--concurrency", "2", "--seconds", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("level 1/1"), line
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    found = json.loads(out.splitlines()[-1])
    assert found["interrupted"] and found["levels"][0]["ok"] > 0


def test_a_server_that_is_not_there_is_named(served) -> None:
    ran = bench("http://127.0.0.1:1", *LENGTHS)
    assert ran.returncode == 2 and "127.0.0.1:1/v1/models" in ran.stderr
    ran = bench(served.url, *LENGTHS, "--model", "other", "--requests", "2", "--concurrency", "1")
    assert ran.returncode == 1 and "404 model_not_found" in ran.stdout
