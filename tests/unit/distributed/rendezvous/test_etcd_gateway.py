"""Which answers of an endpoint are asked for again, how often, and which are an error at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from gyre.core.errors import DeadlineError
from gyre.distributed.rendezvous.etcd_gateway import EtcdGateway, EtcdRefusal

GOOD = (200, {"header": {"revision": "3"}})
ENDING = (408, {"code": 1, "message": "grpc: the client connection is closing"})
NO_LEADER = (503, {"code": 14, "message": "etcdserver: no leader"})


class Scripted:
    """Answers calls by a script, and goes on with its last answer."""

    def __init__(self, *answers: tuple[int, Any]) -> None:
        self.answers, self.asked = answers, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                found = re.search(r"content-length: (\d+)", head)
                assert found is not None
                await reader.readexactly(int(found[1]))
                status, body = self.answers[min(self.asked, len(self.answers) - 1)]
                self.asked += 1
                text = body if isinstance(body, bytes) else json.dumps(body).encode()
                writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n".encode())
                writer.write(text)
        writer.close()


def ask(
    script: Scripted, work: Callable[[EtcdGateway], Awaitable[None]]
) -> list[tuple[str, dict[str, Any]]]:
    """Run a test beside a scripted endpoint; return the events."""
    events: list[tuple[str, dict[str, Any]]] = []

    async def main() -> None:
        server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        gateway = EtcdGateway([url], emit=lambda kind, **fields: events.append((kind, fields)))
        try:
            await work(gateway)
        finally:
            await gateway.close()
            server.close()

    asyncio.run(main())
    return events


@pytest.mark.parametrize("failures", [(ENDING,), (NO_LEADER, ENDING, (500, b"oh"))])
def test_an_endpoint_that_cannot_serve_at_present_is_asked_again(failures) -> None:
    script = Scripted(*failures, GOOD)

    async def work(gateway: EtcdGateway) -> None:
        answer = await gateway.call("/v3/kv/range", {}, deadline_s=20.0)
        assert answer.body == GOOD[1] and answer.was_away

    events = ask(script, work)
    assert [kind for kind, _ in events] == ["rendezvous.lost", "rendezvous.back"]
    assert script.asked == len(failures) + 1


def test_pauses_grow_while_nothing_answers() -> None:
    script = Scripted(NO_LEADER)

    async def work(gateway: EtcdGateway) -> None:
        with pytest.raises(DeadlineError, match=r"last: http.*status 503 .*no leader"):
            await gateway.call("/v3/kv/range", {}, deadline_s=1.0)

    ask(script, work)
    assert 1 <= script.asked <= 6, "after 0, 0.05, 0.15, 0.35 and 0.75 s, and at the deadline"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((400, {"code": 3, "message": "etcdserver: request is too large"}), "request is too large"),
        ((429, {"code": 8, "message": "etcdserver: mvcc: database space exceeded"}), "space exce"),
        ((401, {"code": 16, "message": "etcdserver: invalid auth token"}), "invalid auth token"),
        ((200, b"<html>"), "speaks no JSON"),
    ],
)
def test_what_asking_again_would_not_mend_is_an_error_at_once(answer, reason: str) -> None:
    script = Scripted(answer)

    async def work(gateway: EtcdGateway) -> None:
        with pytest.raises(EtcdRefusal, match=reason):
            await gateway.call("/v3/kv/range", {}, deadline_s=20.0)

    assert ask(script, work) == [] and script.asked == 1
