"""Raw sockets against a real server: heads of any size, and clients that take their time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from api_cases import TOKENIZER, render
from gyre.server.app import make_app
from gyre.server.gateway.bounded_http import SLOW_READER, BoundedHttp, ConnectionLimits
from gyre.server.generation import ServedModel
from gyre.server.metrics.server_metrics import ServerMetrics, inspect_one

LIMITS = ConnectionLimits(receive_s=0.5, max_head_bytes=16 << 10, send_s=1.5, linger_s=20)
PATIENT = ConnectionLimits(max_head_bytes=16 << 10)  # for what must pass on a busy machine, too
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
GET = b"GET / HTTP/1.1\r\nHost: a\r\n"


class Told:
    """An application that answers with the headers and the size of the body that it got."""

    def __init__(self) -> None:
        self.disconnects = self.sent = 0
        self.codes: list[str] = []  # of what was refused or cut off

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            size_bytes += len(message["body"])
            more = message["more_body"]
        if scope["path"] == "/large":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for left in range(63, -1, -1):
                part = {"type": "http.response.body", "body": b"a" * (1 << 20)}
                await send(part | {"more_body": left > 0})
            self.sent += 1
            return
        if scope["path"] == "/slow":
            await asyncio.sleep(3 * LIMITS.receive_s)
        names = [name.decode() for name, _ in scope["headers"]]
        body = json.dumps({"path": scope["path"], "names": names, "size": size_bytes}).encode()
        length = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def running_server(limits: ConnectionLimits) -> Iterator[tuple[int, Told]]:
    """A server's port and application."""
    app = Told()
    with running(app, limits, count=app.codes.append) as port:
        yield port, app


@contextlib.contextmanager
def running(
    app: ASGIApp, limits: ConnectionLimits, *, count: Callable[[str], None]
) -> Iterator[int]:
    """The port of an application's server."""
    protocol: Any = partial(BoundedHttp, limits=limits, count=count)
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True
        )
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, Told]]:
    with running_server(LIMITS) as found:
        yield found


@pytest.fixture(scope="module")
def patient_link() -> Iterator[socket.socket]:
    with (
        running_server(PATIENT) as (port, _),
        socket.create_connection(("127.0.0.1", port), timeout=30) as made,
    ):
        yield made


@pytest.fixture
def link(server) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server[0]), timeout=30) as made:
        yield made


def assert_over(link: socket.socket) -> None:
    """The server closes, without another answer, when the client sends no more."""
    link.shutdown(socket.SHUT_WR)
    assert read_all(link) == b""


def read_all(link: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := link.recv(65536):
            data += part
    return data


def read_answer(link: socket.socket) -> tuple[int, dict[str, Any]]:
    """One answer; the connection stays."""
    head, body = b"", b""
    while not head.endswith(b"\r\n\r\n"):
        part = link.recv(1)
        assert part, head
        head += part
    (length,) = (
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += link.recv(length - len(body))
    return int(head.split()[1]), json.loads(body)


def send_all(link: socket.socket, data: bytes) -> None:
    """Send as much as the server takes."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        link.sendall(data)


LONG = {
    "a header": GET + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "a header without an end": GET + b"X: " + b"a" * (1 << 20),
    "a header's name": GET + b"a" * (1 << 20),
    "many headers": GET + b"X: a\r\n" * 10_000 + b"\r\n",
    "a target": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
    "a little too much, at once": GET + b"X: " + b"a" * (16 << 10) + b"\r\n\r\n",
    "trailers": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + b"X: a\r\n" * 10_000,
    "one trailer": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: "
    + b"a" * (1 << 20),
}


@pytest.mark.parametrize("case", LONG)
def test_a_head_that_is_too_long_is_answered_431(link, server, case) -> None:
    server[1].codes.clear()
    send_all(link, LONG[case])
    status, body = read_answer(link)
    assert (status, body["error"]["code"]) == (431, "headers_too_large")
    assert server[1].codes == ["headers_too_large"]
    assert_over(link)


def test_a_head_within_the_limit_and_a_long_body_pass(patient_link) -> None:
    link = patient_link
    body = b"a" * (4 << 20)
    long = b"X: " + b"a" * (15 << 10) + b"\r\n"
    for _ in range(2):
        send_all(link, HEAD + long + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        status, found = read_answer(link)
        assert status == 200 and found["size"] == len(body)


def test_chunks_of_one_byte_are_a_body(patient_link) -> None:
    link = patient_link
    send_all(link, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    send_all(link, b"1;extension=a\r\na\r\n" * 20_000 + b"0\r\nX-Late: a\r\n\r\n")
    status, found = read_answer(link)
    assert status == 200 and found["size"] == 20_000
    assert found["names"] == ["host", "transfer-encoding"]  # a trailer is no header


SLOW = {
    "in the head": (GET + b"X: ", b"a"),
    "in the target": (b"GET /", b"a"),
    "in the body": (HEAD + b"Content-Length: 1000000\r\n\r\n", b"a"),
    "in chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
}


@pytest.mark.parametrize("case", SLOW)
def test_a_client_that_sends_a_byte_now_and_then_is_answered_408(link, server, case) -> None:
    begin, more = SLOW[case]
    before = server[1].disconnects
    server[1].codes.clear()
    link.sendall(begin)
    answered = select.poll()  # not select: a handle may be past 1,023
    answered.register(link, select.POLLIN)
    for _ in range(600):
        if answered.poll(50):
            break
        send_all(link, more)
    status, found = read_answer(link)
    assert (status, found["error"]["code"]) == (408, "request_timeout")
    assert server[1].codes == ["request_timeout"]
    assert_over(link)
    if "Length" in begin.decode() or "chunked" in begin.decode():
        ends = time.monotonic() + 30
        while server[1].disconnects == before:  # the application waits for no body any more
            assert time.monotonic() < ends
            time.sleep(0.01)


def test_a_body_that_was_answered_408_is_no_client_that_hung_up() -> None:
    model = ServedModel(
        name="m",
        tokenizer=TOKENIZER,
        context_tokens=64,
        render=render,
        find_refusal=lambda request: None,
    )
    engine: Any = None  # no request comes so far
    metrics = ServerMetrics("m", context_tokens=64, inspect=inspect_one(engine))
    app = make_app(engine, model, emit=lambda kind, **fields: None, metrics=metrics)

    def told(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model_name": "m", **labels})

    with (
        running(app, LIMITS, count=metrics.count_error) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as link,
    ):
        link.sendall(b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        assert read_answer(link)[0] == 408
        ends = time.monotonic() + 30
        answer = {"route": "/tokenize", "status": "408"}
        while told("gyre_http_responses_total", **answer) != 1:
            assert time.monotonic() < ends
            time.sleep(0.01)
    assert told("gyre_request_errors_total", code="request_timeout") == 1
    assert told("gyre_disconnects_total") == 0


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_that_asks_nothing_is_closed(link, server, sent) -> None:
    server[1].codes.clear()
    link.sendall(sent)
    assert read_all(link) == b""
    assert server[1].codes == (["request_timeout"] if sent else [])


def test_after_an_answer_the_time_of_the_next_request_begins_with_it(link) -> None:
    for _ in range(2):
        link.sendall(GET + b"\r\n")
        assert read_answer(link)[0] == 200
        time.sleep(1.5 * LIMITS.receive_s)


def test_after_an_answer_line_ends_alone_hold_no_connection(link) -> None:
    link.sendall(GET + b"\r\n")
    assert read_answer(link)[0] == 200
    link.sendall(b"\r\n")
    assert read_all(link) == b""


@pytest.mark.parametrize(
    "begun", [b"GET /next HT", HEAD.replace(b"/", b"/next", 1) + b"Content-Length: 2\r\n\r\na"]
)
def test_a_request_that_waits_for_the_one_before_it_does_not_end_that_one(link, begun) -> None:
    link.sendall(GET.replace(b"/", b"/slow", 1) + b"\r\n" + begun)
    status, found = read_answer(link)
    assert status == 200 and found["path"] == "/slow"
    assert read_answer(link)[0] == 408
    assert_over(link)


def test_a_client_that_reads_nothing_holds_no_answer(link, server) -> None:
    before = server[1].sent
    server[1].codes.clear()
    link.sendall(GET.replace(b"/", b"/large", 1) + b"\r\n")
    ends = time.monotonic() + 30
    while server[1].sent == before:
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert len(read_all(link)) < 64 << 20
    assert server[1].codes == [SLOW_READER]


def test_a_client_that_reads_slowly_gets_the_whole_answer(link) -> None:
    link.sendall(GET.replace(b"/", b"/large", 1) + b"Connection: close\r\n\r\n")
    size_bytes, pauses = 0, 0
    while part := link.recv(1 << 20):
        size_bytes += len(part)
        if size_bytes > (pauses + 1) << 23:
            pauses += 1
            time.sleep(0.25)
    assert size_bytes > 64 << 20 and pauses == 8


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"no HTTP\r\n"])
def test_what_is_no_http_is_refused(link, sent) -> None:
    link.sendall(sent)
    link.shutdown(socket.SHUT_WR)
    assert b"200 OK" not in read_all(link)


def test_a_request_to_upgrade_is_answered_by_http(link) -> None:
    link.sendall(GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
    assert read_answer(link)[0] == 200


def test_a_client_that_is_gone_leaves_nothing_behind(server) -> None:
    for sent in (b"", b"GET", HEAD + b"Content-Length: 9\r\n\r\na"):
        with socket.create_connection(("127.0.0.1", server[0]), timeout=30) as link:
            link.sendall(sent)
    with socket.create_connection(("127.0.0.1", server[0]), timeout=30) as link:
        link.sendall(GET + b"\r\n")
        assert read_answer(link)[0] == 200


POST = b"POST / HTTP/1.1\r\n"
CHUNKED = b"5\r\nhello\r\n0\r\n\r\n"
HEAD_FAULTS = {
    "no host": (POST + b"Content-Length: 0\r\n\r\n", "need a Host header"),
    **{
        f"host {value!r}": (
            POST + b"Host:" + value + b"\r\nContent-Length: 0\r\n\r\n",
            "need one Host",
        )
        for value in (
            b" a b",
            b" a/../b",
            b" u@b",
            b" \xc3\xbc",
            b" [::1",
            b" a:b",
            b" a\r\nHost: a",
        )
    },
    **{
        f"encoding {value!r}": (HEAD + b"Transfer-Encoding:" + value + b"\r\n\r\n" + CHUNKED, said)
        for value, said in {
            b" gzip, chunked": "only chunked",
            b" chunked, chunked": "",
            b" xchunked": "",
            b" identity": "",
            b" chunked\r\nTransfer-Encoding: identity": "",
            b" chunked\r\nTransfer-Encoding: chunked": "",
            b" chunked\r\nContent-Length: 5": "",
            b"\x0bchunked": "",
        }.items()
    },
    **{
        f"length {value!r}": (HEAD + b"Content-Length:" + value + b"\r\n\r\nhello", "no HTTP/1.1")
        for value in (
            b" 5\r\nContent-Length: 5",
            b" 5\r\nContent-Length: 6",
            b" 5, 5",
            b" -5",
            b" +5",
            b" 0x5",
            b"",
            b" " + b"9" * 30,
            b" 5\r\nTransfer-Encoding: chunked",
        )
    },
    **{
        f"line {value!r}": (HEAD + value + b"\r\nContent-Length: 0\r\n\r\n", "no HTTP/1.1")
        for value in (
            b"X: a\rY: b",
            b"X: a\nY: b",
            b"X: a\r\n b",
            b"X y: a",
            b"X",
            b": a",
            b"X: a\x00",
            b"X\x00: a",
            b"Transfer-Encoding : chunked",
        )
    },
    "chunk -5": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n", "no HTTP/1.1"),
    "chunk 0x5": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n", "no HTTP/1.1"),
    "huge chunk": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\n",
        "no HTTP/1.1",
    ),
}


@pytest.mark.parametrize("name", HEAD_FAULTS)
def test_what_two_servers_could_read_differently_is_no_request(server, name) -> None:
    """One answer, status 400, and the connection ends: nothing behind it is read as a request."""
    sent, said = HEAD_FAULTS[name]
    with socket.create_connection(("127.0.0.1", server[0]), timeout=30) as link:
        link.sendall(sent + GET + b"\r\n")
        link.shutdown(socket.SHUT_WR)
        answer = b""
        while part := link.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1 and head.startswith(b"HTTP/1.1 400")
    assert said in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "host", [b"", b" ", b" a", b" a.b:8000", b" [::1]:80", b" 127.0.0.1", b" " + b"a" * 10_000]
)
def test_a_host_may_be_any_name_or_address(server, host) -> None:
    with socket.create_connection(("127.0.0.1", server[0]), timeout=30) as link:
        link.sendall(b"GET / HTTP/1.1\r\nHost:" + host + b"\r\n\r\n")
        assert link.recv(100).startswith(b"HTTP/1.1 200")


def test_more_headers_than_anybody_needs(server) -> None:
    few, many = b"a: b\r\n" * 1000, b"a: b\r\n" * 20_000
    for lines, status in ((few, b"200"), (many, b"431")):
        with socket.create_connection(("127.0.0.1", server[0]), timeout=30) as link:
            link.sendall(GET + lines + b"\r\n")
            assert link.recv(100).startswith(b"HTTP/1.1 " + status)
