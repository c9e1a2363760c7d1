"""gyre serve with keys: the openai client, keys that come and go, limits, https, raw sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from system_models import save_checkpoint

from certificates import make_certificate
from gyre.server.gateway.keys import create_key, revoke_key
from gyre.server.gateway.limits import KeyLimits
from scraped import counts_changed
from served import Served, serving
from served_account import look_when_idle

pytestmark = pytest.mark.slow

ASKED = [{"role": "user", "content": "How many apples are left?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "qwen", "qwen3")


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    make_key(path, name="first")
    return path


@pytest.fixture(scope="module")
def served(folder, keys, tmp_path_factory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "stderr"
    options = ["--set", "run.threads=1", "--keys", str(keys), "--receive-s", "2"]
    with serving(folder, log, *options) as found:
        yield found


def make_key(path: Path, *, name: str = "", **limits: int) -> tuple[str, str]:
    """The id and the secret of a new key."""
    key, secret = create_key(path, name=name, role="user", limits=KeyLimits(**limits))
    return key.key_id, secret


def connect(served: Served, secret: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=secret, max_retries=0)


def until_known(client: openai.OpenAI) -> None:
    """Wait until the running server has looked at the file."""
    ends = time.monotonic() + 30
    while True:
        try:
            client.models.list()
            return
        except openai.AuthenticationError:
            assert time.monotonic() < ends
            time.sleep(0.1)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    asked: dict[str, Any] = {"model": "qwen", "prompt": "How many", "seed": 1} | fields
    return client.completions.create(**asked, extra_body={"ignore_eos": True})


def test_keys_come_and_go_without_a_restart(served, keys) -> None:
    """And no secret is in the server's log, whatever it was sent with."""
    key_id, secret = make_key(keys)
    with connect(served, secret) as client:
        until_known(client)
        answer = client.chat.completions.create(model="qwen", messages=ASKED, max_tokens=4)
        assert answer.usage.completion_tokens <= 4
        events = client.chat.completions.create(
            model="qwen", messages=ASKED, max_tokens=4, stream=True
        )
        assert list(events)
        revoke_key(keys, key_id)
        ends = time.monotonic() + 30
        with pytest.raises(openai.AuthenticationError) as caught:
            while time.monotonic() < ends:
                client.models.list()
                time.sleep(0.1)
    assert caught.value.code == "invalid_api_key"
    with connect(served, "gyre-nobody") as client, pytest.raises(openai.AuthenticationError) as no:
        client.models.list()
    assert no.value.message == caught.value.message
    for headers in ({}, {"authorization": "Bearer"}, {"authorization": f"Basic {secret}"}):
        answer = httpx.get(f"{served.url}/v1/models", headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    for path in ("/health", "/health/live", "/health/ready", "/health/load"):
        assert httpx.get(f"{served.url}{path}", timeout=30).status_code == 200
    log = served.log.read_text()
    assert '"serve.keys_loaded"' in log and secret.removeprefix("gyre-") not in log


def test_tokens_are_admitted_as_far_as_they_fit_and_given_back(served, keys) -> None:
    """Each of 50 requests at once may cost 92 tokens: 5 fit, the others are told when to come
    again. What ends early pays for what it used."""
    prompt, limit = list(range(2, 12)), 500
    _, secret = make_key(keys, tokens_per_minute=limit)
    with connect(served, secret) as client:
        until_known(client)

        def one(number: int) -> int:
            try:
                ask(client, prompt=prompt, max_tokens=82, stream=False)
            except openai.RateLimitError as error:
                assert error.code == "rate_limit_exceeded"
                assert int(error.response.headers["retry-after"]) >= 1
                return 0
            return 1

        with ThreadPoolExecutor(50) as threads:
            begun = time.monotonic()
            admitted = sum(threads.map(one, range(50)))
            minutes = (time.monotonic() - begun) / 60
        assert 5 <= admitted <= limit * (1 + minutes) / 92
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, prompt=prompt, max_tokens=200, n=3)
        assert caught.value.code == "request_too_large"


def test_a_client_that_hangs_up_pays_for_what_it_cost_and_no_more(served, keys) -> None:
    """One request at a time may run, so the next is admitted when the server has ended the last."""
    limit, read = 6000, 20
    _, secret = make_key(keys, tokens_per_minute=limit, concurrent_requests=1)
    with connect(served, secret) as client:
        until_known(client)
        begun = time.monotonic()
        for stream in (True, False) * 3:
            if stream:
                with ask(client, max_tokens=200, stream=True) as events:
                    for _ in zip(range(read), events, strict=False):
                        pass
            else:
                with pytest.raises(openai.APITimeoutError):
                    ask(client.with_options(timeout=0.02), max_tokens=200, n=4)
            while True:
                try:
                    raw = client.completions.with_raw_response.create(
                        model="qwen", prompt="How", max_tokens=1
                    )
                    break
                except openai.RateLimitError:
                    assert time.monotonic() < begun + 60
        refilled = limit * (time.monotonic() - begun) / 60
    left = int(raw.headers["x-ratelimit-remaining-tokens"])
    assert limit - 3 * 1100 <= left <= min(limit, limit - 3 * read + refilled)
    assert raw.headers["x-ratelimit-limit-tokens"] == str(limit)
    assert '"serve.usage_incomplete"' not in served.log.read_text()  # the engine told in time


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_ends_its_writing_side_has_hung_up(served, keys, stream, begun) -> None:
    """The connection ends with no more of an answer, although the client would read it. Nothing of
    the request is left: no completion, no page, none of its key's limits. It is counted."""
    limit, most, number = 10**6, 200, 48  # long enough to be seen at work
    _, secret = make_key(keys, tokens_per_minute=limit, concurrent_requests=1)
    with connect(served, secret) as client:
        until_known(client)
        ask(client, max_tokens=1)
        before = look_when_idle(served, secret).samples
        asked = {"stream": stream, "n": number, "max_tokens": most}
        with half_closed(served, secret, asked, begun=begun) as link:
            said = read_all(link)
        after = look_when_idle(served, secret).samples
        raw = client.completions.with_raw_response.create(model="qwen", prompt="a", max_tokens=1)
    assert b"[DONE]" not in said and (said == b"" or (stream and begun))
    changed = counts_changed(before, after)
    assert changed[("gyre_disconnects_total",)] == 1
    status = "200" if said else "499"
    told = ("gyre_http_responses_total", "route=/v1/completions", f"status={status}")
    assert changed[told] == 1
    ended = {key[1]: n for key, n in changed.items() if key[0] == "vllm:request_success_total"}
    aborted = {"finished_reason=abort": number}
    assert ended == aborted if begun else ended in ({}, aborted)
    used = limit - int(raw.headers["x-ratelimit-remaining-tokens"])
    assert used < number * most, "what the engine did not compute was not given back"


@contextlib.contextmanager
def half_closed(
    served: Served, secret: str, asked: dict[str, Any], *, begun: bool
) -> Iterator[socket.socket]:
    """A connection whose client has asked, and says that it sends no more: at once, or once the
    engine is at work."""
    body = json.dumps(asked | {"model": "qwen", "prompt": "How many", "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {secret}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    place = urlsplit(served.url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as link:
        link.sendall(head.encode() + body)
        if begun:
            until_running(served)
        link.shutdown(socket.SHUT_WR)
        yield link


def until_running(served: Served) -> None:
    ends = time.monotonic() + 30
    with httpx.Client(timeout=30) as client:  # one: to make another takes longer than an answer
        while not client.get(f"{served.url}/health/load").json()["running"]:
            assert time.monotonic() < ends
            time.sleep(0.005)


def read_all(link: socket.socket) -> bytes:
    data = b""
    while part := link.recv(65536):
        data += part
    return data


@pytest.mark.parametrize("sent", [b"", b"GET /health/live HTTP/1.1\r\nX: "])
def test_a_connection_that_sends_no_request_is_closed(served, sent) -> None:
    place = urlsplit(served.url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as link:
        link.sendall(sent)
        said = read_all(link)
    assert said.startswith(b"HTTP/1.1 408") if sent else said == b""


def test_a_head_of_a_mebibyte_is_refused(served) -> None:
    answer = httpx.get(f"{served.url}/health/live", headers={"x-long": "a" * (60 << 10)})
    assert answer.status_code == 200
    place = urlsplit(served.url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as link:
        link.sendall(b"GET /health/live HTTP/1.1\r\nX: " + b"a" * (1 << 17))
        link.shutdown(socket.SHUT_WR)
        said = read_all(link)
    assert said.startswith(b"HTTP/1.1 431")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_too_large"


def test_https_with_a_certificate_of_ones_own(folder, tmp_path) -> None:
    cert, key = make_certificate(tmp_path / "tls")
    options = ["--set", "run.threads=1", "--tls-cert", str(cert), "--tls-key", str(key)]
    with serving(folder, tmp_path / "log", *options) as served:
        assert served.url.startswith("https://127.0.0.1:")
        trusted = httpx.Client(verify=ssl.create_default_context(cafile=str(cert)))
        with trusted, openai.OpenAI(
            base_url=f"{served.url}/v1", api_key="none", max_retries=0, http_client=trusted
        ) as client:  # fmt: skip
            assert ask(client, max_tokens=3).usage.completion_tokens == 3
            events = list(ask(client, max_tokens=3, stream=True))
            assert events[-1].choices[0].finish_reason == "length"
        with pytest.raises(httpx.TransportError):
            httpx.get(served.url.replace("https", "http"), timeout=30)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--keys", "nothing.json"], "gyre keys create --file nothing.json"),
        (["--tls-cert", "nothing.pem"], "--tls-cert is given alone"),
    ],
)
def test_what_cannot_serve_is_said_before_an_engine_starts(folder, tmp_path, options, said) -> None:
    argv = [sys.executable, "-c", "from gyre.cli.main import main; main()", "serve", str(folder)]
    done = subprocess.run(
        [*argv, "--port", "0", *options], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and said in done.stderr and not done.stdout
