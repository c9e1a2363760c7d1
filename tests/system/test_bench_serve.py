"""gyre bench serve against gyre serve: two processes as a user starts them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from system_models import save_checkpoint

from served import Served, serving

pytestmark = pytest.mark.slow

GYRE = [sys.executable, "-c", "from gyre.cli.main import main; main()"]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = save_checkpoint(tmp_path_factory.mktemp("model") / "qwen", "qwen3")
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
    load = "--load", "prefix", "--prefixes", "2", "--prefix-tokens", "128", "--input-tokens", "8"
    levels = "--output-tokens", "4", "--concurrency", "1", "--requests", "8"
    (level,) = told(bench(served.url, *load, *levels, "--json"))["levels"]
    assert level["ok"] == 8 and level["prompt_tokens"] == 8 * 136


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
