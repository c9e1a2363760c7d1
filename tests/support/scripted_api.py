"""A server of the API that plays a script, on loopback. In: a function from a request's number and
body to the steps of its answer. Out: a URL; the requests that came."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre.benchmark.client import Client, ClientSettings
from gyre.benchmark.connection import ConnectionPool, parse_url

RESET = object()  # a step: break the connection off
HANG_UP = object()  # a step: close the connection, as at the end of a body without a length
Step = bytes | float | object | Awaitable[Any]  # bytes are sent, seconds slept, the last awaited
Script = Callable[[int, dict[str, Any]], Sequence[Step]]


@dataclass
class Api:
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    connections: int = 0


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[Api]:
    api, tasks = Api(), set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        api.connections += 1
        tasks.add(asyncio.current_task())
        with contextlib.suppress(EOFError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                body = await reader.readexactly(length)
                api.heads.append(head)
                api.bodies.append(json.loads(body) if body else {})
                for step in script(len(api.bodies) - 1, api.bodies[-1]):
                    if not await play(step, writer):
                        return

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    api.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield api
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def play(step: Step, writer: asyncio.StreamWriter) -> bool:
    """Whether the connection goes on."""
    if isinstance(step, bytes):
        writer.write(step)
        await writer.drain()
    elif isinstance(step, float):
        await asyncio.sleep(step)
    elif step is RESET:
        writer.transport.abort()
        return False
    elif step is HANG_UP:
        writer.close()
        return False
    else:
        assert isinstance(step, Awaitable)
        await step
    return True


def head(status: int = 200, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Some", *lines, "", ""]).encode()


def whole(value: Any, status: int = 200) -> bytes:
    """An answer in one body."""
    data = json.dumps(value).encode()
    return head(status, f"content-length: {len(data)}") + data


CHUNKED = head(200, "content-type: text/event-stream", "transfer-encoding: chunked")
END = b"0\r\n\r\n"


def part(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """One event, as an HTTP chunk."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return part(b"data: %b\n\n" % data)


def said(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": details,
    }


def stream(*texts: str, tokens: int = 7) -> list[bytes]:
    """The steps of a whole stream."""
    counted = event({"choices": [], "usage": usage(11, tokens, cached=3)})
    return [
        CHUNKED,
        said(""),
        *map(said, texts),
        said("", "length"),
        counted,
        event(b"[DONE]"),
        END,
    ]


@contextlib.contextmanager
def client_of(api: Api, **changed: Any) -> Any:
    most = changed.pop("most", 64)
    settings = {"path": "/chat/completions", "stream": True, "timeout_s": 30.0} | changed
    pool = ConnectionPool(parse_url(api.url), most=most)
    try:
        yield Client(pool, ClientSettings(**settings))
    finally:
        pool.close()
