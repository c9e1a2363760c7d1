"""Client: one request to its outcome. In: a body, when it was due. Out: an `Outcome`; a failure is
one too. Every wait is within the request's deadline.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gyre.benchmark.answers import MOST_DETAIL_CHARS, AnswerReader, describe_error
from gyre.benchmark.connection import ConnectionPool, ExchangeFailed
from gyre.benchmark.records import RequestResult
from gyre.core.codec import decode_json
from gyre.core.errors import InputError

MOST_ERROR_BYTES = 64 << 10
LOOK_S = 30.0  # for a list of models


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How each request is sent."""

    path: str
    stream: bool
    timeout_s: float  # from when a request is due to its last byte
    api_key: str = field(default="", repr=False)


class Client:
    """Asks one server, over a pool of connections."""

    def __init__(self, pool: ConnectionPool, settings: ClientSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._post_head = _head(pool, "POST", settings.path, settings.api_key)

    async def ask(self, body: bytes, due_s: float) -> RequestResult:
        """Send one request and return what came of it."""
        reader, refusal = AnswerReader(stream=self._settings.stream), bytearray()
        sent_s = 0.0

        def on_body(status: int, data: bytes) -> None:
            if status == 200:
                reader.feed(data, time.perf_counter())
            elif len(refusal) < MOST_ERROR_BYTES:
                refusal.extend(data)

        failure = detail = ""
        left_s = due_s + self._settings.timeout_s - time.perf_counter()
        try:
            async with asyncio.timeout(max(0.0, left_s)), self._pool.take() as connection:
                sent_s = time.perf_counter()
                status = await connection.exchange(
                    b"%b%d\r\n\r\n%b" % (self._post_head, len(body), body), on_body
                )
            if status == 200:
                reader.end()
            else:
                code, detail = describe_error(bytes(refusal))
                failure = f"{status} {code}".strip()
        except TimeoutError:
            failure, detail = "timeout", f"no whole answer in {self._settings.timeout_s:g} s"
        except ExchangeFailed as error:
            failure, detail = "reset", str(error)[:MOST_DETAIL_CHARS]
        except OSError as error:
            failure, detail = "connect", str(error)[:MOST_DETAIL_CHARS]
        if reader.failure:  # what the server said goes before how the connection ended
            failure, detail = reader.failure, reader.detail
        return RequestResult(
            due_s=due_s,
            sent_s=sent_s,
            ended_s=time.perf_counter(),
            failure=failure,
            detail=detail,
            text_times_s=tuple(reader.text_times_s),
            usage=reader.usage,
        )


async def first_model(pool: ConnectionPool, *, api_key: str) -> str:
    """Return the first model that a server lists. InputError where it lists none."""
    url = f"{pool.target.authority}{pool.target.path}/models"
    hint = "check the address, or name the model with --model"
    body = bytearray()
    try:
        async with asyncio.timeout(LOOK_S), pool.take() as connection:
            status = await connection.exchange(
                _head(pool, "GET", "/models", api_key) + b"0\r\n\r\n",
                lambda status, data: body.extend(data),
            )
    except (OSError, ExchangeFailed) as error:  # TimeoutError is an OSError
        reason = str(error) or f"no answer in {LOOK_S:g} s"
        raise InputError(f"{url}: {reason}", hint=hint) from error
    if status != 200:
        code, detail = describe_error(bytes(body))
        key = "; give a key with --api-key-file" if status in (401, 403) else ""
        raise InputError(f"{url}: {f'{status} {code}'.strip()}: {detail}", hint=hint + key)
    try:
        return _ModelList.name_of_first(bytes(body))
    except (msgspec.DecodeError, IndexError) as error:
        raise InputError(f"{url}: its answer lists no model", hint=hint) from error


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]

    @classmethod
    def name_of_first(cls, body: bytes) -> str:
        return decode_json(body, cls).data[0].id


def _head(pool: ConnectionPool, method: str, path: str, api_key: str) -> bytes:
    """Return a request's head, up to the number of its length."""
    target: Any = pool.target
    lines = [
        f"{method} {target.path}{path} HTTP/1.1",
        f"Host: {target.authority}",
        "Accept: */*",
        "Content-Type: application/json",
        *([f"Authorization: Bearer {api_key}"] if api_key else []),
        "Content-Length: ",
    ]
    return "\r\n".join(lines).encode("latin-1")
