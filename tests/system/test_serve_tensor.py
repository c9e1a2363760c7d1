"""gyre serve with engine.tensor_ranks = 2: each engine is two processes, which answer as one engine
of one process does, change their weights together, and end together."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from system_models import greedy_reference, save_changed, save_checkpoint
from typer.testing import CliRunner

from gyre.cli.main import app
from scraped import read_samples
from served import Served, serving

pytestmark = pytest.mark.timeout(600)

CUT = "--set", "engine.tensor_ranks=2"
EXACT = "--set", "run.threads=1", "--set", "run.dtype=float32"
# one completion at a time, so that work is left when a rank is lost
SLOW = *EXACT, "--set", "engine.max_running=1"
ASKED = [{"role": "user", "content": "How many apples are left?"}]
KEY = "a-key-for-the-tests"
LONGEST_S = 240.0
TOKENS = 200  # of a stream that is disturbed
ROUNDING = 2e-4  # of log-probs: two parts are summed in another order than a whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "qwen", "qwen3")


@contextlib.contextmanager
def asking(served: Served) -> Iterator[openai.OpenAI]:
    url = f"{served.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=LONGEST_S) as made:
        yield made


def greedy(served: Served) -> tuple[str, str]:
    """The answer, and the version that it names."""
    with asking(served) as client:
        answer = client.chat.completions.create(
            model=served.model, messages=ASKED, temperature=0, max_tokens=24
        )
    return answer.choices[0].message.content or "", answer.system_fingerprint or ""


def events_of(served: Served, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in served.log.read_text().splitlines() if line[:1] == "{"]
    return [row for row in rows if row["kind"] == kind]


def until(true: Callable[[], Any], seconds: float = LONGEST_S, *, pause_s: float = 0.05) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(pause_s)


def ranks_of(served: Served) -> dict[str, psutil.Process]:
    """The newest process of each rank, by its name."""
    found: dict[str, psutil.Process] = {}
    for event in events_of(served, "cluster.started"):
        for name, place in event["workers"].items():
            with contextlib.suppress(psutil.NoSuchProcess):
                found[name] = psutil.Process(int(place.rpartition("pid ")[2]))
    return found


def tree_of(served: Served) -> list[psutil.Process]:
    return psutil.Process(served.process.pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: not one that has ended and waits for its parent."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def none_left(processes: list[psutil.Process]) -> None:
    until(lambda: not any(map(is_alive, processes)), 30)


def ready(served: Served) -> httpx.Response:
    return httpx.get(f"{served.url}/health/ready", timeout=LONGEST_S)


def rich_answers(served: Served) -> list[Any]:
    """Greedy and drawn answers, with log-probs of answer and prompt."""
    with asking(served) as client:
        chat = client.chat.completions.create(
            model="qwen", messages=ASKED, temperature=0, max_tokens=40, logprobs=True,
            top_logprobs=3, extra_body={"ignore_eos": True},
        )  # fmt: skip
        drawn = client.chat.completions.create(
            model="qwen", messages=ASKED, temperature=0.9, top_p=0.9, seed=7, n=2, max_tokens=30,
            logprobs=True, frequency_penalty=0.5, logit_bias={"65": 1},
        )  # fmt: skip
        scored = client.completions.create(
            model="qwen", prompt=list(range(10, 40)), max_tokens=4, temperature=0, logprobs=2,
            echo=True,
        )  # fmt: skip
    return [chat, drawn, scored]


def same_answers(found: list[Any], expected: list[Any]) -> None:
    *chats, scored = zip(found, expected, strict=True)
    for here, there in chats:
        assert here.usage == there.usage
        for ours, theirs in zip(here.choices, there.choices, strict=True):
            assert ours.message.content == theirs.message.content
            assert ours.finish_reason == theirs.finish_reason
            told = list(zip(ours.logprobs.content, theirs.logprobs.content, strict=True))
            assert told and all(one.token == other.token for one, other in told)
            assert [one.logprob for one, _ in told] == pytest.approx(
                [other.logprob for _, other in told], abs=ROUNDING
            )
            for one, other in told:
                assert [top.logprob for top in one.top_logprobs] == pytest.approx(
                    [top.logprob for top in other.top_logprobs], abs=ROUNDING
                )
    here, there = (one.choices[0] for one in scored)
    assert here.text == there.text and here.logprobs.tokens == there.logprobs.tokens
    assert here.logprobs.token_logprobs[1:] == pytest.approx(
        there.logprobs.token_logprobs[1:], abs=ROUNDING
    )


@pytest.mark.slow
def test_two_ranks_answer_as_one_does(folder, tmp_path) -> None:
    """Tokens, log-probs, streams, deadlines and hang-ups; then everything ends with the server."""
    with serving(folder, tmp_path / "one", *EXACT) as served:
        expected = rich_answers(served)
    with serving(folder, tmp_path / "two", *EXACT, *CUT) as served:
        same_answers(rich_answers(served), expected)
        assert greedy(served) == (greedy_reference(folder, ASKED), "version-0")
        assert stream_text(served) == expected[0].choices[0].message.content
        late = {"model": "qwen", "prompt": [5, 6], "max_tokens": 200, "n": 8, "ignore_eos": True}
        url = f"{served.url}/v1/completions"
        answer = httpx.post(url, json=late | {"deadline_s": 0.05}, timeout=LONGEST_S)
        assert answer.status_code == 504
        with httpx.stream("POST", url, json=late | {"stream": True}, timeout=LONGEST_S) as answer:
            next(answer.iter_lines())
        until(lambda: not any(httpx.get(f"{served.url}/health/load").json().values()))
        found = read_samples(httpx.get(f"{served.url}/metrics", timeout=LONGEST_S).text)
        assert found["gyre_replicas", "state=ready"] == 1
        assert found["vllm:kv_cache_usage_perc", "engine=0"] == 0
        started = events_of(served, "engine.loaded")
        assert sorted(row["worker"] for row in started) == ["engine-0", "engine-0.1"]
        processes = tree_of(served)
        assert set(ranks_of(served).values()) <= set(processes)
        server = psutil.Process(served.process.pid)
        assert not any("libtorch" in mapped.path for mapped in server.memory_maps())
        heard = [place for one in [server, *processes] for place in one.net_connections("inet")]
        assert {one.laddr.ip for one in heard if one.status == "LISTEN"} == {"127.0.0.1"}
        (made,) = events_of(served, "engine.started")
        assert dry(folder, *EXACT, *CUT)["kv_pages"] == made["pages"]
        assert all(line[:1] == "{" for line in served.log.read_text().splitlines())
    assert served.process.returncode == 0
    none_left(processes)


def stream_text(served: Served) -> str:
    with asking(served) as client:
        stream = client.chat.completions.create(
            model="qwen", messages=ASKED, temperature=0, max_tokens=40, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return "".join(choice.delta.content or "" for event in stream for choice in event.choices)


def dry(folder: Path, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["serve", str(folder), "--dry-run", "--json", *options])
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_that_does_not_divide_is_refused_before_anything_starts(folder) -> None:
    options = "--set", "engine.tensor_ranks=3", "--port", "0"
    for more in ([], ["--dry-run"]):
        done = CliRunner().invoke(app, ["serve", str(folder), *options, *more])
        told = " ".join(done.output.split())
        assert done.exit_code == 2
        assert "engine.tensor_ranks = 3: 4 attention heads do not divide" in told
        assert "1, 2, 4 tensor ranks" in told


@pytest.fixture
def admin(tmp_path) -> tuple[str, str]:
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    return "--admin-key-file", str(key)


def change(served: Served, folder: Path, policy: str = "drain") -> httpx.Response:
    body = {"path": str(folder), "policy": policy}
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.post(f"{served.url}/admin/weights", json=body, headers=headers, timeout=LONGEST_S)


class Clients:
    """Ask without a pause until they are stopped. Every answer must come."""

    def __init__(self, served: Served, count: int) -> None:
        self._served, self._stop = served, threading.Event()
        self.answers: list[tuple[str, str]] = []
        self.faults: list[str] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(greedy(self._served))
            except Exception as error:  # noqa: BLE001  whatever it is, the test names it
                self.faults.append(repr(error))
                return

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(LONGEST_S)

    def until(self, version: str) -> None:
        """Until an answer of that version has come."""
        until(lambda: self.faults or version in [found for _, found in self.answers])
        assert not self.faults


@pytest.mark.slow
def test_weights_change_on_all_ranks_while_clients_ask(folder, tmp_path, admin) -> None:
    """By both policies; a damaged checkpoint changes nothing. An engine that has lost a rank comes
    back with the newest version."""
    folders = [folder, *(save_changed(folder, tmp_path / f"{n}", n) for n in (1, 2))]
    expected = {f"version-{n}": greedy_reference(one, ASKED) for n, one in enumerate(folders)}
    assert len(set(expected.values())) == 3, "the versions cannot be told apart"
    with serving(folder, tmp_path / "log", *EXACT, *CUT, *admin) as served:
        with Clients(served, 3) as clients:
            clients.until("version-0")
            for number, policy in ((1, "drain"), (2, "continue")):
                answer = change(served, folders[number], policy)
                assert answer.status_code == 200, answer.text
                clients.until(f"version-{number}")
            bad = tmp_path / "bad"
            shutil.copytree(folders[1], bad)
            whole = (bad / "model.safetensors").read_bytes()
            (bad / "model.safetensors").write_bytes(whole[: len(whole) // 2])
            answer = change(served, bad)
            assert answer.status_code == 400 and "model.safetensors" in answer.text
            ranks_of(served)["engine-0.1"].kill()
            until(lambda: events_of(served, "engine.rejoined"))
        assert not clients.faults
        assert all(
            text == expected[version] for text, version in clients.answers if "," not in version
        )
        assert greedy(served) == (expected["version-2"], "version-2")
        assert [row["version"] for row in events_of(served, "serve.weights_updated")] == [1, 2]
        (back,) = events_of(served, "engine.rejoined")
        assert back["version"] == 2
        processes = tree_of(served)
    none_left(processes)


@pytest.mark.variant
def test_a_server_over_ranks_follows_a_folder(folder, tmp_path) -> None:
    target = tmp_path / "followed"
    shutil.copytree(folder, target)
    newer = save_changed(folder, tmp_path / "newer", 1)
    options = "--follow", "--poll-s", "0.2"
    with serving(target, tmp_path / "log", *EXACT, *CUT, *options) as served:
        assert greedy(served) == (greedy_reference(folder, ASKED), "version-0")
        (newer / "model.safetensors").rename(target / "model.safetensors")
        until(lambda: events_of(served, "serve.weights_updated"))
        assert greedy(served) == (greedy_reference(target, ASKED), "version-1")


def ask_many(
    served: Served, *, then: Callable[[], Any] = lambda: None, at_once: int = 1
) -> list[str]:
    """Three streams, with a seed each; `then` is called while `at_once` of them have tokens, and
    more to come."""
    running: set[int] = set()

    def ask(seed: int) -> str:
        texts = []
        with asking(served) as client:
            for event in client.chat.completions.create(
                model="qwen", messages=ASKED, max_tokens=TOKENS, seed=seed, stream=True,
                extra_body={"ignore_eos": True},
            ):  # fmt: skip
                texts += [choice.delta.content or "" for choice in event.choices]
                if any(texts):
                    running.add(seed)
        running.discard(seed)
        return "".join(texts)

    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(ask, seed) for seed in range(3)]
        until(lambda: len(running) >= at_once, pause_s=0.002)
        then()
        return [one.result(timeout=LONGEST_S) for one in asked]


@pytest.mark.slow
def test_a_rank_that_dies_costs_no_token(folder, tmp_path) -> None:
    """The other replica goes on with the requests of its engine, whose ranks are all replaced."""
    with serving(folder, tmp_path / "log", "--replicas", "2", *SLOW, *CUT) as served:
        before = ranks_of(served)
        assert sorted(before) == ["engine-0", "engine-0.1", "engine-1", "engine-1.1"]
        undisturbed = ask_many(served)
        assert len(set(undisturbed)) == 3
        # two at once: one on each engine
        assert ask_many(served, then=before["engine-0.1"].kill, at_once=2) == undisturbed
        (lost,) = events_of(served, "engine.lost")
        assert lost["engine"] == "engine-0"
        assert events_of(served, "retry.request_requeued")
        until(lambda: events_of(served, "engine.rejoined"))
        assert ready(served).json() == {"ready": True, "reason": ""}
        after = ranks_of(served)
        assert all(after[name] != before[name] for name in ("engine-0", "engine-0.1"))
        assert all(after[name] == before[name] for name in ("engine-1", "engine-1.1"))
        none_left([before["engine-0"], before["engine-0.1"]])
        processes = tree_of(served)
    assert served.process.returncode == 0
    none_left(processes)


@pytest.mark.variant
def test_a_leader_that_is_killed_takes_its_ranks_along(folder, tmp_path) -> None:
    """Of the only engine: the streams wait for the new ranks, and go on as if nothing had been."""
    with serving(folder, tmp_path / "log", *SLOW, *CUT) as served:
        before = ranks_of(served)
        undisturbed = ask_many(served)
        assert ask_many(served, then=before["engine-0"].kill) == undisturbed
        none_left(list(before.values()))
        assert len(events_of(served, "engine.restarted")) == 1


@pytest.mark.slow
def test_a_rank_that_stands_still_ends_its_engine(folder, tmp_path) -> None:
    """For a moment it is only not ready. In mid-stream and for long it is lost, by its name; the
    stream goes on with new ranks."""
    with serving(folder, tmp_path / "log", *SLOW, *CUT) as served:
        before = ranks_of(served)
        still = before["engine-0.1"]
        still.send_signal(signal.SIGSTOP)  # idle
        assert ready(served).status_code == 503
        still.send_signal(signal.SIGCONT)
        until(lambda: ready(served).status_code == 200)
        undisturbed = ask_many(served)
        assert not events_of(served, "engine.lost")

        def stop() -> None:
            still.send_signal(signal.SIGSTOP)
            assert ready(served).status_code == 503

        assert ask_many(served, then=stop) == undisturbed
        (lost,) = events_of(served, "engine.lost")
        assert "rank 1" in lost["cause"]
        assert len(events_of(served, "engine.restarted")) == 1
        assert ready(served).status_code == 200
        none_left(list(before.values()))


@pytest.mark.slow
def test_no_rank_outlives_a_server_that_is_killed(folder, tmp_path) -> None:
    """Also not one that stands still."""
    with serving(folder, tmp_path / "log", *EXACT, *CUT) as served:
        processes = tree_of(served)
        ranks = ranks_of(served)
        assert len(ranks) == 2 and set(ranks.values()) <= set(processes)
        ranks["engine-0.1"].send_signal(signal.SIGSTOP)
        served.process.kill()
        served.process.wait(30)
        none_left(processes)
