"""Bounded HTTP: uvicorn's httptools protocol, with limits on how a request arrives and its answer
leaves, and a check of the headers that others may read differently. In: bytes of a client. Out:
requests to the application; 400, 408 or 431, or a closed connection, for the others, each counted
by a code.

httptools bounds neither the size of headers nor the time that a client takes to send them: it would
keep a header of any length, and a connection that sends one byte now and then, for ever.

    first byte ─▶ head: at most max_head_bytes ─▶ body: the routes bound its size ─▶ answer
        └──────────── at most receive_s for all of it ───────────────┘   read within send_s ┘
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gyre.server.bodies.schema import ApiError
from gyre.server.metrics.measured import REFUSED_STATUS

LINE_BYTES = 4  # ": " and the line end of a header
# RFC 3986: a registered name, an IPv4 address or an IPv6 address in brackets; a port; or nothing
HOST = re.compile(rb"([A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(:[0-9]*)?")
SLOW_READER = "slow_reader"  # code of a client that does not read its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """How a request may arrive, and its answer leave."""

    receive_s: float = 30.0  # from its first byte to its last; the first one from the connection on
    max_head_bytes: int = 64 << 10  # of its target and headers
    send_s: float = 60.0  # in which a client must read what has gathered for it, 64 KiB or more
    # how long a refused client may go on sending: to close at once would cost it the answer
    linger_s: float = 1.0


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        count: Callable[[str], None],
    ) -> None:
        """`count` gets the code of each request that is refused or cut off here."""
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._count = count
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._in_head = self._in_message = self._is_refused = False
        self._head_bytes = 0  # parsed, of this request
        self._hosts = 0  # Host headers of this request
        self._head_fault = ""  # why its headers are refused
        self._bytes_between = 0  # received since the last part of a body: head, frame, trailer
        self._open_cycles: list[Any] = []  # requests whose answers are not complete

    # -- from the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_send_timer()
        # uvicorn tells the newest request alone; one before it would be answered to nobody, and
        # uvloop lets nobody write to a closed transport
        for cycle in self._open_cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._start_timer()
        self._bytes_between += len(data)
        super().data_received(data)
        # what the parser holds of a header that has not ended is in no callback
        if self._bytes_between > self._limits.max_head_bytes:
            self._refuse(self._head_error())

    def pause_writing(self) -> None:
        """Begin the time in which the client must read. The abort ends the request like a client
        that hangs up."""
        super().pause_writing()
        self._stop_send_timer()
        self._send_timer = self.loop.call_later(self._limits.send_s, self._cut_off)

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    # -- from the parser

    def on_message_begin(self) -> None:
        self._in_message = self._in_head = True
        self._head_bytes = self._hosts = 0
        self._start_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._add_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._add_head_bytes(len(name) + len(value) + LINE_BYTES)
        if self._in_head:  # trailers count, and are dropped: they came after the key was checked
            self._check_header(name.lower(), value)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        parser: Any = self.parser
        if not self._hosts and parser.get_http_version() == "1.1":
            self._fail_head("need a Host header")
        super().on_headers_complete()
        self._in_head = False
        waiting = [cycle for cycle in self._open_cycles if not cycle.response_complete]
        self._open_cycles = [*waiting, self.cycle]

    def on_body(self, body: bytes) -> None:
        self._bytes_between = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._bytes_between = 0
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that the parser refuses, or that `_add_head_bytes` does."""
        is_long = self._head_bytes > self._limits.max_head_bytes
        fault = self._head_fault or "the bytes are no HTTP/1.1"
        self._refuse(self._head_error() if is_long else ApiError(400, fault))

    def on_response_complete(self) -> None:
        """Begin the time of a request that waited for this answer."""
        if self._timer is not None:
            self._stop_timer()
            self._start_timer()
        super().on_response_complete()

    # -- limits

    def _check_header(self, name: bytes, value: bytes) -> None:
        """Refuse what a proxy before this server may have read in another way. The parser has
        refused most of it: two lengths, a length beside chunks, line ends that are none."""
        if name == b"host":
            self._hosts += 1
            if self._hosts > 1 or HOST.fullmatch(value) is None:
                self._fail_head("need one Host header, with a name or an address")
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self._fail_head("Transfer-Encoding: only chunked is understood")

    def _fail_head(self, fault: str) -> None:
        self._head_fault = fault
        raise ValueError(fault)  # ends the parser; then `send_400_response`

    def _add_head_bytes(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > self._limits.max_head_bytes:
            raise ValueError("the head is too long")  # ends the parser; then `send_400_response`

    def _head_error(self) -> ApiError:
        most = self._limits.max_head_bytes
        return ApiError(431, f"the request's target and headers are larger than {most} bytes")

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._limits.receive_s, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _cut_off(self) -> None:
        self._count(SLOW_READER)
        self.transport.abort()

    def _expire(self) -> None:
        """Refuse what has not arrived whole. While an earlier request is answered, the next one may
        have to wait: `on_response_complete` begins its time again."""
        self._timer = None
        if self._is_answering():
            self._start_timer()
            return
        limit_s = self._limits.receive_s
        self._refuse(ApiError(408, f"the request had not arrived whole after {limit_s:g} s"))

    def _is_answering(self) -> bool:
        cycle = self.cycle
        is_running = cycle is not None and not cycle.more_body and not cycle.response_complete
        return is_running or bool(self.pipeline)

    def _is_owed(self) -> bool:
        """Return whether an answer is due, and may be written without cutting into another."""
        if not self._in_message or self._is_answering():
            return False
        return self._in_head or not self.cycle.response_started

    def _refuse(self, error: ApiError) -> None:
        """Answer where an answer is due, and close."""
        self._stop_timer()
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self._in_message or self._bytes_between:  # nothing was asked on an idle connection
            self._count(error.code)
        is_owed = self._is_owed()
        if self.cycle is not None and not self.cycle.response_complete:
            if is_owed:
                scope: Any = self.cycle.scope  # its type has uvicorn's own keys alone
                scope[REFUSED_STATUS] = error.status
            self.cycle.disconnected = True  # the application waits for a body that nobody reads
            self.cycle.message_event.set()
        if not is_owed:
            self.transport.close()
            return
        self.transport.write(as_bytes(error))
        self.loop.call_later(self._limits.linger_s, self.transport.close)


def as_bytes(error: ApiError) -> bytes:
    """Return a whole response, after which the connection ends."""
    body = json.dumps(error.as_dict()).encode()
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body
