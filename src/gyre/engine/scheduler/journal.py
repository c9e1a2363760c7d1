"""Journal: every input that changes what an EngineCore decides, in the order in which it took
effect. In: entries, as they are played. Out: a file of them, and the entries of such a file.

Two cores that are built alike and play the same entries schedule the same steps. So nothing else
may reach a decision: no clock, no free memory, no measured rate.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec

from gyre.core.codec import decode, encode
from gyre.core.contracts import CommitPolicy
from gyre.core.errors import SnapshotError
from gyre.core.records import Request, Tier

BUFFER_BYTES = 256 * 1024  # entries held in memory before they are written
_LENGTH = struct.Struct("<I")  # bytes of the entry that follows


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A new core. Nothing of the one before it is left."""

    settings: Mapping[str, Any]  # of EngineConfig, nothing left open
    num_pages: int  # KV pages, whatever memory was free
    num_slots: int  # pages of the host pool
    version: int  # of the weights
    eos_ids: tuple[int, ...]
    dummy: bool = False  # random weights, until a Commit


class Add(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request enters."""

    request: Request
    wide_seed: str = ""  # the request's seed, where 64 bits don't hold it

    @staticmethod
    def of(request: Request) -> Add:
        """Make the entry of any request that was admitted."""
        if -(2**63) <= request.seed < 2**64:
            return Add(request=request)
        return Add(request=replace(request, seed=0), wide_seed=str(request.seed))

    def whole(self) -> Request:
        """Return the request as it was asked."""
        return replace(self.request, seed=int(self.wide_seed)) if self.wide_seed else self.request


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests end; unknown ids are passed over."""

    request_ids: tuple[str, ...]
    reason: str


class Expire(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests that are past their deadline, by the writer's clock."""

    request_ids: tuple[str, ...]


class Interrupt(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every request ends and returns what it had."""


class Flush(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Commit the tokens of every step in flight."""


class Commit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The next steps run on the weights of `version`."""

    version: int
    policy: CommitPolicy


class MoveComponent(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A component of the engine's memory moves to a tier."""

    component: str
    tier: Tier
    forgets_kv: bool = False  # the contents of the KV pages are gone
    num_slots: int | None = None  # of the host pool from now on, which is empty; None: as it was


class Recapture(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Weights or KV pages have new addresses: the runner captures its graphs anew."""


class Steps(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """So many calls of `EngineCore.step`."""

    count: int


Entry = (
    Start | Add | Abort | Expire | Interrupt | Flush | Commit | MoveComponent | Recapture | Steps
)


def encode_entry(entry: Entry) -> bytes:
    return encode(entry)


def decode_entry(data: bytes) -> Entry:
    """Return the entry. SnapshotError when the bytes are none. Callers give whole numbers for
    floats too, so what was written need not be what would be written again."""
    return decode(data, cast(type[Entry], Entry), exact=False)


class JournalWriter:
    """Appends entries to a new file of a folder, each behind its length. At most `buffer_bytes` are
    held back."""

    def __init__(self, folder: Path, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = _create(folder)
        self._buffer_bytes = buffer_bytes
        self._held = bytearray()

    def write(self, entry: Entry) -> None:
        data = encode_entry(entry)
        self._held += _LENGTH.pack(len(data)) + data
        if len(self._held) > self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        """Hand what is held back to the operating system."""
        if self._held:
            with self.path.open("ab") as file:
                file.write(self._held)
            self._held.clear()


def _create(folder: Path) -> Path:
    """Make the first file whose name is free: engines and attempts of a run have one each."""
    for number in itertools.count():
        path = folder / f"engine-{number}.journal"
        with suppress(FileExistsError):
            path.open("xb").close()
            return path
    raise AssertionError("numbers do not end")


def read_journal(path: Path) -> Iterator[Entry]:
    """Yield the entries of a file. SnapshotError when it ends within one: the writer was killed."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        start = at + _LENGTH.size
        size = _LENGTH.unpack(data[at:start])[0] if start <= len(data) else 0
        if start + size > len(data) or size == 0:
            raise SnapshotError(
                f"{path} ends within an entry, at byte {at} of {len(data)}",
                hint="replay the entries before it; the writer was killed there",
            )
        yield decode_entry(data[start : start + size])
        at = start + size
