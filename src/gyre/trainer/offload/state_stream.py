"""State stream: brings offloaded optimizer state to the device in slices for an update. In: spans
whose state is offloaded, a function that updates one. Out: the same result as with resident state,
the bytes moved and the time waited.

While slice i is updated, slice i + 1 is fetched and slice i − 1 is written back. They pass through
a few fixed slots on the device. Two copy streams serve host memory. For a file one thread reads and
another writes, through pinned memory beside a GPU. A slot is refilled only after its contents are
written back, so the queue is bounded.
"""

# N numbers of a cut

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gyre.core.errors import DeadlineError, GyreError, SnapshotError
from gyre.kernels.device_wait import DeviceEvent
from gyre.trainer.adamw.adamw import Span
from gyre.trainer.offload.copy_streams import (
    Reached,
    compute_lane,
    make_lane,
    make_thread,
    seconds_between,
    wait_for,
)
from gyre.trainer.offload.slices import StateSlice, plan_cuts
from gyre.trainer.offload.state_fields import StateField
from gyre.trainer.offload.state_file import StateFile

Sent = tuple[Tensor, Tensor]  # where to in host memory, what from the device
LOOK_S = 1.0  # between two signs of life while a disk is waited for


@dataclass(slots=True)
class OffloadTraffic:
    """Transfers of updates since the last reset."""

    in_bytes: int = 0
    out_bytes: int = 0
    waited_s: float = 0.0  # of the computation, for transfers


@dataclass(slots=True)
class Slot:
    """Device memory for one slice."""

    device: dict[str, Tensor]  # by field, its items of a cut
    host: dict[str, Tensor]  # where a file is read to and written from; on a CPU the same memory
    computed: DeviceEvent = field(default_factory=Reached)  # the update of what it holds
    gradient: DeviceEvent = field(default_factory=Reached)  # its gradient has come
    fetched: Any = None  # by the carrier
    stored: Any = None


class Carrier(Protocol):
    """Fetches slices of the state into slots and stores them back."""

    def settle(self) -> None:
        """Wait until the last update's writes are durable, before the state is read again.
        Re-raises their error."""
        ...

    def fetch(self, cut: StateSlice, slot: Slot) -> None:
        """Start to fetch a slice. The slot's previous contents are stored first."""
        ...

    def fetched(self, slot: Slot) -> DeviceEvent:
        """Return the event after which the slot holds its slice. Re-raises a transfer error."""
        ...

    def store(self, cut: StateSlice, slot: Slot, beside: Sequence[Sent]) -> None:
        """Start to store the slot's results after `slot.computed`."""
        ...

    def drain(self, slots: Sequence[Slot]) -> None:
        """Wait until all slices are stored. Re-raises a transfer error."""
        ...

    def first_lost(self, slots: Sequence[Slot]) -> BaseException | None:
        """Wait for pending transfers after a failure, and return why a slice could not be
        stored."""
        ...


@dataclass
class HostCarrier:
    """Transfers between the device and host memory."""

    buffers: Mapping[str, Tensor]
    fields: Sequence[StateField]
    device: torch.device
    deadline_s: float

    def __post_init__(self) -> None:
        self._in, self._out = make_lane(self.device), make_lane(self.device)

    def settle(self) -> None:
        """Do nothing: `drain` has waited for the copies."""

    def fetch(self, cut: StateSlice, slot: Slot) -> None:
        self._in.after(slot.computed)
        self._in.after(slot.stored or Reached())
        for name, here, there in _in_cut(self.fields, cut):
            self._in.copy(slot.device[name][here], self.buffers[name][there])
        slot.fetched = self._in.mark()

    def fetched(self, slot: Slot) -> DeviceEvent:
        return slot.fetched

    def store(self, cut: StateSlice, slot: Slot, beside: Sequence[Sent]) -> None:
        self._out.after(slot.computed)
        for target_N, source_N in beside:
            self._out.copy(target_N, source_N)
        for name, here, there in _in_cut(self.fields, cut):
            self._out.copy(self.buffers[name][there], slot.device[name][here])
        slot.stored = self._out.mark()

    def drain(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.stored is not None:
                wait_for(slot.stored, _describe_store, self.deadline_s)

    def first_lost(self, slots: Sequence[Slot]) -> BaseException | None:
        return None  # a copy that a device refuses breaks the device


@dataclass
class FileCarrier:
    """Transfers between the device and a file. Close it before the file."""

    file: StateFile
    fields: Sequence[StateField]
    device: torch.device
    deadline_s: float
    progress: Callable[[], None]  # called while waiting for the disk, which has its own timeout
    _flushed: Future[None] | None = None

    def __post_init__(self) -> None:
        self._in, self._out = make_lane(self.device), make_lane(self.device)
        self._reader = make_thread("offload-read", self.device)
        self._writer = make_thread("offload-write", self.device)

    def settle(self) -> None:
        """Flush to the disk. Deferred write errors appear only here, and later reads would return
        old data."""
        if self._flushed is not None:
            self._result(self._flushed, "flush")
        self._flushed = None

    def fetch(self, cut: StateSlice, slot: Slot) -> None:
        slot.fetched = self._reader.submit(self._read, cut, slot, slot.stored)

    def fetched(self, slot: Slot) -> DeviceEvent:
        return self._result(slot.fetched, "read")

    def store(self, cut: StateSlice, slot: Slot, beside: Sequence[Sent]) -> None:
        self._out.after(slot.computed)
        for target_N, source_N in beside:
            self._out.copy(target_N, source_N)
        for name, here, _ in _in_cut(self.fields, cut):
            if slot.host[name] is not slot.device[name]:
                self._out.copy(slot.host[name][here], slot.device[name][here])
        slot.stored = self._writer.submit(self._write, cut, slot, self._out.mark())

    def drain(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.stored is not None:
                self._result(slot.stored, "write")
        self._flushed = self._writer.submit(self.file.flush)

    def first_lost(self, slots: Sequence[Slot]) -> BaseException | None:
        stores = [slot.stored for slot in slots if slot.stored is not None]
        fetches = [slot.fetched for slot in slots if slot.fetched is not None]
        wait([*stores, *fetches], self.deadline_s)
        return next(
            (error for one in stores if one.done() and (error := one.exception()) is not None), None
        )

    def close(self) -> None:
        pending = [self._flushed] if self._flushed is not None else []
        wait(pending, self.deadline_s)  # whatever it says: the state is thrown away
        for threads in (self._reader, self._writer):
            threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, cut: StateSlice, slot: Slot, stored: Future[None] | None) -> DeviceEvent:
        if stored is not None:
            self._result(stored, "write")
        self._in.after(slot.computed)
        for name, here, there in _in_cut(self.fields, cut):
            self.file.read(name, there.start, slot.host[name][here])
            if slot.host[name] is not slot.device[name]:
                self._in.copy(slot.device[name][here], slot.host[name][here])
        return self._in.mark()

    def _write(self, cut: StateSlice, slot: Slot, copied: DeviceEvent) -> None:
        wait_for(copied, _describe_store, self.deadline_s)
        for name, here, there in _in_cut(self.fields, cut):
            self.file.write(name, there.start, slot.host[name][here])

    def _result(self, work: Future[Any], what: str) -> Any:
        ends = time.monotonic() + self.deadline_s
        while not work.done() and (left_s := ends - time.monotonic()) > 0:
            wait([work], min(LOOK_S, left_s))
            self.progress()
        if work.done():
            return work.result()
        raise DeadlineError(
            f"a {what} of offloaded optimizer state in {self.file.path} did not end within "
            f"{self.deadline_s:g} s",
            hint="the disk is slow or stuck: raise trainer.offload_deadline_s, or check it",
        )


@dataclass(kw_only=True)
class Stream:
    """Updates spans slice by slice. Not thread-safe: runs on the compute thread."""

    slots: Sequence[Slot]
    carrier: Carrier | None  # without one the state is resident, and only the gradient is fetched
    fields: Sequence[StateField]  # that visit the device
    numbers: int  # capacity of a slot
    device: torch.device
    deadline_s: float
    where: str  # the state is, in error messages
    progress: Callable[[], None]  # called after each slice
    traffic: OffloadTraffic = field(default_factory=OffloadTraffic)
    _torn: BaseException | None = None

    def __post_init__(self) -> None:
        self._gradients = make_lane(self.device)

    def check(self) -> None:
        """Raise SnapshotError when an update was interrupted: some numbers are new, others old."""
        if self._torn is not None:
            raise SnapshotError(
                f"an update of the optimizer state in {self.where} was cut short: {self._torn}",
                hint="resume the run from its last snapshot",
            ) from self._torn

    def run(
        self,
        spans: Sequence[Span],
        update: Callable[[Span], None],
        beside: Callable[[Span], Sequence[Sent]] = lambda part: (),
    ) -> None:
        """Call `update` on every number of the spans once, with all its tensors on the device.
        `beside` returns (destination, source) copies of an updated part to the host, cast where
        dtypes differ."""
        self.check()
        cuts = plan_cuts([(span.first, span.last) for span in spans], numbers=self.numbers)
        try:
            if self.carrier is not None:
                began = time.perf_counter()
                self.carrier.settle()
                self.traffic.waited_s += time.perf_counter() - began
            self._run(cuts, spans, update, beside)
        except BaseException as error:
            lost = self.carrier.first_lost(self.slots) if self.carrier is not None else None
            self._torn = lost or error
            if isinstance(lost, GyreError) and lost is not error:
                # a write that failed comes before whatever failed because of it
                raise lost from error
            raise

    def _run(
        self,
        cuts: Sequence[StateSlice],
        spans: Sequence[Span],
        update: Callable[[Span], None],
        beside: Callable[[Span], Sequence[Sent]],
    ) -> None:
        compute = compute_lane(self.device)
        before, gaps = compute.mark(), []
        for slot in self.slots:
            slot.computed = before  # whatever was done to its memory since the last update
        if cuts:
            self._fetch(cuts[0], spans, self.slots[0])
        for index, cut in enumerate(cuts):
            if index + 1 < len(cuts):
                self._fetch(cuts[index + 1], spans, self.slots[(index + 1) % len(self.slots)])
            slot = self.slots[index % len(self.slots)]
            if self.carrier is not None:
                compute.after(self.carrier.fetched(slot))
            compute.after(slot.gradient)
            gaps.append((before, compute.mark()))
            parts = [
                self._staged(spans[one.span].part(one.first, one.last), cut, slot)
                for one in cut.pieces
            ]
            for part in parts:
                update(part)
            before = slot.computed = compute.mark()
            self._store(cut, slot, [sent for part in parts for sent in beside(part)])
            self.progress()
        began = time.perf_counter()
        if self.carrier is not None:
            self.carrier.drain(self.slots)
        wait_for(before, lambda: "an update of optimizer state", self.deadline_s)
        self.traffic.waited_s += (
            time.perf_counter() - began + sum(seconds_between(*gap) for gap in gaps)
        )

    def _fetch(self, cut: StateSlice, spans: Sequence[Span], slot: Slot) -> None:
        if self.carrier is not None:
            self.carrier.fetch(cut, slot)
        if "grad" in slot.device:
            self._gradients.after(slot.computed)
            for piece in cut.pieces:
                at = slice(piece.first - cut.first, piece.last - cut.first)
                self._gradients.copy(
                    slot.device["grad"][at], spans[piece.span].part(piece.first, piece.last).grad_N
                )
            slot.gradient = self._gradients.mark()
        self.traffic.in_bytes += self._bytes_of(cut, self.fields)

    def _store(self, cut: StateSlice, slot: Slot, beside: Sequence[Sent]) -> None:
        if self.carrier is None:
            assert not beside, "what goes with the state goes where the state is away"
            return
        self.carrier.store(cut, slot, beside)
        self.traffic.out_bytes += self._bytes_of(
            cut, [one for one in self.fields if one.name != "grad"]
        )
        self.traffic.out_bytes += sum(target_N.nbytes for target_N, _ in beside)

    def _staged(self, part: Span, cut: StateSlice, slot: Slot) -> Span:
        """Return a piece with its tensors in the slot, where the slot has them."""
        there = {
            one.serves: slot.device[one.name][one.within(cut.first, part.first, part.last)]
            for one in self.fields
            if one.covers(part.first, part.last)
        }
        return replace(part, **there)

    def _bytes_of(self, cut: StateSlice, fields: Sequence[StateField]) -> int:
        spaces = {one.name: one.dtype.itemsize for one in fields}
        return sum(
            (here.stop - here.start) * spaces[name] for name, here, _ in _in_cut(fields, cut)
        )

    def take_traffic(self) -> OffloadTraffic:
        """Return and reset the transfers."""
        taken, self.traffic = self.traffic, OffloadTraffic()
        return taken


def _describe_store() -> str:
    return "a copy of optimizer state to the host"


def _in_cut(fields: Sequence[StateField], cut: StateSlice) -> Iterator[tuple[str, slice, slice]]:
    """Return (name, items of the slot, items of the buffer) of each field that overlaps the
    slice."""
    for one in fields:
        first, last = one.meets(cut.first, cut.last)
        if first < last:
            yield one.name, one.within(cut.first, first, last), one.at(first, last)
