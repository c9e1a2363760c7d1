"""Registered: the swap to a version that its publisher has registered. In: an Offer of
RegisteredShards, the engine's own tensors. Out: a Swap.

A bucket is copied over the engine's numbers from where it is: the publisher's own pages of shared
memory, or staging memory that it shares with this process. Any other is read by a thread while the
last one is copied. The numbers are verified where they end up, on the engine's device, while
further buckets come.

`undo` takes the last version from where memory allows. Its bytes are kept on the engine's device
where a second set of weights has room. Else the publisher's last version is read again, which it
keeps until it begins the next but one; the swap begins only if the engine has that version to the
bit. Without one the bytes are kept in host memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from gyre.core.errors import GyreError
from gyre.core.events import Emit
from gyre.core.offers import Offer
from gyre.weights.landed import CopyOrder, Keeper, LandedSums, stream_for
from gyre.weights.manifest import find_faults, verify_manifest
from gyre.weights.read_plan import BytesOf, PlannedBucket, ReadPlan
from gyre.weights.tensor_part import TensorPart
from gyre.weights.transports.contracts import PartReader
from gyre.weights.transports.opened import OpenPart, PartOpener, verify_segment
from gyre.weights.transports.part_layout import ReadPiece, all_numbers, dtype_of

BUCKET_BYTES = 64 << 20
NUM_ROOMS = 3  # one is copied from, and two are read into or wait
SPARE_BYTES = 1 << 30  # of a device, left free for everything else

UndoFrom = Literal["device", "publisher", "host"]


def choose_undo(*, size_bytes: int, free_bytes: int, has_last: bool) -> UndoFrom:
    """Return where the last version's bytes come from if they are wanted. Pure."""
    if free_bytes >= size_bytes + SPARE_BYTES:
        return "device"
    return "publisher" if has_last else "host"


def free_bytes_of(device: torch.device) -> int:
    """Return the free memory of a device; of the host for a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


class _VersionReader:
    """The parts of one version, and how they are copied over an engine's numbers: all of them, or
    those that a tensor rank holds."""

    def __init__(
        self,
        offer: Offer,
        parts: tuple[OpenPart, ...],
        own: Mapping[str, Tensor],
        *,
        last_plan: object,
        bucket_bytes: int,
        held: TensorPart | None,
    ) -> None:
        self.offer = offer
        self._parts = parts
        self._own = own
        self._held = held
        self._device = next(iter(own.values())).device
        lent = [part.reader.lends_bytes for part in parts]
        self._is_lent = all(lent)
        entries = offer.manifest.entries
        broadcast = [part.is_broadcast for part in parts]
        bucket_bytes = min([bucket_bytes, *lent]) if self._is_lent else bucket_bytes
        layout: dict[str, Any] = {
            "broadcast": broadcast,
            "bucket_bytes": bucket_bytes,
            "by_rows": self._is_lent,
            "held": held,
        }
        if isinstance(last_plan, ReadPlan) and last_plan.fits(entries, own, **layout):
            self.plan = last_plan
        else:
            self.plan = ReadPlan(entries, own, **layout)

    @property
    def size_bytes(self) -> int:
        return sum(bucket.read.size_bytes for bucket in self.plan.buckets)

    @property
    def transport(self) -> str:
        """Return the schemes by which the parts were opened."""
        return "+".join(sorted({part.scheme for part in self._parts}))

    @property
    def is_mapped(self) -> bool:
        """Return whether all bytes are in this process's address space."""
        return all(part.reader.view(0, 0) is not None for part in self._parts)

    def verify_bytes(self) -> None:
        """Verify the segments of shared memory that numbers are read of."""
        for part in self._parts:
            wanted = all_numbers if self._held is None or part.is_broadcast else self._held.wanted
            for placed in part.placed:
                if not any(True for _ in wanted(placed)):
                    continue
                bytes_N = part.reader.view(placed.start, placed.stop)
                assert bytes_N is not None
                values_N = bytes_N.view(dtype_of(placed.entry))
                verify_segment(self.offer.manifest, placed.entry, placed, values_N)
        self._check()

    @torch.no_grad()
    def copy_over(self, keeper: Keeper | None) -> None:
        """Overwrite every number and verify them; tensor ranks do so together, later. `keeper`
        keeps what is overwritten."""
        sums, order = LandedSums(), CopyOrder(self._device)
        if keeper is not None:
            order.keep(keeper)
        for bucket, bytes_of in self._read_buckets():
            if not bucket.homes:
                continue  # of columns of other ranks
            values = bucket.values_of(bytes_of, self._device)
            order.copy(bucket.names, bucket.homes, values)
            if self._held is None:
                order.sum_up(partial(sums.add, bucket.read.pieces, self._own))
        order.finish()
        self._check()
        if self._held is None:
            verify_manifest(self.offer.manifest, self._own, matches=sums.match)

    def _check(self) -> None:
        for part in self._parts:
            part.reader.check()

    def _read_buckets(self) -> Iterator[tuple[PlannedBucket, BytesOf]]:
        """Yield each bucket with what returns the bytes of its pieces, valid until the next one is
        asked for."""
        if self.is_mapped:
            for bucket in self.plan.buckets:
                yield bucket, partial(_mapped_bytes, self._parts[bucket.read.owner].reader)
            return
        for bucket, bytes_N in self._lend() if self._is_lent else self._read_ahead():
            yield bucket, partial(_bytes_within, bytes_N)

    def _lend(self) -> Iterator[tuple[PlannedBucket, Tensor]]:
        """Yield each bucket as its reader lends it."""
        for bucket in self.plan.buckets:
            reader = self._parts[bucket.read.owner].reader
            yield bucket, reader.lend(bucket.read.stretches, next_stretches=bucket.following)

    def _read_ahead(self) -> Iterator[tuple[PlannedBucket, Tensor]]:
        """Yield each bucket as a thread has read it."""
        buckets = self.plan.buckets
        longest = max((one.read.size_bytes for one in buckets), default=0)
        rooms, stream = self._make_rooms(longest), self._reading_stream()
        copied: list[Any] = [None] * NUM_ROOMS  # event: the room may be read into again

        def read(number: int) -> Tensor:
            bucket, room = buckets[number], number % NUM_ROOMS
            part = self._parts[bucket.read.owner]
            bytes_N = rooms[part.on_device][room][: bucket.read.size_bytes]
            if copied[room] is not None:
                copied[room].synchronize()
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                part.reader.read(bucket.read.stretches, bytes_N, next_stretches=bucket.following)
            return bytes_N

        with ThreadPoolExecutor(1, thread_name_prefix="read-parts") as reading:
            numbers = range(len(buckets))
            ahead = deque(reading.submit(read, number) for number in numbers[:NUM_ROOMS])
            try:
                for number in numbers:
                    yield buckets[number], ahead.popleft().result()  # a read has a deadline
                    if stream is not None:
                        copying = torch.cuda.current_stream(self._device)
                        copied[number % NUM_ROOMS] = copying.record_event()
                    if number + NUM_ROOMS < len(buckets):
                        ahead.append(reading.submit(read, number + NUM_ROOMS))
            finally:
                for waiting in ahead:  # after an error none of them is started
                    waiting.cancel()

    def _reading_stream(self) -> Any:
        """Return the stream that buckets are read on, behind what uses the rooms' memory now; None
        on a CPU."""
        if self._device.type != "cuda":
            return None
        stream = stream_for("read", self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return stream

    def _make_rooms(self, size_bytes: int) -> dict[bool, list[Tensor]]:
        """Return room for some buckets: by False in host memory, by True on the engine's device."""
        is_cuda = self._device.type == "cuda"
        rooms: dict[bool, list[Tensor]] = {}
        for on_device in {part.on_device for part in self._parts}:
            device = self._device if on_device else torch.device("cpu")
            pin = is_cuda and not on_device
            rooms[on_device] = [
                torch.empty(size_bytes, dtype=torch.uint8, device=device, pin_memory=pin)
                for _ in range(NUM_ROOMS)
            ]
        return rooms


def _mapped_bytes(reader: PartReader, piece: ReadPiece) -> Tensor:
    bytes_N = reader.view(piece.at, piece.end)
    assert bytes_N is not None
    return bytes_N


def _bytes_within(bytes_N: Tensor, piece: ReadPiece) -> Tensor:
    return bytes_N[piece.start : piece.stop]


class ReadOver:
    """Parts are read over the engine's numbers, a bucket at a time."""

    moves_bytes = True

    def __init__(
        self,
        offer: Offer,
        own: Mapping[str, Tensor],
        *,
        parts: PartOpener,
        emit: Emit,
        bucket_bytes: int = BUCKET_BYTES,
        free_bytes: Callable[[torch.device], int] = free_bytes_of,
        held: TensorPart | None = None,
    ) -> None:
        """Open every part, and verify the bytes of shared memory on a CPU: elsewhere they would
        have to travel twice. `held`: what `own` is of the whole tensors. InputError or
        SnapshotError; nothing of `own` is written."""
        self._own = own
        self._opener = parts
        self._emit = emit
        self._held = held
        self._bucket_bytes = bucket_bytes
        self._free_bytes = free_bytes
        self._device = next(iter(own.values())).device
        # where the last version is: in memory, or to be read again
        self._keeper: Keeper | None = None
        self._last: _VersionReader | None = None
        self._has_run = False
        self._stack = ExitStack()
        with ExitStack() as stack:
            self._next = self._open(offer, stack)
            if self._device.type == "cpu" and self._next.is_mapped:
                self._next.verify_bytes()
            self._stack = stack.pop_all()

    def run(self) -> None:
        assert self._keeper is None and self._last is None, "this swap has run already"
        size_bytes = sum(tensor.nbytes for tensor in self._own.values())
        choose = partial(
            choose_undo, size_bytes=size_bytes, free_bytes=self._free_bytes(self._device)
        )
        if choose(has_last=True) == "publisher":
            self._last = self._open_last()
        undo_from = choose(has_last=self._last is not None)
        if undo_from != "publisher":
            keep_on = self._device if undo_from == "device" else torch.device("cpu")
            self._keeper = Keeper(self._own, keep_on)
        self._next.copy_over(self._keeper)
        self._has_run = True
        self._emit(
            "weights.read",
            version=self._next.offer.version,
            size_bytes=self._next.size_bytes,
            buckets=len(self._next.plan.buckets),
            undo_from=undo_from,
            transport=self._next.transport,
        )

    def verify(self) -> None:
        if self._held is not None:
            self._held.verify(self._next.offer.manifest, self._own)

    @torch.no_grad()
    def undo(self) -> None:
        if self._last is not None:
            self._last.copy_over(None)
        elif self._keeper is not None:
            self._keeper.put_back()
        self._has_run = False
        self._forget()

    def settle(self) -> None:
        if self._has_run:
            self._opener.last = self._next.offer
        self._forget()
        self._stack.close()

    def _forget(self) -> None:
        kept_any = self._keeper is not None
        self._keeper = self._last = None
        if kept_any and self._device.type == "cuda":
            torch.cuda.empty_cache()  # other processes of the device need the room

    def _open(self, offer: Offer, stack: ExitStack, *, from_slots: bool = False) -> _VersionReader:
        found = stack.enter_context(self._opener.open_parts(offer, from_slots=from_slots))
        reader = _VersionReader(
            offer,
            found,
            self._own,
            last_plan=self._opener.plan,
            bucket_bytes=self._bucket_bytes,
            held=self._held,
        )
        self._opener.plan = reader.plan
        return reader

    def _open_last(self) -> _VersionReader | None:
        """Open the version that the engine has to the bit, if its publisher has it still. A tensor
        rank cannot say so by itself."""
        last = self._opener.last
        if last is None or self._held is not None or find_faults(last.manifest, self._own):
            return None
        try:
            return self._open(last, self._stack, from_slots=True)
        except GyreError:  # its publisher is past it
            return None
