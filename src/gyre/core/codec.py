"""Codec: records to bytes and back, for snapshots and between processes. In: a frozen record of `core.records` (or one
built of them). Out: versioned MessagePack with raw array buffers; never pickle. Callers: `loop.resume`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

from gyre.core.errors import SnapshotError

CODEC_VERSION = 1
_MAGIC = b"GYR" + bytes([CODEC_VERSION])

T = TypeVar("T")


def encode(record: Any) -> bytes:
    """Return magic, codec version, MessagePack. Arrays keep dtype, shape and every bit."""
    return _MAGIC + msgspec.msgpack.encode(record, enc_hook=_from_array)


def decode(data: bytes, kind: type[T]) -> T:
    """Return the record. SnapshotError if the bytes are of another codec version or of no record of this kind."""
    if data[:4] != _MAGIC:
        raise SnapshotError(
            f"record bytes begin with {data[:4]!r}, need {_MAGIC!r} (codec version {CODEC_VERSION})",
            hint="the file was written by another version of Gyre; resume with that version",
        )
    try:
        return msgspec.msgpack.decode(data[4:], type=kind, dec_hook=_to_array)
    except msgspec.DecodeError as error:
        raise SnapshotError(f"record bytes are no {kind.__name__}: {error}", hint="use an earlier snapshot") from error


def _from_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"records hold plain values and arrays, got {type(value).__name__}")


def _to_array(kind: type, value: Any) -> Any:
    assert kind is np.ndarray, kind
    dtype, shape, data = value
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape).copy()
