"""Clients that hang up, at any moment of a request. In: a server's address, a seed. Out: so many
broken connections, counted by the moment.

    connect ─ head ─ body ─ wait ─ first event ─ events ─ end
       ▲        ▲      ▲      ▲         ▲           ▲
       └────────┴──────┴──────┴─────────┴───────────┴── closed here, in order or by a reset
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

MOMENTS = (
    "before a byte",
    "in the head",
    "before the body",
    "in the body",
    "while it waits",
    "in a stream",
    "half-closed",
    "with two in line",
)
LONGEST_S = 30.0  # of any wait for the server
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the close is a reset


def make_request(
    model: str, secret: str, draws: random.Random, *, stream: bool
) -> tuple[bytes, bytes]:
    """Head and body of a request that runs far longer than its client stays."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": draws.choice([1, 20, 200]),
        "n": draws.choice([1, 1, 3]),
        "seed": draws.randrange(1 << 30),
        "ignore_eos": True,
        "stream": stream,
    }
    path = draws.choice(["/v1/completions", "/v1/chat/completions", "/generate"])
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "How many apples are left?"}]
    elif path == "/v1/completions":
        body["prompt"] = ["How many", "Weng earns"] if draws.random() < 0.3 else "How many"
    else:
        params = {"max_tokens": body["max_tokens"], "ignore_eos": True}
        body = {"prompt": "How many", "params": params, "stream": stream}
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {secret}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode(), data


async def hang_up(
    host: str, port: int, moment: str, request: tuple[bytes, bytes], draws: random.Random
) -> None:
    """Open a connection and leave it at `moment`."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), LONGEST_S)
    head, body = request
    sent = {
        "before a byte": b"",
        "in the head": head[: draws.randrange(1, len(head))],
        "before the body": head,
        "in the body": head + body[: draws.randrange(1, len(body))],
        "with two in line": (head + body) * 2,
    }.get(moment, head + body)
    try:
        writer.write(sent)
        await asyncio.wait_for(writer.drain(), LONGEST_S)
        if moment == "half-closed":
            writer.write_eof()
        if moment == "in a stream":
            await asyncio.wait_for(reader.read(draws.choice([1, 64])), LONGEST_S)
            with contextlib.suppress(TimeoutError):  # a short answer may be over
                for _ in range(draws.randrange(5)):
                    await asyncio.wait_for(reader.read(4096), 0.02)
        else:
            await asyncio.sleep(draws.choice([0, 0, 0.002, 0.02]))
    except ConnectionError:  # the server was faster
        pass
    finally:
        if draws.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(writer.wait_closed(), LONGEST_S)


async def hang_up_often(
    url: str, model: str, secret: str, *, times: int, at_once: int, seed: int
) -> Counter[str]:
    """So many hang-ups by so many clients; return how many of each moment."""
    place = urlsplit(url)
    assert place.hostname is not None and place.port is not None
    left = iter(range(times))
    counts: Counter[str] = Counter()

    async def client(number: int) -> None:
        draws = random.Random(seed * 1000 + number)
        for _ in left:
            moment = draws.choice(MOMENTS)
            stream = moment == "in a stream" or draws.random() < 0.5
            request = make_request(model, secret, draws, stream=stream)
            await hang_up(place.hostname, place.port, moment, request, draws)
            counts[moment] += 1

    await asyncio.gather(*(client(number) for number in range(at_once)))
    return counts
