"""Opened versions: registered shards in a receiver's process. In: an Offer of RegisteredShards, and
how this receiver may read. Out: its parts; whole tensors by name, verified.

A tensor in one segment of shared memory is a view of the publisher's pages. Any other is
assembled in host memory when it is asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.core.errors import GyreError, SnapshotError
from gyre.core.events import Emit
from gyre.core.offers import Offer, RegisteredPart
from gyre.core.records import Manifest, TensorEntry
from gyre.kernels.checksum import as_hex, checksums
from gyre.weights.boxes import views
from gyre.weights.manifest import AGAIN, segment_run
from gyre.weights.transports.addresses import (
    CUDA_IPC,
    GROUP_SCHEMES,
    LIVE_SCHEMES,
    SHARED_MEMORY,
    SHM,
    TCP,
    PartAddress,
    choose_address,
    host_id,
)
from gyre.weights.transports.contracts import PartReader
from gyre.weights.transports.device.cuda_ipc import Staging, open_cuda
from gyre.weights.transports.device.group_part import GroupPart, JoinedGroups
from gyre.weights.transports.device.slot_behind import SlotBehind
from gyre.weights.transports.device.staged_part import StagedPart
from gyre.weights.transports.part_layout import PlacedSegment, dtype_of, part_bytes, place_part
from gyre.weights.transports.part_range import PartRange
from gyre.weights.transports.slots import MappedSlot, SharedMemoryPart
from gyre.weights.transports.tcp_reader import TcpPart

CPU = torch.device("cpu")
SLOT_S = 0.02  # between two looks whether a slot is whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a receiver reads registered parts."""

    host_id: str  # of its shared memory, as `addresses.host_id` names it
    folder: Path = SHARED_MEMORY
    preference: tuple[str, ...] = (SHM, TCP)
    pin: bool = False  # page-lock shared memory for a CUDA device
    device: torch.device = CPU  # where bytes from other devices arrive
    open_staging: Callable[[torch.device, int, bytes], Staging] = open_cuda
    token: bytes = b""  # of the run, for servers; without one nothing is read by TCP
    num_connections: int = 4  # to each server
    deadline_s: float = 60.0  # of each request to a server


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenPart:
    """A part that can be read, and the segments in it."""

    reader: PartReader
    placed: tuple[PlacedSegment, ...]
    scheme: str  # by which it was opened

    @property
    def on_device(self) -> bool:
        """Return whether its bytes arrive on the receiver's device."""
        return self.scheme in LIVE_SCHEMES

    @property
    def is_broadcast(self) -> bool:
        """Return whether every reader must read the whole part."""
        return self.scheme in GROUP_SCHEMES


class PartOpener:
    """Opens parts. Slots of shared memory stay mapped from version to version, as their publisher
    uses them again."""

    def __init__(
        self,
        reading: Reading | None = None,
        *,
        pin: bool = False,
        emit: Emit = lambda kind, **fields: None,
    ) -> None:
        """Read from the shared memory of this host alone if `reading` is left out."""
        self._given = reading
        self._pin = pin
        self._emit = emit
        self._slots: dict[str, MappedSlot] = {}
        self._groups: JoinedGroups | None = None
        self.last: Offer | None = None  # that an engine has taken
        self.plan: object = None  # of the last swap; the next one may use it again

    @property
    def _reading(self) -> Reading:
        if self._given is None:  # now, since a host without shared memory may never be asked
            self._given = Reading(host_id=host_id(), preference=(SHM,), pin=self._pin)
        return self._given

    @contextmanager
    def open_parts(
        self, offer: Offer, *, from_slots: bool = False
    ) -> Iterator[tuple[OpenPart, ...]]:
        """Open all parts of a version, by owner. `from_slots`: those of a version that is not the
        newest. InputError for one that is not there, SnapshotError for one that is not whole."""
        assert offer.registered is not None, offer.kind
        with ExitStack() as stack:
            parts = []
            for owner, part in enumerate(offer.registered.parts):
                placed = place_part(offer.manifest.entries, owner)
                if part_bytes(placed) != part.size_bytes:
                    raise SnapshotError(
                        f"rank {owner} registered {part.size_bytes} bytes of version "
                        f"{offer.version}, and its manifest lists {part_bytes(placed)}",
                        hint="register the version again",
                    )
                scheme, reader = self._open(part, offer.manifest, from_slots=from_slots)
                stack.callback(reader.close)
                parts.append(OpenPart(reader=reader, placed=placed, scheme=scheme))
            yield tuple(parts)

    def close(self) -> None:
        """Keep nothing mapped, once the parts that are open are closed."""
        self.plan = None
        for slot in self._slots.values():
            slot.retire()
        self._slots.clear()
        if self._groups is not None:
            self._groups.close()
            self._groups = None

    def _open(
        self, part: RegisteredPart, manifest: Manifest, *, from_slots: bool
    ) -> tuple[str, PartReader]:
        """Open the first address that can be opened; behind one of a device the part's slot, where
        the preference has one. Returns its scheme too."""
        reading = self._reading
        offered, host = part.addresses, reading.host_id
        behind = tuple(one for one in reading.preference if one not in LIVE_SCHEMES)
        wanted = behind if from_slots else reading.preference
        first = choose_address(offered, host=host, preference=wanted)
        if first.scheme not in LIVE_SCHEMES:
            return first.scheme, self._open_slot(first, part, manifest)
        if not behind:
            return first.scheme, self._open_live(first, part, manifest)

        def tell(error: GyreError) -> None:
            self._emit(
                "weights.slot_used",
                version=manifest.version,
                address=str(first),
                reason=error.message,
            )

        def open_slot() -> PartReader:
            ends_at = time.monotonic() + reading.deadline_s
            while True:
                try:
                    return self._open_slot(second, part, manifest)
                except SnapshotError:  # its publisher may be writing it, behind its device
                    if time.monotonic() > ends_at:
                        raise
                time.sleep(SLOT_S)

        second = choose_address(offered, host=host, preference=behind)
        try:
            live = self._open_live(first, part, manifest)
        except GyreError as error:
            tell(error)
            return second.scheme, open_slot()
        return first.scheme, SlotBehind(live, open_slot, tell)

    def _open_live(
        self, address: PartAddress, part: RegisteredPart, manifest: Manifest
    ) -> PartReader:
        reading = self._reading
        wanted: dict[str, Any] = {
            "epoch": manifest.epoch,
            "version": manifest.version,
            "size_bytes": part.size_bytes,
            "deadline_s": reading.deadline_s,
        }
        if address.scheme == CUDA_IPC:
            return StagedPart(
                address, open_staging=partial(reading.open_staging, reading.device), **wanted
            )
        if self._groups is None:
            self._groups = JoinedGroups(reading.device)
        return GroupPart(address, groups=self._groups, **wanted)

    def _open_slot(
        self, address: PartAddress, part: RegisteredPart, manifest: Manifest
    ) -> PartReader:
        reading = self._reading
        wanted = {
            "epoch": manifest.epoch,
            "version": manifest.version,
            "size_bytes": part.size_bytes,
        }
        if address.scheme == SHM:
            return SharedMemoryPart(self._map(address.name), **wanted)
        return TcpPart(
            address,
            token=reading.token,
            num_connections=reading.num_connections,
            deadline_s=reading.deadline_s,
            **wanted,
        )

    def _map(self, name: str) -> MappedSlot:
        for known in [known for known, slot in self._slots.items() if not slot.is_current]:
            self._slots.pop(known).retire()  # its publisher has ended, or took another file
        if name not in self._slots:
            reading = self._reading
            self._slots[name] = MappedSlot(reading.folder, name, pin=reading.pin)
        return self._slots[name]


class OpenTensors(Mapping[str, Tensor]):
    """Whole host tensors, in the manifest's order. Each is read and verified when it is asked for,
    and not kept."""

    def __init__(self, manifest: Manifest, parts: tuple[OpenPart, ...]) -> None:
        self._manifest = manifest
        self._entries = {entry.name: entry for entry in manifest.entries}
        self._segments: dict[str, list[tuple[PartReader, PlacedSegment]]] = {
            name: [] for name in self._entries
        }
        for part in parts:
            for placed in part.placed:
                self._segments[placed.entry.name].append((part.reader, placed))

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        segments = self._segments[name]
        if len(segments) == 1 and segments[0][1].is_whole:
            return self._read(*segments[0]).view(entry.shape)
        whole = torch.empty(entry.shape, dtype=dtype_of(entry))
        for reader, placed in segments:
            values_N = self._read(reader, placed)
            for home in views(whole, placed.run):
                home.copy_(values_N[: home.numel()].view(home.shape))
                values_N = values_N[home.numel() :]
        return whole

    def _read(self, reader: PartReader, placed: PlacedSegment) -> Tensor:
        """Return a segment's numbers, flat and verified."""
        bytes_N = reader.view(placed.start, placed.stop)
        if bytes_N is None:
            bytes_N = torch.empty(placed.stop - placed.start, dtype=torch.uint8)
            reader.read([PartRange(start=placed.start, stop=placed.stop, at=0)], bytes_N)
        values_N = bytes_N.view(dtype_of(placed.entry))
        verify_segment(self._manifest, placed.entry, placed, values_N)
        return values_N


def verify_segment(
    manifest: Manifest, entry: TensorEntry, placed: PlacedSegment, values_N: Tensor
) -> None:
    """Raise SnapshotError unless a segment's numbers have its checksum."""
    segment = placed.segment
    found = as_hex(int(checksums([segment_run(entry, segment, values_N)])))
    if found != segment.checksum:
        raise SnapshotError(
            f"{entry.name} of version {manifest.version}: numbers {segment.start} to "
            f"{segment.stop} from rank {segment.owner} have checksum {found}, and not "
            f"{segment.checksum}",
            hint=AGAIN,
        )
