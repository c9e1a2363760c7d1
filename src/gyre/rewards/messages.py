"""Messages: between the scorer and its workers. In: records. Out: frames of length and msgpack.

    scorer → worker   Setup once, then Job after Job.
    worker → scorer   Ready once, then one CheckResult per check of the job, in the job's order.

Results go out before a check that may hang begins. The first check without a result is thus what
hangs. Each result has its job's token, so that what a reward writes to the channel is not
taken for one.
"""

from __future__ import annotations

from typing import Any

import msgspec

_HEAD = 4  # bytes of the length
MOST_RESULT_BYTES = 1 << 16
MOST_REASON_CHARS = 2000


class Item(msgspec.Struct, frozen=True, array_like=True):
    """What a check may know of one rollout."""

    text: str
    task: Any
    prompt: str
    finish: str
    num_tokens: int  # that the policy chose, the end token included


class Setup(msgspec.Struct, frozen=True):
    """Sent to a new worker."""

    parts: list[dict[str, Any]]  # the parts' options, by index
    sandbox: str  # mode of the sandbox; "" when no part runs code
    memory_bytes: int  # address space of the worker; 0 sets no limit


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Checks for one worker, done in order."""

    items: list[msgspec.Raw]  # encoded Item
    checks: list[tuple[int, int]]  # index into items, index into the setup's parts
    token: bytes  # random; every result on this job returns it


class CheckResult(msgspec.Struct, frozen=True, array_like=True):
    """What one check found. index -1 means ready: the worker has its setup and takes jobs."""

    index: int  # into the job's checks
    value: float = 0.0
    reason: str = ""
    outcome: str = "ok"
    started_s: float = 0.0  # CLOCK_MONOTONIC, the same in all processes
    ended_s: float = 0.0
    token: bytes = b""  # of the job
    worn: str = ""  # why the worker should be replaced; it does no further check of this job
    decided_inside: int = 0  # tests of code that the program under test could forge
    # system calls that the sandbox refused to the check's programs, and how often
    refused_calls: dict[str, int] = {}


READY = -1
OUTCOMES = ("ok", "timeout", "error", "invalid")  # of a ScorePart
_encoder = msgspec.msgpack.Encoder()
decode_item = msgspec.msgpack.Decoder(Item).decode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_result = msgspec.msgpack.Decoder(CheckResult).decode


def encode_item(item: Item) -> bytes:
    """Encode an item. TypeError, ValueError or UnicodeEncodeError for a task that is not plain
    data."""
    return msgspec.msgpack.encode(item, enc_hook=_plain)


def _plain(value: Any) -> Any:
    """Convert numpy scalars and arrays, sets, paths: what tasks are met with beside JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON-able")


def frame(message: Setup | Job | CheckResult) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(_HEAD, "little") + body


def take_frame(buffer: bytearray, *, most_bytes: int = 0) -> bytes | None:
    """Take one whole frame out of the buffer, or None; a beginning stays. ValueError for one of
    more than `most_bytes` (0: any size), which the sender cannot have meant."""
    end = _HEAD + int.from_bytes(buffer[:_HEAD], "little")
    if most_bytes and len(buffer) >= _HEAD and end > _HEAD + most_bytes:
        raise ValueError(f"a frame of {end} bytes")
    if len(buffer) < _HEAD or len(buffer) < end:
        return None
    body = bytes(buffer[_HEAD:end])
    del buffer[:end]
    return body
