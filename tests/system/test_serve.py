"""gyre serve: the openai client, curl and raw sockets against engines in processes of their own."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest
import torch
from system_models import save_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from scraped import Samples, counts_changed, read_samples
from served import NO_RESTARTS, Served, serving

TOOLS = [{"type": "function", "function": {"name": "count"}}]
ASKED = [{"role": "user", "content": "How many apples are left?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "qwen", "qwen3")


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory) -> Path:
    """A model that takes thousands of tokens."""
    folder = tmp_path_factory.mktemp("long") / "qwen"
    return save_checkpoint(folder, "qwen3", context_tokens=4096)


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "stderr"
    with serving(folder, log, "--replicas", "2", "--set", "run.threads=1") as found:
        yield found


@pytest.fixture
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_model_is_listed(client, served) -> None:
    (model,) = client.models.list().data
    assert model.id == served.model == "qwen"
    assert model.model_dump()["max_model_len"] == 256 and model.model_dump()["version"] == 0


def test_a_greedy_answer_is_that_of_transformers(client, folder) -> None:
    answer = client.chat.completions.create(
        model="qwen", messages=ASKED, temperature=0, max_tokens=24
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    whole = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    length = prompt["input_ids"].shape[1]
    expected = tokenizer.decode(whole[0, length:], skip_special_tokens=True)
    assert answer.choices[0].message.content == expected
    assert answer.usage.prompt_tokens == length
    assert answer.usage.completion_tokens == whole.shape[1] - length
    assert answer.system_fingerprint == "version-0"


@pytest.mark.parametrize("stop", [None, ["s", "ab"]])
def test_a_stream_says_what_the_whole_answer_says(client, stop) -> None:
    asked: dict[str, Any] = {
        "model": "qwen",
        "messages": ASKED,
        "temperature": 0.9,
        "seed": 11,
        "n": 2,
        "max_tokens": 40,
        "logprobs": True,
        "top_logprobs": 2,
        "stop": stop,
    }
    whole = client.chat.completions.create(**asked)
    texts, logprobs, finishes = {0: "", 1: ""}, {0: [], 1: []}, {}
    usage = None
    for event in client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            finishes[choice.index] = choice.finish_reason
    counted = {"prompt_tokens_details"}  # the stream's prompt was computed before
    assert usage.model_dump(exclude=counted) == whole.usage.model_dump(exclude=counted)
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert finishes[choice.index] == choice.finish_reason
        assert logprobs[choice.index] == choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
        if stop:
            assert not any(text in choice.message.content for text in stop)
    assert sum(len(found) for found in logprobs.values()) == usage.completion_tokens


def test_the_usage_tells_what_of_the_prompt_was_cached(client) -> None:
    prompts = [[200 + index % 50 for index in range(40)], [7 + index for index in range(21)]]

    def cached() -> int:
        answer = client.completions.create(
            model="qwen", prompt=prompts, n=2, max_tokens=3, temperature=0
        )
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(), cached()] == [0, 32 + 16]  # whole pages of 16, once for siblings


def test_a_text_completion_with_ids_echo_and_bias(client) -> None:
    text = client.completions.create(
        model="qwen", prompt="Weng earns", max_tokens=3, logit_bias={"65": 100}, echo=True, seed=1
    )
    tokens = httpx.post(
        f"{client.base_url}".replace("/v1/", "/tokenize"), json={"prompt": "Weng earns"}
    ).json()["tokens"]
    ids = client.completions.create(
        model="qwen", prompt=tokens, max_tokens=3, logit_bias={"65": 100}, echo=True, seed=1
    )
    assert text.choices[0].text == ids.choices[0].text
    assert text.choices[0].text.startswith("Weng earns")
    back = httpx.post(
        f"{client.base_url}".replace("/v1/", "/detokenize"), json={"tokens": tokens}
    ).json()["prompt"]
    assert back == "Weng earns"


@pytest.mark.parametrize(
    ("changed", "status", "code", "param"),
    [
        ({"model": "gpt"}, 404, "model_not_found", "model"),
        ({"max_tokens": 4000}, 400, "context_length_exceeded", "max_tokens"),
        ({"temperature": -1}, 400, "invalid_value", None),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({"n": 0}, 400, "invalid_value", None),
        ({"top_logprobs": 3}, 400, "invalid_value", "top_logprobs"),
        ({"logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"response_format": {"type": "json_object"}}, 400, "invalid_value", "response_format"),
        ({"tools": []}, 400, "invalid_value", "tools"),
        ({"tools": TOOLS}, 400, "invalid_value", "tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
        ({"tempreature": 1}, 400, "invalid_value", "tempreature"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_the_shape_of_the_api(served, changed, status, code, param, stream) -> None:
    body = {"model": "qwen", "messages": ASKED, "max_tokens": 4, "stream": stream} | changed
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[1]", 400),
        (b'{"a":' * 100_000, 400),
        (b"\xff\xfe", 400),
        (b'{"model":"' + b"a" * (9 << 20) + b'"}', 413),
    ],
)
def test_a_body_that_is_no_request_is_refused(served, body, status) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", content=body, timeout=30)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_curl_prints_a_stream(served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"model": "qwen", "messages": ASKED, "max_tokens": 5, "stream": True})
    out = subprocess.run(
        ["curl", "-sN", f"{served.url}/v1/chat/completions", "-d", body],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    events = [line.removeprefix("data: ") for line in out.splitlines() if line]
    assert events[-1] == "[DONE]" and len(events) >= 3
    assert json.loads(events[0])["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_the_engine(served, stream) -> None:
    """The engine would choose 200 tokens for each of 8 completions; nobody waits for them."""
    place = urlsplit(served.url)
    body = json.dumps(
        {
            "model": "qwen",
            "messages": ASKED,
            "max_tokens": 200,
            "n": 8,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(20):
        with socket.create_connection((place.hostname, place.port), timeout=30) as link:
            link.sendall(head.encode() + body)
            if stream:
                assert b"200 OK" in link.recv(100)
    ends = time.monotonic() + 30
    idle = 0
    while idle < 3:  # the last request may not have reached the engine yet
        found = httpx.get(f"{served.url}/health/load", timeout=30).json()
        assert found.keys() == {"running", "waiting"}
        idle = 0 if any(found.values()) else idle + 1
        assert time.monotonic() < ends, found
        time.sleep(0.1)


def test_many_at_once_are_all_answered(client) -> None:
    def ask(number: int) -> str:
        answer = client.completions.create(
            model="qwen", prompt="How many", max_tokens=12, seed=number % 4, temperature=1.0
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(ask, range(48)))
    for number in range(4):  # draws depend on the seed alone, whatever runs beside
        assert len(set(texts[number::4])) == 1
    assert len(set(texts)) == 4


def test_requests_of_one_prefix_share_an_engine_and_its_cache(client, served) -> None:
    """The router believes cached what the engines find in their caches, answers included."""
    before = scrape(served)
    for turn in range(3):
        for name in range(4):
            prompt = [10 + (37 * name + at * at) % 200 for at in range(100)]
            client.completions.create(
                model="qwen",
                prompt=[*prompt, 20 + turn],
                max_tokens=4,
                extra_body={"ignore_eos": True, "prompt_cache_key": f"session {name}"},
            )
    changed = counts_changed(before, scrape(served))
    asked, hits, believed, kept = (
        [changed.get((f"{metric}_total", f"engine={place}"), 0) for place in range(2)]
        for metric in (
            "gyre_engine_routed_requests",
            "vllm:prefix_cache_hits",
            "gyre_engine_believed_hit_tokens",
            "gyre_engine_sessions_kept",
        )
    )
    assert sum(asked) == 12
    assert believed == hits and sum(hits) == 8 * 96  # six whole pages of 16 tokens
    assert sum(kept) == 8


def scrape(served: Served) -> Samples:
    return read_samples(httpx.get(f"{served.url}/metrics", timeout=30).text)


# One completion at a time, so that work is left whenever an engine is killed.
SLOW = "--set", "run.threads=1", "--set", "engine.max_running=1"
HANG_S = 4.0  # after which an engine is lost
SLACK_S = 8.0  # of a machine that does other work


def ask_many(client: openai.OpenAI, *, then: Callable[[], Any] = lambda: None) -> list[str]:
    """Eight streams at once, with a seed each; `then` is called at the first event of any."""
    came = threading.Event()

    def ask(seed: int) -> str:
        texts = []
        for event in client.chat.completions.create(
            model="qwen",
            messages=ASKED,
            max_tokens=200,
            seed=seed,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            texts.append(text_of(event))
            came.set()
        return "".join(texts)

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, seed) for seed in range(8)]
        assert came.wait(60)
        then()
        return [one.result(timeout=120) for one in asked]


@pytest.mark.slow
def test_a_replica_that_dies_costs_no_token(folder, tmp_path) -> None:
    """The other replica goes on with its requests: nothing is repeated, lost or changed. The server
    ends well afterwards, with all its processes."""
    with (
        serving(folder, tmp_path / "log", "--replicas", "2", *SLOW) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        tree = psutil.Process(served.process.pid).children(recursive=True)
        engines = engines_of(served)
        assert len(engines) == 2
        undisturbed = ask_many(client)
        assert len(set(undisturbed)) == 8
        assert ask_many(client, then=engines[0].kill) == undisturbed
        assert httpx.get(f"{served.url}/health/ready", timeout=30).status_code == 200
        assert '"retry.request_requeued"' in served.log.read_text()
    assert served.process.returncode == 0
    ends = time.monotonic() + 30  # those of the killed engine notice by themselves that it is gone
    while left := [one for one in tree if is_alive(one)]:
        assert time.monotonic() < ends, left
        time.sleep(0.1)


@pytest.mark.slow
def test_the_streams_of_a_replica_that_hangs_go_on_in_the_other(folder, tmp_path) -> None:
    """No engine is started again, so the other one alone ends them."""
    options = "--replicas", "2", *SLOW, "--set", f"cluster.hang_s={HANG_S:g}"
    with (
        serving(folder, tmp_path / "log", *options, first=NO_RESTARTS) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        hung, _ = engines_of(served)
        undisturbed = ask_many(client)
        assert len(set(undisturbed)) == 8
        assert ask_many(client, then=lambda: hung.send_signal(signal.SIGSTOP)) == undisturbed
        rows = [json.loads(line) for line in served.log.read_text().splitlines()]
        (lost,) = [row for row in rows if row["kind"] == "engine.lost"]
        assert lost["place"].split()[-1] == str(hung.pid) and lost["requests"] >= 1
        moved = [row["engine"] for row in rows if row["kind"] == "retry.request_requeued"]
        assert moved == [lost["engine"]] * lost["requests"]
        assert not [row for row in rows if row["kind"] in ("engine.restarted", "engine.rejoined")]
    assert served.process.returncode == 0


@pytest.mark.slow
def test_the_last_engine_is_started_again_within_an_answer(folder, tmp_path) -> None:
    """The streams wait for the new process, and go on as if nothing had been."""
    with (
        serving(folder, tmp_path / "log", *SLOW) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        (engine,) = engines_of(served)
        undisturbed = ask_many(client)
        assert ask_many(client, then=engine.kill) == undisturbed
        log = served.log.read_text()
        assert '"retry.request_requeued"' in log
        assert log.count('"engine.restarted"') == 1 and log.count('"engine.rejoined"') == 1
        health = httpx.get(f"{served.url}/health/ready", timeout=30)
        assert health.status_code == 200 and health.json()["reason"] == ""
        (again,) = engines_of(served)
        assert again.pid != engine.pid
    assert served.process.returncode == 0


@pytest.mark.slow
def test_answers_under_way_end_after_a_signal_to_stop(folder, tmp_path) -> None:
    with (
        serving(folder, tmp_path / "log", "--set", "run.threads=1") as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(
            model="qwen",
            messages=ASKED,
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        served.process.send_signal(signal.SIGTERM)
        finish = [event.choices[0].finish_reason for event in stream][-1]
        assert finish == "length"
        assert served.process.wait(30) == 0


@contextlib.contextmanager
def long_stream(served: Served, max_tokens: int) -> Iterator[Iterator[str]]:
    """The events of a stream of eight completions, after its first."""
    body = {
        "model": "qwen",
        "messages": ASKED,
        "max_tokens": max_tokens,
        "n": 8,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{served.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        events = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(events)
        yield events


def check_broken_off(events: Iterator[str]) -> None:
    """The stream ends with an error event, and without [DONE]."""
    *others, last = events
    assert json.loads(last)["error"]["code"] == "engine_unavailable"
    assert "[DONE]" not in others and not any('"error"' in event for event in others)


@pytest.mark.slow
def test_a_second_signal_ends_answers_under_way(long_folder, tmp_path) -> None:
    with serving(long_folder, tmp_path / "log", *SLOW, "--drain-s", "600") as served:
        with long_stream(served, 3000) as events:
            served.process.send_signal(signal.SIGTERM)
            until_closed(served)
            assert served.process.poll() is None, "it lets the answer go on"
            served.process.send_signal(signal.SIGTERM)
            check_broken_off(events)
        assert served.process.wait(30) == 0


@pytest.mark.slow
def test_an_answer_that_outlasts_the_time_to_drain_is_broken_off(long_folder, tmp_path) -> None:
    with serving(long_folder, tmp_path / "log", *SLOW, "--drain-s", "2") as served:
        with long_stream(served, 3000) as events:
            served.process.send_signal(signal.SIGTERM)
            began_s = time.monotonic()
            check_broken_off(events)
            assert 1.9 < time.monotonic() - began_s < 2 + SLACK_S
        assert served.process.wait(SLACK_S) == 0


@pytest.mark.slow
def test_a_stream_ends_with_an_error_once_no_engine_is_left(folder, tmp_path) -> None:
    with serving(folder, tmp_path / "log", *SLOW, first=NO_RESTARTS) as served:
        (engine,) = engines_of(served)
        with long_stream(served, 200) as events:
            engine.kill()
            check_broken_off(events)
        log = served.log.read_text()
        assert '"engine.restarts_exhausted"' in log and '"engine.restarted"' not in log
        asked = {"model": "qwen", "prompt": "How many", "stream": True}
        answer = httpx.post(f"{served.url}/v1/completions", json=asked, timeout=30)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "engine_unavailable"
    assert served.process.returncode == 0


def until_closed(served: Served) -> None:
    """Wait until it takes no more connections."""
    ends_s = time.monotonic() + 30
    with contextlib.suppress(httpx.ConnectError):
        while time.monotonic() < ends_s:
            httpx.get(f"{served.url}/health/live", timeout=5)
        raise AssertionError("it still takes connections")


def engines_of(served: Served) -> list[psutil.Process]:
    """The worker processes that are there."""
    tree = psutil.Process(served.process.pid).children(recursive=True)
    return [one for one in tree if "gyre.cluster.worker.process" in one.cmdline()]


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: not one that has ended and waits for its parent."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def text_of(event: Any) -> str:
    return "".join(choice.delta.content or "" for choice in event.choices)


def test_the_server_process_has_no_torch(served) -> None:
    """Its engines have; so the look at a process's mapped files finds torch where it is."""

    def maps_torch(process: psutil.Process) -> bool:
        return any("libtorch" in mapped.path for mapped in process.memory_maps())

    assert not maps_torch(psutil.Process(served.process.pid))
    assert all(maps_torch(engine) for engine in engines_of(served))


def test_it_listens_on_loopback_alone(served) -> None:
    server = psutil.Process(served.process.pid)
    heard = {
        place.laddr.ip
        for process in [server, *server.children(recursive=True)]
        for place in process.net_connections("inet")
        if place.status == "LISTEN"
    }
    assert heard == {"127.0.0.1"}


@pytest.mark.slow
def test_an_address_that_others_reach_is_refused(folder, tmp_path) -> None:
    said = r"(?s)--host 0\.0\.0\.0.*--insecure"
    with (
        pytest.raises(AssertionError, match=said),
        serving(folder, tmp_path / "log", "--host", "0.0.0.0"),
    ):
        pass
