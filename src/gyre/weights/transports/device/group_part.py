"""Group part: a part that its publisher broadcasts to all readers at once. In: its address, the
groups that this process has joined. Out: a PartReader of bytes in their order.

The next bucket travels while one is read. Every reader reads the whole part, once, or the round is
lost for all.
"""

# N bytes

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from gyre.core.errors import GyreError, InputError, SnapshotError
from gyre.core.rounding import ceil_div
from gyre.weights.transports.addresses import LIVE_SCHEMES, PartAddress
from gyre.weights.transports.contracts import LendsNothing
from gyre.weights.transports.device.broadcast_group import LOOPBACK, BroadcastGroup, GroupSeat
from gyre.weights.transports.device.control import (
    CHECK,
    ID_BYTES,
    OPEN,
    SEAT,
    ControlLink,
    ControlRequest,
)
from gyre.weights.transports.part_range import PartRange


class JoinedGroups:
    """The groups of a process, by publisher. A group is kept from version to version, since to join
    one takes longer than to broadcast."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._groups: dict[str, BroadcastGroup] = {}
        self._readers: dict[str, bytes] = {}  # who this process is, to each publisher
        self._stores: dict[int, TCPStore] = {}  # by port

    def reader(self, name: str) -> bytes:
        return self._readers.setdefault(name, secrets.token_bytes(ID_BYTES))

    def join(
        self, seat: GroupSeat, *, look: Callable[[], None], deadline_s: float
    ) -> BroadcastGroup:
        """Return the group of a seat: the one that was joined before, or a new one. `look` raises
        when a member of it is lost."""
        known = self._groups.get(seat.name)
        if known is not None and known.seat == seat:
            return known
        if known is not None:
            self._groups.pop(seat.name).abort()
        joined = BroadcastGroup(
            seat,
            self.device,
            self._store(seat.store_port, deadline_s),
            look=look,
            deadline_s=deadline_s,
        )
        self._groups[seat.name] = joined
        return joined

    def _store(self, port: int, deadline_s: float) -> TCPStore:
        """Return a connection to a publisher's store, which is kept."""
        if port not in self._stores:
            try:
                self._stores[port] = TCPStore(
                    LOOPBACK,
                    port,
                    is_master=False,
                    timeout=timedelta(seconds=deadline_s),
                    use_libuv=True,
                )
            except RuntimeError as error:
                raise SnapshotError(
                    f"the publisher's store at port {port} cannot be reached: "
                    f"{str(error).splitlines()[0]}",
                    hint="its publisher has ended; the version may still be in its slot",
                ) from error
        return self._stores[port]

    def leave(self, name: str) -> None:
        """Leave the group of one publisher, after an error. Its publisher makes a new one, since
        this reader has another id from now on."""
        self._readers.pop(name, None)
        if name in self._groups:
            self._groups.pop(name).abort()

    def close(self) -> None:
        for name in tuple(self._groups):
            self.leave(name)
        self._stores.clear()


class GroupPart(LendsNothing):
    """A PartReader. One thread reads."""

    def __init__(
        self,
        address: PartAddress,
        *,
        epoch: int,
        version: int,
        size_bytes: int,
        groups: JoinedGroups,
        deadline_s: float,
    ) -> None:
        """Connect, and wait for the round among others. InputError where the version is no longer
        on its publisher's device."""
        self._name = address.name
        self._size_bytes = size_bytes
        self._groups = groups
        self._deadline_s = deadline_s
        self._link = ControlLink(address, deadline_s=deadline_s)
        scheme = LIVE_SCHEMES.index(address.scheme)
        opening = ControlRequest(
            op=OPEN,
            epoch=epoch,
            version=version,
            part_bytes=size_bytes,
            first=scheme,
            reader=groups.reader(address.name),
        )
        try:
            answer = self._link.ask(opening)
        except GyreError:
            self._link.close()
            raise
        self._bucket_bytes = answer.numbers[0]
        self._group: BroadcastGroup | None = None
        self._works: list[Any] = []  # of the buckets that travel
        self._rooms: list[Tensor] = []  # for two
        self._number = -1  # of the bucket at hand
        self._bucket_N = torch.empty(0, dtype=torch.uint8)
        self._is_settled = False

    def view(self, start: int, stop: int) -> None:
        return None

    def read(
        self,
        stretches: Sequence[PartRange],
        out_N: Tensor,
        *,
        next_stretches: Sequence[PartRange] = (),
    ) -> None:
        """Fill `out_N` with bytes that follow those read before. InputError for bytes that came
        before them: a broadcast is not repeated."""
        try:
            group = self._group or self._join()
            for one in stretches:
                assert not one.row_bytes, "a broadcast is read whole"
                self._read(group, one.start, out_N[one.at : one.end])
        except GyreError:
            self._leave()
            raise

    def check(self) -> None:
        """Raise SnapshotError unless every byte given so far was of the version."""
        has_all = self._number + 1 == self._num_buckets
        try:
            self._link.ask(ControlRequest(op=CHECK, first=int(has_all)))
        except GyreError:
            self._leave()
            raise
        self._is_settled = has_all

    def close(self) -> None:
        self._link.close()
        if self._group is not None and not self._is_settled:
            self._leave()

    @property
    def _num_buckets(self) -> int:
        return ceil_div(self._size_bytes, self._bucket_bytes)

    def _join(self) -> BroadcastGroup:
        generation, rank, size, port = self._link.ask(ControlRequest(op=SEAT)).numbers
        seat = GroupSeat(
            name=self._name, generation=generation, rank=rank, size=size, store_port=port
        )
        longest, device = min(self._bucket_bytes, self._size_bytes), self._groups.device
        self._rooms = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(2)]
        self._group = self._groups.join(seat, look=self._link.look, deadline_s=self._deadline_s)
        self._post(0)
        return self._group

    def _leave(self) -> None:
        self._link.close()
        if self._group is not None:
            self._groups.leave(self._name)

    def _post(self, number: int) -> None:
        """Begin to receive a bucket, into the room of the last but one."""
        assert self._group is not None
        count = min(self._bucket_bytes, self._size_bytes - number * self._bucket_bytes)
        room_N = self._rooms[number % 2][:count]
        self._works.append((self._group.begin(room_N), room_N))

    def _next(self, group: BroadcastGroup) -> None:
        work, room_N = self._works.pop(0)
        group.wait(work, look=self._link.look, deadline_s=self._deadline_s)
        self._number, self._bucket_N = self._number + 1, room_N
        if self._number + 1 < self._num_buckets:
            self._post(self._number + 1)

    def _read(self, group: BroadcastGroup, start: int, out_N: Tensor) -> None:
        at, stop = start, start + len(out_N)
        if self._number >= 0 and start < self._number * self._bucket_bytes:
            raise InputError(
                f"bytes from {start} on were broadcast before, and the part is at bucket "
                f"{self._number}",
                hint="read the version from its slot",
            )
        while at < stop:
            while self._number < at // self._bucket_bytes:
                self._next(group)
            first = at - self._number * self._bucket_bytes
            count = min(stop - at, len(self._bucket_N) - first)
            out_N[at - start : at - start + count].copy_(self._bucket_N[first : first + count])
            if self._bucket_N.is_cuda:  # its room is received into when the next is taken
                torch.cuda.current_stream(self._bucket_N.device).synchronize()
            at += count
