"""Frames: values between a worker and the process that started it, over one socket. In: plain
values, arrays, records of gyre, errors. Out: a length and MessagePack; never pickle.

Containers and arrays keep their types. A record is written by its class's name, and read by msgspec
against the types of its fields. An Offer crosses if its weights are files in a folder or registered
shards.
"""

from __future__ import annotations

import functools
import importlib
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import msgspec
import numpy as np

from gyre.core.codec import decode_msgpack, from_array, to_array
from gyre.core.errors import GyreError, WorkerLost
from gyre.core.offers import FolderTensors, Offer, RegisteredShards
from gyre.core.records import Manifest

_HEAD = struct.Struct("<QQ")  # the call's number, bytes that follow
PIECE_BYTES = 1 << 20  # read at most this much at a time
UNBOUNDED = 1 << 62  # bytes of a frame between a process and one that it has started
_PACKAGE = "gyre."  # only its classes are looked up by name
ARRAY, RECORD, TUPLE, MAP, ERROR, OS_ERROR, OFFER = range(7)  # codes of MessagePack's extensions
_NAME = re.compile(r"gyre(\.\w+)+:\w+")


class FrameError(ValueError):
    """Bytes that are no frame of ours."""


def encode(value: Any) -> bytes:
    """Return the frame's payload. TypeError for what is no plain value, array, record or error."""
    return msgspec.msgpack.encode(_pack(value))


def decode(data: bytes) -> Any:
    """Return what was encoded. FrameError if the bytes hold something else."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_unpack)
    except (msgspec.DecodeError, ImportError, AttributeError, TypeError, ValueError) as error:
        raise FrameError(f"a frame cannot be read: {error}") from error


def send(to: socket.socket, number: int, payload: bytes) -> None:
    """Send one frame whole. The caller keeps others from sending meanwhile. OSError."""
    to.sendall(framed(number, payload))


def framed(number: int, payload: bytes) -> bytes:
    """Return a frame's bytes."""
    return _HEAD.pack(number, len(payload)) + payload


def receive(source: socket.socket) -> tuple[int, bytes]:
    """Wait for the next frame; return the call's number and the payload. WorkerLost when the other
    side has hung up."""
    number, size_bytes = _HEAD.unpack(_read(source, _HEAD.size))
    return number, _read(source, size_bytes)


class Inbox:
    """Frames of which the bytes come in pieces, for a reader that does not wait for them."""

    def __init__(self, most_bytes: int = UNBOUNDED) -> None:
        self._most_bytes = most_bytes  # of one frame
        self._data = bytearray()

    def take(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Add bytes; yield the call's number and the payload of each frame that is whole now.
        FrameError for one that is too large."""
        self._data += data
        start = 0
        try:
            while len(self._data) - start >= _HEAD.size:
                number, size_bytes = _HEAD.unpack_from(self._data, start)
                if size_bytes > self._most_bytes:
                    raise FrameError(
                        f"a frame of {size_bytes} bytes came, at most {self._most_bytes} are read"
                    )
                begin, end = start + _HEAD.size, start + _HEAD.size + size_bytes
                if len(self._data) < end:
                    break
                start = end
                yield number, bytes(self._data[begin:end])
        finally:
            del self._data[:start]


def _read(source: socket.socket, size_bytes: int) -> bytes:
    parts, missing = [], size_bytes
    while missing:
        part = source.recv(min(missing, PIECE_BYTES))
        if not part:
            raise WorkerLost("the other side of the socket hung up")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _pack(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, tuple):
        return _tag(TUPLE, [_pack(item) for item in value])
    if isinstance(value, Mapping):
        return _tag(MAP, [[_pack(key), _pack(item)] for key, item in value.items()])
    if isinstance(value, np.ndarray):
        return _tag(ARRAY, from_array(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, GyreError):
        return _tag(ERROR, [_name(type(value)), value.message, value.hint])
    if isinstance(value, OSError):
        return _tag(OS_ERROR, [value.errno, value.strerror, value.filename])
    if isinstance(value, Offer):
        return _tag(OFFER, _pack_offer(value))
    if is_dataclass(value) and type(value).__module__.startswith(_PACKAGE):
        data = msgspec.msgpack.encode(value, enc_hook=from_array)
        return _tag(RECORD, [_name(type(value)), msgspec.Raw(data)])
    raise TypeError(
        f"a worker's call carries plain values, arrays and records, got {type(value).__name__}"
    )


def _pack_offer(offer: Offer) -> list[Any]:
    if offer.addressed is None:
        raise TypeError(
            "weights cross to another process as a folder or as registered shards, got "
            f"{offer.kind}"
        )
    is_folder = offer.folder is not None
    return [offer.manifest, is_folder, offer.addressed, sorted(offer.homes)]


def _unpack_offer(data: memoryview) -> Offer:
    manifest, is_folder, raw, homes = decode_msgpack(
        data, tuple[Manifest, bool, msgspec.Raw, frozenset[str]]
    )
    kind = FolderTensors if is_folder else RegisteredShards
    source = decode_msgpack(raw, kind)
    return Offer(manifest=manifest, source=source, homes=homes)


def _tag(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _unpack(code: int, data: memoryview) -> Any:
    if code == RECORD:
        name, raw = decode_msgpack(data, tuple[str, msgspec.Raw])
        return decode_msgpack(raw, _find_class(name))
    if code == OFFER:
        return _unpack_offer(data)
    value = msgspec.msgpack.decode(data, ext_hook=_unpack)
    if code == TUPLE:
        return tuple(value)
    if code == MAP:
        return dict(value)
    if code == ARRAY:
        return to_array(np.ndarray, value)
    if code == OS_ERROR:
        return OSError(*value)
    name, message, hint = value
    return _find_class(name)(message, hint=hint)


@functools.cache
def _find_class(name: str) -> Any:
    if not _NAME.fullmatch(name):
        raise FrameError(f"{name!r} names no class of gyre")
    module, _, qualified = name.partition(":")
    found = getattr(importlib.import_module(module), qualified)
    is_error = isinstance(found, type) and issubclass(found, GyreError)
    if not (is_error or (isinstance(found, type) and is_dataclass(found))):
        raise FrameError(f"{name} is neither a record nor an error")
    return found
