"""Offload: optimiser state that lives in host memory or in a file visits the device in cuts for an
update. In: spans whose state is away, a function that updates one. Out: the same numbers as if the
state had been there, the bytes moved and the time waited.

While cut i is updated, cut i + 1 is on its way in and cut i − 1 on its way back, through a few
fixed places on the device (slots). Host memory is copied by two lanes; a file is read by one thread
and written by another, through pinned memory where there is a GPU. A slot is filled again only when
what it held is back, so nothing queues up.
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
from gyre.trainer.adamw.adamw import Span
from gyre.trainer.offload.copy_streams import (
    CopyEvent,
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
    """What updates have moved since it was last taken."""

    in_bytes: int = 0
    out_bytes: int = 0
    waited_s: float = 0.0  # of the computation, for transfers


@dataclass(slots=True)
class Slot:
    """One place on the device for a cut."""

    device: dict[str, Tensor]  # by field, its items of a cut
    host: dict[str, Tensor]  # where a file is read to and written from; on a CPU the same memory
    computed: CopyEvent = field(default_factory=Reached)  # the update of what it holds
    gradient: CopyEvent = field(default_factory=Reached)  # its gradient has come
    fetched: Any = None  # by the carrier
    stored: Any = None


class Carrier(Protocol):
    """Brings cuts of the state into slots and back."""

    def settle(self) -> None:
        """Before the state is read again: wait until what the last update wrote is safe. Raises
        what hindered it."""
        ...

    def fetch(self, cut: StateSlice, slot: Slot) -> None:
        """Begin; what the slot held before is brought back first."""
        ...

    def fetched(self, slot: Slot) -> CopyEvent:
        """The mark behind which the slot holds its cut. Raises what hindered it."""
        ...

    def store(self, cut: StateSlice, slot: Slot, beside: Sequence[Sent]) -> None:
        """Begin to bring back what `slot.computed` is the end of, and what was made of it."""
        ...

    def drain(self, slots: Sequence[Slot]) -> None:
        """Wait until everything is back. Raises what hindered it."""
        ...

    def first_lost(self, slots: Sequence[Slot]) -> BaseException | None:
        """After a failure: wait for what is under way, and return why a cut could not be brought
        back."""
        ...


class HostCarrier:
    """Between the device and host memory."""

    def __init__(
        self,
        buffers: Mapping[str, Tensor],
        fields: Sequence[StateField],
        device: torch.device,
        deadline_s: float,
    ) -> None:
        self._buffers, self._fields, self._deadline_s = buffers, fields, deadline_s
        self._in, self._out = make_lane(device), make_lane(device)

    def settle(self) -> None:
        """Copies were waited for by `drain`."""

    def fetch(self, cut: StateSlice, slot: Slot) -> None:
        self._in.after(slot.computed)
        self._in.after(slot.stored or Reached())
        for name, here, there in _in_cut(self._fields, cut):
            self._in.copy(slot.device[name][here], self._buffers[name][there])
        slot.fetched = self._in.mark()

    def fetched(self, slot: Slot) -> CopyEvent:
        return slot.fetched

    def store(self, cut: StateSlice, slot: Slot, beside: Sequence[Sent]) -> None:
        self._out.after(slot.computed)
        for target_N, source_N in beside:
            self._out.copy(target_N, source_N)
        for name, here, there in _in_cut(self._fields, cut):
            self._out.copy(self._buffers[name][there], slot.device[name][here])
        slot.stored = self._out.mark()

    def drain(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.stored is not None:
                wait_for(
                    slot.stored,
                    deadline_s=self._deadline_s,
                    what="a copy of optimizer state to the host",
                )

    def first_lost(self, slots: Sequence[Slot]) -> BaseException | None:
        return None  # a copy that a device refuses breaks the device


class FileCarrier:
    """Between the device and a file. `close` before the file's own."""

    def __init__(
        self,
        file: StateFile,
        fields: Sequence[StateField],
        device: torch.device,
        deadline_s: float,
        progress: Callable[[], None],
    ) -> None:
        """`progress` is called while the disk is waited for: that has a deadline of its own."""
        self._file, self._fields, self._deadline_s, self._progress = (
            file,
            fields,
            deadline_s,
            progress,
        )
        self._in, self._out = make_lane(device), make_lane(device)
        self._reader, self._writer = (
            make_thread("offload-read", device),
            make_thread("offload-write", device),
        )
        self._flushed: Future[None] | None = None

    def settle(self) -> None:
        """Until the disk has it: what it refuses is told only then, and would be read as it was
        before."""
        if self._flushed is not None:
            self._result(self._flushed, "flush")
        self._flushed = None

    def fetch(self, cut: StateSlice, slot: Slot) -> None:
        slot.fetched = self._reader.submit(self._read, cut, slot, slot.stored)

    def fetched(self, slot: Slot) -> CopyEvent:
        return self._result(slot.fetched, "read")

    def store(self, cut: StateSlice, slot: Slot, beside: Sequence[Sent]) -> None:
        self._out.after(slot.computed)
        for target_N, source_N in beside:
            self._out.copy(target_N, source_N)
        for name, here, _ in _in_cut(self._fields, cut):
            if slot.host[name] is not slot.device[name]:
                self._out.copy(slot.host[name][here], slot.device[name][here])
        slot.stored = self._writer.submit(self._write, cut, slot, self._out.mark())

    def drain(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.stored is not None:
                self._result(slot.stored, "write")
        self._flushed = self._writer.submit(self._file.flush)

    def first_lost(self, slots: Sequence[Slot]) -> BaseException | None:
        stores = [slot.stored for slot in slots if slot.stored is not None]
        fetches = [slot.fetched for slot in slots if slot.fetched is not None]
        wait([*stores, *fetches], self._deadline_s)
        return next(
            (error for one in stores if one.done() and (error := one.exception()) is not None), None
        )

    def close(self) -> None:
        pending = [self._flushed] if self._flushed is not None else []
        wait(pending, self._deadline_s)  # whatever it says: the state is thrown away
        for threads in (self._reader, self._writer):
            threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, cut: StateSlice, slot: Slot, stored: Future[None] | None) -> CopyEvent:
        if stored is not None:
            self._result(stored, "write")
        self._in.after(slot.computed)
        for name, here, there in _in_cut(self._fields, cut):
            self._file.read(name, there.start, slot.host[name][here])
            if slot.host[name] is not slot.device[name]:
                self._in.copy(slot.device[name][here], slot.host[name][here])
        return self._in.mark()

    def _write(self, cut: StateSlice, slot: Slot, copied: CopyEvent) -> None:
        wait_for(copied, deadline_s=self._deadline_s, what="a copy of optimizer state to the host")
        for name, here, there in _in_cut(self._fields, cut):
            self._file.write(name, there.start, slot.host[name][here])

    def _result(self, work: Future[Any], what: str) -> Any:
        ends = time.monotonic() + self._deadline_s
        while not work.done() and (left_s := ends - time.monotonic()) > 0:
            wait([work], min(LOOK_S, left_s))
            self._progress()
        if work.done():
            return work.result()
        raise DeadlineError(
            f"a {what} of offloaded optimizer state in {self._file.path} did not end within "
            f"{self._deadline_s:g} s",
            hint="the disk is slow or stuck: raise trainer.offload_deadline_s, or check it",
        )


class Stream:
    """Updates spans cut by cut. Not thread-safe: runs on the compute thread."""

    def __init__(
        self,
        slots: Sequence[Slot],
        carrier: Carrier | None,
        *,
        fields: Sequence[StateField],
        numbers: int,
        device: torch.device,
        deadline_s: float,
        where: str,
        progress: Callable[[], None],
    ) -> None:
        """`fields`: what visits the device. `numbers`: of a cut, as the slots have them. Without a
        carrier the state is on the device, and only the gradient comes. `where`: for the words of
        errors. `progress` is called after each cut."""
        self._slots, self._carrier, self._numbers, self._device = slots, carrier, numbers, device
        self._fields = tuple(fields)
        self._deadline_s, self._where, self._progress = deadline_s, where, progress
        self._gradients = make_lane(device)
        self._torn: BaseException | None = None
        self.traffic = OffloadTraffic()

    def check(self) -> None:
        """SnapshotError when an update was cut short: some numbers are of after it, some of
        before."""
        if self._torn is not None:
            raise SnapshotError(
                f"an update of the optimizer state in {self._where} was cut short: {self._torn}",
                hint="resume the run from its last snapshot",
            ) from self._torn

    def run(
        self,
        spans: Sequence[Span],
        update: Callable[[Span], None],
        beside: Callable[[Span], Sequence[Sent]] = lambda part: (),
    ) -> None:
        """Call `update` for every number of the spans once, with all its tensors on the device.
        `beside` says what of an updated part goes to the host with the state: (where to, what),
        rounded on the way where dtypes differ."""
        self.check()
        cuts = plan_cuts([(span.first, span.last) for span in spans], numbers=self._numbers)
        try:
            if self._carrier is not None:
                began = time.perf_counter()
                self._carrier.settle()
                self.traffic.waited_s += time.perf_counter() - began
            self._run(cuts, spans, update, beside)
        except BaseException as error:
            lost = self._carrier.first_lost(self._slots) if self._carrier is not None else None
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
        compute = compute_lane(self._device)
        before, gaps = compute.mark(), []
        for slot in self._slots:
            slot.computed = before  # whatever was done to its memory since the last update
        if cuts:
            self._fetch(cuts[0], spans, self._slots[0])
        for index, cut in enumerate(cuts):
            if index + 1 < len(cuts):
                self._fetch(cuts[index + 1], spans, self._slots[(index + 1) % len(self._slots)])
            slot = self._slots[index % len(self._slots)]
            if self._carrier is not None:
                compute.after(self._carrier.fetched(slot))
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
            self._progress()
        began = time.perf_counter()
        if self._carrier is not None:
            self._carrier.drain(self._slots)
        wait_for(before, deadline_s=self._deadline_s, what="an update of optimizer state")
        self.traffic.waited_s += (
            time.perf_counter() - began + sum(seconds_between(*gap) for gap in gaps)
        )

    def _fetch(self, cut: StateSlice, spans: Sequence[Span], slot: Slot) -> None:
        if self._carrier is not None:
            self._carrier.fetch(cut, slot)
        if "grad" in slot.device:
            self._gradients.after(slot.computed)
            for piece in cut.pieces:
                at = slice(piece.first - cut.first, piece.last - cut.first)
                self._gradients.copy(
                    slot.device["grad"][at], spans[piece.span].part(piece.first, piece.last).grad_N
                )
            slot.gradient = self._gradients.mark()
        self.traffic.in_bytes += self._bytes_of(cut, self._fields)

    def _store(self, cut: StateSlice, slot: Slot, beside: Sequence[Sent]) -> None:
        if self._carrier is None:
            assert not beside, "what goes with the state goes where the state is away"
            return
        self._carrier.store(cut, slot, beside)
        self.traffic.out_bytes += self._bytes_of(
            cut, [one for one in self._fields if one.name != "grad"]
        )
        self.traffic.out_bytes += sum(target_N.nbytes for target_N, _ in beside)

    def _staged(self, part: Span, cut: StateSlice, slot: Slot) -> Span:
        """A piece with its tensors from the slot, where the slot has them."""
        there = {
            one.serves: slot.device[one.name][one.within(cut.first, part.first, part.last)]
            for one in self._fields
            if one.covers(part.first, part.last)
        }
        return replace(part, **there)

    def _bytes_of(self, cut: StateSlice, fields: Sequence[StateField]) -> int:
        spaces = {one.name: one.dtype.itemsize for one in fields}
        return sum(
            (here.stop - here.start) * spaces[name] for name, here, _ in _in_cut(fields, cut)
        )

    def take_traffic(self) -> OffloadTraffic:
        """What was moved since the last call."""
        taken, self.traffic = self.traffic, OffloadTraffic()
        return taken


def _in_cut(fields: Sequence[StateField], cut: StateSlice) -> Iterator[tuple[str, slice, slice]]:
    """(name, items of the slot, items of the buffer) of each field that has numbers in the cut."""
    for one in fields:
        first, last = one.meets(cut.first, cut.last)
        if first < last:
            yield one.name, one.within(cut.first, first, last), one.at(first, last)
