"""Codec: records to bytes and back, for snapshots and between processes. In: a frozen record of
`core.records` (or one built of them). Out: versioned MessagePack with raw array buffers; never
pickle. Other formats read their records here too, by `decode_json` and `decode_msgpack`.

msgspec 0.22 works a type out at its first use, while other threads may run. One that meets the type
half worked out ends the process. So decoders are built one at a time, and kept.
"""

from __future__ import annotations

import functools
import re
import threading
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from gyre.core.errors import SnapshotError

CODEC_VERSION = 1
_MAGIC = b"GYR" + bytes([CODEC_VERSION])

_BUILDING = threading.Lock()  # held while msgspec works a type out

T = TypeVar("T")


def encode(record: Any) -> bytes:
    """Return magic, codec version, MessagePack. Arrays keep dtype, shape and every bit."""
    return _MAGIC + msgspec.msgpack.encode(record, enc_hook=from_array)


def decode(data: bytes, kind: type[T], *, exact: bool = True) -> T:
    """Return the record. SnapshotError if the bytes are of another codec version or of no record of
    this kind; unless `exact` is False, also if they would not be written so again."""
    if data[:4] != _MAGIC:
        raise SnapshotError(
            f"record bytes begin with {data[:4]!r}, need {_MAGIC!r} (codec version "
            f"{CODEC_VERSION})",
            hint="the file was written by another version of Gyre; resume with that version",
        )
    name = getattr(kind, "__name__", str(kind))
    try:
        record = decode_msgpack(data[4:], kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotError(
            f"record bytes are no {name}: {error}", hint="use an earlier snapshot"
        ) from error
    # Decoding skips fields that a record lacks and fills in defaults; what comes back must be all
    # that was written.
    if exact and encode(record) != data:
        raise SnapshotError(
            f"record bytes hold other fields than a {name} has",
            hint="the file was written by another version of Gyre; resume with that version",
        )
    return record


def decode_json(text: str | bytes, kind: type[T]) -> T:
    """Read a record from JSON, in any thread. msgspec.DecodeError."""
    return cast(T, _json_decoder(kind).decode(text))


def decode_msgpack(data: bytes | memoryview, kind: type[T]) -> T:
    """Read a record from MessagePack, in any thread. msgspec.DecodeError."""
    return cast(T, _msgpack_decoder(kind).decode(data))


def from_array(value: Any) -> Any:
    """Return what msgspec writes for an array or a NumPy number. NotImplementedError for others."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
    raise NotImplementedError(f"records hold plain values and arrays of numbers, got {what}")


def to_array(kind: type, value: Any) -> Any:
    """Return the array that `from_array` took apart. ValueError for a type of no numbers."""
    assert kind is np.ndarray, kind
    dtype, shape, data = value
    return np.frombuffer(data, dtype=_number_type(dtype)).reshape(shape).copy()


@functools.cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    with _BUILDING:
        return msgspec.json.Decoder(kind)


@functools.cache
def _msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    with _BUILDING:
        return msgspec.msgpack.Decoder(kind, dec_hook=to_array)


@functools.cache
def _number_type(name: str) -> np.dtype:
    """Return a dtype by its name. ValueError for a type of no numbers."""
    if not re.fullmatch(r"[<>|][biuf]\d+", name):
        raise ValueError(f"{name!r} is no type of numbers")  # msgspec makes it a DecodeError
    return np.dtype(name)
