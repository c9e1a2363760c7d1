"""Connections: HTTP/1.1 exchanges, one at a time on each connection, as cheap as Python does them.
In: bytes of requests. Out: statuses; parts of bodies as they come.

httptools parses, and a part of a body goes to its reader from the event loop's read callback: no
task wakes up for a chunk. So the client's own time stays far below a server's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from gyre.core.errors import ConfigError

OnBody = Callable[[int, bytes], None]  # status, bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a server is."""

    host: str
    port: int
    path: str  # before the routes of the API, as in "/v1"
    is_tls: bool

    @property
    def authority(self) -> str:
        """Return the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_url(url: str) -> Target:
    """Return the target of a base URL; "/v1" is added where it has no path. ConfigError where it is
    no HTTP URL."""
    hint = "give the server's address, such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"URL {url!r}: {error}", hint=hint) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"URL {url!r} is no http or https address", hint=hint)
    is_tls = parts.scheme == "https"
    return Target(
        host=parts.hostname,
        port=port or (443 if is_tls else 80),
        path=parts.path.rstrip("/") or "/v1",
        is_tls=is_tls,
    )


class ExchangeFailed(Exception):
    """The connection ended before the answer did."""


class HttpConnection(asyncio.Protocol):
    """One connection, kept between requests."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: asyncio.Future[int] | None = None
        self._on_body: OnBody | None = None
        self._status = 0
        self._has_length = self._has_head = False
        self.is_open = False

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """Send a request and return the answer's status, after its last byte. ExchangeFailed where
        the connection ends before. The caller has the deadline, and closes after it."""
        assert self._transport is not None and self._answer is None
        if not self.is_open:
            raise ExchangeFailed("the server hung up")
        self._answer = asyncio.get_running_loop().create_future()
        self._parser, self._on_body = httptools.HttpResponseParser(self), on_body
        self._has_length = self._has_head = False
        try:
            self._transport.write(request)
            return await self._answer
        finally:
            self._answer = self._on_body = None

    def close(self) -> None:
        """Hang up at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._parser is None:  # nothing was asked
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP answer: {error}")

    def eof_received(self) -> bool:
        return False  # close, which calls connection_lost

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._has_head and not self._has_length:  # such a body ends with its connection
            self._settle()
        else:
            self._fail(str(error) if error else "the server hung up")

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status, self._has_head = self._parser.get_status_code(), True

    def on_body(self, data: bytes) -> None:
        if self._on_body is not None:
            self._on_body(self._status, data)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._status < 200:  # such as 100 Continue: the answer comes after it
            self._has_head = False
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._settle()

    def _settle(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._status)

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ExchangeFailed(reason))
        self.close()


class ConnectionPool:
    """At most so many connections to one server."""

    def __init__(self, target: Target, *, most: int) -> None:
        self.target = target
        self._free = asyncio.Semaphore(most)
        self._idle: list[HttpConnection] = []
        self._all: set[HttpConnection] = set()
        self._tls = ssl.create_default_context() if target.is_tls else None

    @asynccontextmanager
    async def take(self) -> AsyncIterator[HttpConnection]:
        """Yield an open connection, when one may be had; OSError where the server takes none. One
        whose exchange did not end is closed."""
        async with self._free:
            connection = self._take_idle() or await self._open()
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            finally:
                if connection.is_open:
                    self._idle.append(connection)
                else:
                    self._all.discard(connection)

    def close(self) -> None:
        """Hang up all."""
        for connection in self._all:
            connection.close()

    def _take_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            self._all.discard(connection)  # the server hung up meanwhile
        return None

    async def _open(self) -> HttpConnection:
        _, connection = await asyncio.get_running_loop().create_connection(
            HttpConnection, self.target.host, self.target.port, ssl=self._tls
        )
        self._all.add(connection)
        return connection
