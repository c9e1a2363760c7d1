"""gyre serve with an engine that hangs: readiness, metrics and requests while it stands still and
after."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from system_models import save_checkpoint

from scraped import counts_changed, read_samples
from served import Served, serving

pytestmark = pytest.mark.slow  # `make test` has the servers of test_serve.py

ASKED = {
    "model": "qwen",
    "messages": [{"role": "user", "content": "How many apples are left?"}],
    "max_tokens": 200,
    "seed": 3,
    "n": 8,
    "ignore_eos": True,
    "stream": True,
}
LONGEST_S = 60.0
# one completion at a time, so that work is left when the engine is stopped
SLOW = "--set", "run.threads=1", "--set", "engine.max_running=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "qwen", "qwen3")


def engines_of(served: Served) -> list[psutil.Process]:
    tree = psutil.Process(served.process.pid).children(recursive=True)
    return [one for one in tree if "gyre.cluster.worker.process" in one.cmdline()]


def engine_of(served: Served) -> psutil.Process:
    (engine,) = engines_of(served)
    return engine


def stop(engine: psutil.Process) -> None:
    engine.send_signal(signal.SIGSTOP)
    until(lambda: engine.status() == psutil.STATUS_STOPPED)


def until(true: Callable[[], Any]) -> None:
    ends = time.monotonic() + LONGEST_S
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.05)


def ready(served: Served) -> httpx.Response:
    return httpx.get(f"{served.url}/health/ready", timeout=LONGEST_S)


def scrape(served: Served) -> dict[tuple[str, ...], float]:
    answer = httpx.get(f"{served.url}/metrics", timeout=LONGEST_S)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return read_samples(answer.text)


def rows(lines: Iterator[str]) -> Iterator[Any]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def test_an_engine_that_stands_still_is_not_ready_until_it_goes_on(folder, tmp_path) -> None:
    """Nobody loses anything, since it goes on before cluster.hang_s: 45 s."""
    with serving(folder, tmp_path / "log", *SLOW, "--access-log") as served:
        engine = engine_of(served)
        assert ready(served).json() == {"ready": True, "reason": ""}
        stop(engine)  # idle
        assert ready(served).status_code == 503
        engine.send_signal(signal.SIGCONT)
        until(lambda: ready(served).status_code == 200)
        before = scrape(served)
        url = f"{served.url}/v1/chat/completions"
        whole = httpx.post(url, json=ASKED | {"stream": False}, timeout=LONGEST_S)
        assert whole.json()["usage"]["completion_tokens"] == 8 * 200
        with httpx.stream("POST", url, json=ASKED, timeout=LONGEST_S) as answer:
            events = rows(answer.iter_lines())
            first = [next(events) for _ in range(5)]
            stop(engine)  # with a request under way
            health = ready(served)
            assert health.status_code == 503
            assert health.json()["reason"] == "engine-0: it had not answered after 2 s"
            still = scrape(served)
            assert still["gyre_engine_up", "engine=0"] == 0
            assert still["gyre_replicas", "state=unwell"] == 1
            assert still["gyre_requests_in_flight",] == 1
            assert still["gyre_engine_stats_age_seconds", "engine=0"] > 1
            assert httpx.get(f"{served.url}/health/live").status_code == 200
            engine.send_signal(signal.SIGCONT)
            until(lambda: ready(served).status_code == 200)
            last = [*first, *events][-1]
        assert last["choices"][0]["finish_reason"] == "length"
        changed = counts_changed(before, scrape(served))
        assert changed["vllm:generation_tokens_total", "engine=0"] == 2 * 8 * 200
        assert changed["vllm:request_success_total", "finished_reason=length"] == 2 * 8
        assert changed["vllm:time_to_first_token_seconds_count",] == 2 * 8
        assert changed["vllm:inter_token_latency_seconds_count",] == 8 * 199
        assert not [key for key in changed if "errors" in key[0] or "disconnects" in key[0]]
        logged = [json.loads(line) for line in served.log.read_text().splitlines()]
        *_, row = [
            row for row in logged if row["kind"] == "serve.access" and "completions" in row["path"]
        ]
        assert (row["status"], row["tokens"], row["method"]) == (200, 8 * 200, "POST")
        assert row["request_id"] == last["id"] and "apples" not in served.log.read_text()


@pytest.mark.slow
def test_an_engine_that_stands_still_for_long_is_started_again(folder, tmp_path) -> None:
    """After cluster.hang_s its process is killed, and its request goes on in a new one."""
    options = *SLOW, "--set", "cluster.hang_s=6"
    with serving(folder, tmp_path / "log", *options) as served:
        engine = engine_of(served)
        url = f"{served.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=ASKED, timeout=LONGEST_S) as answer:
            events = rows(answer.iter_lines())
            next(events)
            stop(engine)
            until(lambda: ready(served).json()["reason"] == "engine-0: lost")
            found = scrape(served)
            assert found["gyre_replicas", "state=lost"] == 1
            assert found["gyre_engine_up", "engine=0"] == 0
            last = list(events)[-1]
        assert last["choices"][0]["finish_reason"] == "length"
        until(lambda: not engine.is_running())
        assert ready(served).json() == {"ready": True, "reason": ""}
        found = scrape(served)
        assert found["gyre_replicas", "state=ready"] == 1
        assert found["vllm:request_success_total", "finished_reason=length"] == 8
        log = served.log.read_text()
        assert log.count('"engine.lost"') == log.count('"engine.restarted"') == 1


def find_busy(engines: list[psutil.Process]) -> psutil.Process:
    """The engine that works: it takes more of the processor than the other one, by half a second."""

    def spent_s(engine: psutil.Process) -> float:
        return sum(engine.cpu_times()[:2])

    before = {engine: spent_s(engine) for engine in engines}
    more: list[float] = []

    def differs() -> bool:
        more[:] = [spent_s(engine) - before[engine] for engine in engines]
        return max(more) - min(more) > 0.5

    until(differs)
    return engines[more.index(max(more))]


@pytest.mark.slow
def test_of_two_engines_the_one_that_stands_still_gets_no_new_requests(folder, tmp_path) -> None:
    """Its own wait for it, and new ones are answered. Once it has gone on it gets some again."""
    options = "--replicas", "2", *SLOW, "--set", "cluster.stall_s=2", "--set", "cluster.return_s=1"
    asked = {"model": "qwen", "prompt": [11, 12, 13], "max_tokens": 4, "ignore_eos": True}
    with serving(folder, tmp_path / "log", *options) as served:

        def ask(times: int) -> None:
            for _ in range(times):
                answer = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=LONGEST_S)
                assert answer.status_code == 200

        def share(place: int) -> float:
            return scrape(served)["gyre_engine_routing_share", f"engine={place}"]

        url = f"{served.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=ASKED, timeout=LONGEST_S) as answer:
            events = rows(answer.iter_lines())
            next(events)
            busy = find_busy(engines_of(served))
            stop(busy)
            until(lambda: 0 in (share(0), share(1)))
            place = [share(0), share(1)].index(0)
            assert '"engine.ejected"' in served.log.read_text()
            before = scrape(served)
            ask(3)
            after = scrape(served)
            changed = counts_changed(before, after)
            assert changed["gyre_engine_routed_requests_total", f"engine={1 - place}"] == 3
            busy.send_signal(signal.SIGCONT)
            assert [*events][-1]["choices"][0]["finish_reason"] == "length"
        until(lambda: share(place) == 1)
        ask(2)
        changed = counts_changed(after, scrape(served))
        assert changed["gyre_engine_routed_requests_total", f"engine={place}"] > 0
        assert '"engine.returning"' in served.log.read_text()
