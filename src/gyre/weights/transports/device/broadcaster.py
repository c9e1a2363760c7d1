"""Broadcaster: a publisher's side of its groups. In: readers that come and go, the part that is
there now. Out: rounds; each broadcasts one version to all readers that waited when it began.

    waiting ──▶ seated in a round ──▶ has all.
       │              └──▶ lost: a reader hung up, the version was withdrawn, or a deadline passed.
       └─ hung up.

The group of a round that all have is kept for the next one. Where a round is lost, every other
reader hears of it, and the next round makes a new group.
"""

# N bytes of a bucket

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from gyre.core.errors import DeadlineError, GyreError, InputError, SnapshotError
from gyre.core.events import Emit
from gyre.distributed.init import hold_store
from gyre.weights.transports.device.broadcast_group import BroadcastGroup, GroupSeat
from gyre.weights.transports.device.live_part import LivePart
from gyre.weights.transports.device.served_part import CurrentPart
from gyre.weights.transports.part_range import PartRange


class GroupMember(Protocol):
    """A reader's connection, as the broadcaster sees it."""

    reader: bytes  # who it is
    epoch: int
    version: int
    peer: str

    def tell_lost(self, reason: str) -> None:
        """Send, unasked, that the group is lost."""
        ...


class _Round:
    """One version on its way to these members."""

    def __init__(self, members: tuple[GroupMember, ...], generation: int) -> None:
        self.members = members
        self.generation = generation
        self.settled: set[GroupMember] = set()  # that have all
        self.has_ended = False
        self.lost = ""  # why

    def look(self) -> None:
        if self.lost:
            raise SnapshotError(self.lost, hint="the next version makes a new group")


class Broadcaster:
    """The groups of one part, one after the other. Connections call it from their threads."""

    def __init__(
        self,
        current: CurrentPart[LivePart],
        *,
        name: str,
        device: torch.device,
        emit: Emit,
        bucket_bytes: int,
        deadline_s: float,
    ) -> None:
        self._current = current
        self._name = name
        self._device = device
        self._emit = emit
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._waiting: list[GroupMember] = []
        self._round: _Round | None = None
        self._group: BroadcastGroup | None = None
        self._readers: tuple[bytes, ...] = ()  # of the group
        self._generation = 0
        self._store: Any = None  # where members meet

    @property
    def generation(self) -> int:
        """Return how many groups there have been."""
        return self._generation

    def enter(self, member: GroupMember) -> None:
        with self._changed:
            self._waiting.append(member)

    def leave(self, member: GroupMember, reason: str) -> None:
        """Let a member go that hung up. It ends a round of which it has not all."""
        with self._changed:
            if member in self._waiting:
                self._waiting.remove(member)
            found = self._round
            if found is None or member not in found.members or member in found.settled:
                return
            self._lose(found, f"{member.peer} {reason}", but=member)

    def seat(self, member: GroupMember) -> GroupSeat:
        """Give a member its place, as soon as no other round runs. The first that asks begins a
        round with all that wait for the same version."""
        with self._changed:
            is_free = self._changed.wait_for(
                lambda: self._holds(member) or self._round is None, self._deadline_s
            )
            if not is_free:
                raise DeadlineError(
                    f"another round of {self._name} has not ended within {self._deadline_s:g} s",
                    hint="read the version from its slot",
                )
            if not self._holds(member):
                self._begin(member)
            assert self._round is not None
            place = self._round.members.index(member) + 1
            return self._seat(self._round, place)

    def settle(self, member: GroupMember, *, has_all: bool) -> None:
        """Note that a member has all, and raise unless what it was given is of the version."""
        with self._changed:
            found = self._round
            if found is not None and member in found.members:
                found.look()
                if has_all:
                    found.settled.add(member)
                    self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            if self._round is not None:
                self._lose(self._round, "the publisher ends")
            self._changed.wait_for(lambda: self._round is None, self._deadline_s)
            self._forget_group()
            self._store = None

    def _holds(self, member: GroupMember) -> bool:
        return self._round is not None and member in self._round.members

    def _begin(self, first: GroupMember) -> None:
        def fits(member: GroupMember) -> bool:
            return (member.epoch, member.version) == (first.epoch, first.version)

        # in an order of their own, so that the same readers have the same group
        members = tuple(
            sorted(
                (member for member in self._waiting if fits(member)),
                key=lambda member: member.reader,
            )
        )
        if first not in members:
            raise InputError(
                f"version {first.version} was broadcast to this reader before",
                hint="read it from its slot",
            )
        self._waiting = [member for member in self._waiting if not fits(member)]
        readers = tuple(member.reader for member in members)
        if self._group is None or readers != self._readers:
            self._forget_group()
            self._generation += 1
            self._readers = readers
        if self._store is None:
            self._store = hold_store(timeout_s=self._deadline_s)
        self._round = found = _Round(members, self._generation)
        threading.Thread(
            target=self._run, args=(found,), name="broadcast-parts", daemon=True
        ).start()

    def _seat(self, found: _Round, rank: int) -> GroupSeat:
        return GroupSeat(
            name=self._name,
            generation=found.generation,
            rank=rank,
            size=len(found.members) + 1,
            store_port=self._store.port,
        )

    def _run(self, found: _Round) -> None:
        """Broadcast the part, while its version is there and no member is lost."""
        try:
            if self._group is None:
                self._group = BroadcastGroup(
                    self._seat(found, 0),
                    self._device,
                    self._store,
                    look=found.look,
                    deadline_s=self._deadline_s,
                )
            self._broadcast(found, self._group)
        except (GyreError, RuntimeError) as error:
            with self._changed:
                self._lose(found, str(error))
        with self._changed:
            if found.lost:
                self._forget_group()
                self._emit("weights.reader_lost", peer=self._name, error=found.lost)
            found.has_ended = True
            self._round = None
            self._changed.notify_all()

    def _broadcast(self, found: _Round, group: BroadcastGroup) -> None:
        first = found.members[0]
        wanted = {"epoch": first.epoch, "version": first.version}
        with self._current.reading(**wanted) as part:
            size_bytes = part.size_bytes
        longest = min(self._bucket_bytes, size_bytes)
        rooms = [torch.empty(longest, dtype=torch.uint8, device=self._device) for _ in range(2)]
        limits: dict[str, Any] = {"look": found.look, "deadline_s": self._deadline_s}
        works: list[Any] = []  # one or two under way
        for number, start in enumerate(range(0, size_bytes, self._bucket_bytes)):
            if len(works) == 2:
                group.wait(works.pop(0), **limits)
            room_N = rooms[number % 2][: min(self._bucket_bytes, size_bytes - start)]
            with self._current.reading(**wanted) as part:
                part.fill([PartRange(start=start, stop=start + len(room_N), at=0)], room_N)
            works.append(group.begin(room_N))
        for work in works:
            group.wait(work, **limits)
        with self._changed:
            has_ended = self._changed.wait_for(
                lambda: found.lost or len(found.settled) == len(found.members), self._deadline_s
            )
            found.look()
        if not has_ended:
            raise DeadlineError(
                f"{len(found.members) - len(found.settled)} members have not said within "
                f"{self._deadline_s:g} s that they have version {first.version}",
                hint="a member stands still; the next version makes a new group",
            )

    def _lose(self, found: _Round, reason: str, but: GroupMember | None = None) -> None:
        if found.lost or found.has_ended:
            return
        found.lost = reason
        for member in found.members:
            if member is not but:
                member.tell_lost(reason)
        self._changed.notify_all()

    def _forget_group(self) -> None:
        group, self._group = self._group, None
        self._readers = ()
        if group is not None:
            group.abort()
