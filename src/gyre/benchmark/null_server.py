"""Null server: streams canned chunks as fast as it can, in a process of its own. In: requests, of
whatever kind. Out: its URL on stdout; for each request CHUNKS chunks, each in a write of its own.

It is what a benchmark's client is measured against: all that it takes to read is the client's.
`client_rate.py` ends it by closing its stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys

import httptools

CHUNKS = 512
MOST_S = 120.0  # it ends by itself, if no one ends it
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def canned_events() -> list[bytes]:
    """Return one answer's events, as HTTP chunks."""
    head = {"id": "chatcmpl-" + "0" * 32, "object": "chat.completion.chunk", "created": 0}
    head |= {"model": "null", "system_fingerprint": "version-0"}

    def event(choices: list[object], **more: object) -> bytes:
        data = b"data: %b\n\n" % json.dumps({**head, "choices": choices, **more}).encode()
        return b"%x\r\n%b\r\n" % (len(data), data)

    usage = {"prompt_tokens": 1, "completion_tokens": CHUNKS, "total_tokens": CHUNKS + 1}
    token = event([{"index": 0, "delta": {"content": " word"}, "finish_reason": None}])
    last = event([{"index": 0, "delta": {}, "finish_reason": "length"}])
    done = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    return [HEAD, *[token] * CHUNKS, last, event([], usage=usage), done]


class NullConnection(asyncio.Protocol):
    """A client's connection."""

    def __init__(self, events: list[bytes]) -> None:
        self._events = events
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._answer())

    async def _answer(self) -> None:
        assert self._transport is not None
        for event in self._events:
            self._transport.write(event)
            async with asyncio.timeout(MOST_S):
                await self._may_write.wait()
            await asyncio.sleep(0)  # the other connections' turn


async def serve() -> None:
    """Serve until stdin is closed."""
    loop = asyncio.get_running_loop()
    events = canned_events()
    server = await loop.create_server(lambda: NullConnection(events), "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    closed = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), closed.set)
    async with asyncio.timeout(MOST_S):
        await closed.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(serve())
