"""Messages: what the scorer and its workers say to each other. In: records. Out: frames of length and msgpack.

    scorer → worker   Setup once, then Job after Job
    worker → scorer   Ready once, then one Verdict per check of the job, in the job's order

A verdict goes out before the next check that may hang begins, so the first check without a verdict is what hangs.
Callers: rewards.pool, rewards.worker.
"""

from __future__ import annotations

from typing import Any

import msgspec

_HEAD = 4  # bytes of the length


class Item(msgspec.Struct, frozen=True, array_like=True):
    """What a check may know of one rollout."""

    text: str
    task: Any
    prompt: str
    finish: str
    num_tokens: int  # that the policy chose


class Setup(msgspec.Struct, frozen=True):
    """Sent to a new worker."""

    parts: list[dict[str, Any]]  # the parts' options, by index
    sandbox: str  # mode of the sandbox; "" when no part runs code
    memory_bytes: int  # address space of the worker; 0 sets no limit


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Checks for one worker, done in order."""

    items: list[msgspec.Raw]  # encoded Item
    checks: list[tuple[int, int]]  # index into items, index into the setup's parts


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What one check found. index -1 means ready: the worker has its setup and takes jobs."""

    index: int  # into the job's checks
    value: float = 0.0
    reason: str = ""
    outcome: str = "ok"
    started_s: float = 0.0  # CLOCK_MONOTONIC, the same in all processes
    ended_s: float = 0.0
    refused_calls: dict[str, int] = {}  # system calls that the sandbox refused to the check's programs, and how often


READY = -1
_encoder = msgspec.msgpack.Encoder()
decode_item = msgspec.msgpack.Decoder(Item).decode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_verdict = msgspec.msgpack.Decoder(Verdict).decode


def encode_item(item: Item) -> bytes:
    """May raise TypeError, ValueError or UnicodeEncodeError for a task that is no plain data."""
    return msgspec.msgpack.encode(item, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """numpy scalars and arrays, sets, paths: what tasks are met with beside JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON-able")


def frame(message: Setup | Job | Verdict) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(_HEAD, "little") + body


def take_frame(buffer: bytearray) -> bytes | None:
    """Take one whole frame out of the buffer, or None; a beginning stays."""
    end = _HEAD + int.from_bytes(buffer[:_HEAD], "little")
    if len(buffer) < _HEAD or len(buffer) < end:
        return None
    body = bytes(buffer[_HEAD:end])
    del buffer[:end]
    return body
