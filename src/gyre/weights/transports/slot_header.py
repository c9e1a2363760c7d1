"""Slot header: the first page of a slot, which says what its bytes are. In: the header's fields, or
the page. Out: the page, or the fields; InputError or SnapshotError for a slot that has not the
version that is asked for. Pure.

As in a seqlock, the sequence is odd while the owner writes, and each write makes it greater: a
reader that finds the same even number before and after has read one version.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from gyre.core.errors import InputError, SnapshotError

HEADER_BYTES = 4096  # a page, so that the bytes begin on one
MAGIC = b"GyrePart"
FORMAT = 1
# magic, format, owner, sequence, epoch, version, bytes of the part, run
_FIELDS = struct.Struct("<8sIIQqqQ32s")
RUN_ID = re.compile(r"[A-Za-z0-9]{1,32}")
_NAME = re.compile(rf"gyre-(?P<run>{RUN_ID.pattern})-(?P<owner>[0-9]+)-(?P<slot>[0-9]+)")
AGAIN = "prepare the version again, or take a newer one: its publisher has registered others since"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """What a slot has."""

    run_id: str  # at most 32 ASCII characters
    owner: int
    sequence: int = 0  # 0 before the first write
    epoch: int = 0
    version: int = -1
    size_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        return self.sequence > 0 and self.sequence % 2 == 0


def pack(header: SlotHeader) -> bytes:
    return _FIELDS.pack(
        MAGIC,
        FORMAT,
        header.owner,
        header.sequence,
        header.epoch,
        header.version,
        header.size_bytes,
        header.run_id.encode("ascii"),
    )


def unpack(page: bytes) -> SlotHeader | None:
    """Return the header of a page, or None for one that is not ours."""
    if len(page) < _FIELDS.size:
        return None
    magic, form, owner, sequence, epoch, version, size, run = _FIELDS.unpack_from(page)
    if magic != MAGIC or form != FORMAT:
        return None
    return SlotHeader(
        run_id=run.rstrip(b"\0").decode("ascii", "replace"),
        owner=owner,
        sequence=sequence,
        epoch=epoch,
        version=version,
        size_bytes=size,
    )


def slot_name(run_id: str, owner: int, slot: int) -> str:
    return f"gyre-{run_id}-{owner}-{slot}"


def name_parts(name: str) -> tuple[str, int, int] | None:
    """Return (run, owner, slot) of a slot's name, or None."""
    found = _NAME.fullmatch(name)
    return None if found is None else (found["run"], int(found["owner"]), int(found["slot"]))


def find_version(
    page: bytes, name: str, *, epoch: int, version: int, size_bytes: int, room: int
) -> SlotHeader:
    """Return the header if the slot, which has `room` bytes, has the version whole."""
    found, named = unpack(page), name_parts(name)
    if found is None or named is None or (found.run_id, found.owner) != named[:2]:
        raise InputError(
            f"{name} is no slot of a run of Gyre, or of another run",
            hint="remove the file if no run is using it, and register the version again",
        )
    if not found.is_whole:
        raise SnapshotError(
            f"{name} is not whole: its publisher is writing it, or died while it wrote",
            hint=AGAIN,
        )
    if (found.epoch, found.version) != (epoch, version):
        raise InputError(
            f"{name} has version {found.version} of epoch {found.epoch}, and not version "
            f"{version} of epoch {epoch}",
            hint=AGAIN,
        )
    if not found.size_bytes == size_bytes <= room:
        raise SnapshotError(
            f"{name} has {found.size_bytes} bytes in a file of {room}, and its manifest lists "
            f"{size_bytes}",
            hint=AGAIN,
        )
    return found


def still_whole(page: bytes, name: str, before: SlotHeader) -> None:
    """Raise SnapshotError unless nothing was written since `before` was read."""
    found = unpack(page)
    if found != before:
        raise SnapshotError(
            f"{name} was overwritten while version {before.version} was read from it", hint=AGAIN
        )
