"""A backend of OpenAI's chat API that answers at once, for a gateway before it. In: requests. Out:
its base URL on stdout; as many equal tokens as each asks for, whole or in a stream. It ends with
its starter's process group. Caller: bench/servers.py.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httptools
import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
ID = {"id": "chatcmpl-0", "created": 0, "model": "model"}


class Connection(asyncio.Protocol):
    """A gateway's connection. The parts of a stream leave in one write."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._body = transport, b""
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self._body += data

    def on_message_complete(self) -> None:
        asked, self._body = json.loads(self._body or b"{}"), b""
        kind, body = answer(asked)
        self._transport.write(HEAD % (kind, len(body), body))


def answer(asked: dict[str, Any]) -> tuple[bytes, bytes]:
    words = sum(len(str(one["content"]).split()) for one in asked.get("messages", ()))
    most = asked.get("max_tokens") or asked.get("max_completion_tokens") or 4
    usage = {"prompt_tokens": words, "completion_tokens": most, "total_tokens": words + most}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": "a" * most}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        whole = {**ID, "object": "chat.completion", "choices": [choice], "usage": usage}
        return b"application/json", json.dumps(whole).encode()
    told = [
        {"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}
        for _ in range(most)
    ]
    told.append({"index": 0, "delta": {}, "finish_reason": "length"})
    events = [{**ID, "object": "chat.completion.chunk", "choices": [one]} for one in told]
    events.append({**ID, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    lines = [b"data: %b\n\n" % json.dumps(event).encode() for event in events]
    return b"text/event-stream", b"".join([*lines, b"data: [DONE]\n\n"])


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
