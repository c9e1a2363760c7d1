"""Control: what a reader of a live part and its publisher say to each other, over a unix socket of
one user. In: an address; requests. Out: answers, within a deadline; the error that one names.

    reader      open      The part of a version, by a scheme.
    reader      seat      Its place in a group. The publisher waits until the group begins.
    reader      fill      Stretches of the part into a staging bucket, which the answer names.
    reader      check     Whether all that was given is of the version.
    publisher   answer    To each request; or unasked, that the group is lost.

No byte of weights crosses the socket. It has no file, and ends with the publisher's process. Both
sides ask the system for the other's user.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from dataclasses import dataclass

from gyre.core.errors import DeadlineError, GyreError, InputError, SnapshotError
from gyre.weights.transports.addresses import PartAddress
from gyre.weights.transports.part_range import PartRange

OPEN, SEAT, FILL, CHECK = range(1, 5)
STAGING_BUCKETS = 3  # of a reader at once: one lent, one filled, one that may be copied from still
OK, GONE, LOST = range(3)
ID_BYTES = 16
_REQUEST = struct.Struct(f"<BqqQQQ{ID_BYTES}s")
_ANSWER = struct.Struct("<BQQQQ256s")
_STRETCH = struct.Struct("<QQQQQ")
_CREDENTIALS = struct.Struct("iII")  # pid, user, group
REQUEST_BYTES, STRETCH_BYTES, ANSWER_BYTES = _REQUEST.size, _STRETCH.size, _ANSWER.size
AGAIN = "the version may still be in its slot; its publisher's own log says more"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest:
    """What a reader asks for."""

    op: int
    epoch: int = 0
    version: int = 0
    part_bytes: int = 0
    first: int = 0  # open: the scheme; check: whether the reader has all
    reader: bytes = bytes(ID_BYTES)  # differs for each process, and after a group was lost
    stretches: tuple[PartRange, ...] = ()  # fill: of one bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAnswer:
    """What the publisher says."""

    code: int
    # open: bytes of a bucket, staging buckets; seat: generation, rank, size, port; fill: the bucket
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0)
    text: bytes = b""  # of an error; or how staging memory is opened


def pack_request(request: ControlRequest) -> bytes:
    head = _REQUEST.pack(
        request.op,
        request.epoch,
        request.version,
        request.part_bytes,
        request.first,
        len(request.stretches),
        request.reader,
    )
    return head + b"".join(
        _STRETCH.pack(one.start, one.stop, one.at, one.row_bytes, one.pitch_bytes)
        for one in request.stretches
    )


def count_stretches(head: bytes) -> int:
    """Return how many stretches follow the head of a request."""
    return _REQUEST.unpack(head)[5]


def unpack_request(data: bytes) -> ControlRequest:
    """Return a request of its head and the stretches behind it."""
    op, epoch, version, part_bytes, first, _, reader = _REQUEST.unpack_from(data)
    return ControlRequest(
        op=op,
        epoch=epoch,
        version=version,
        part_bytes=part_bytes,
        first=first,
        reader=reader,
        stretches=tuple(
            PartRange(start=start, stop=stop, at=at, row_bytes=row_bytes, pitch_bytes=pitch_bytes)
            for start, stop, at, row_bytes, pitch_bytes in _STRETCH.iter_unpack(
                data[REQUEST_BYTES:]
            )
        ),
    )


def pack_answer(answer: ControlAnswer) -> bytes:
    return _ANSWER.pack(answer.code, *answer.numbers, answer.text[:256])


def unpack_answer(data: bytes) -> ControlAnswer:
    code, *numbers, text = _ANSWER.unpack(data)
    first, second, third, fourth = numbers
    return ControlAnswer(code=code, numbers=(first, second, third, fourth), text=text)


def socket_name(address: PartAddress) -> str:
    """Return an address of the kernel's own namespace, which needs no file."""
    return f"\0gyre-{address.place}-{address.name}"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return (pid, user) of the other side, as the system knows them."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(found)
    return pid, user


class ControlLink:
    """The reader's side. After an error it is of no use, and stays open until it is closed: its
    publisher may free what both have only when this side has let go."""

    def __init__(self, address: PartAddress, *, deadline_s: float) -> None:
        """Connect. InputError where no publisher of this user listens."""
        self._address = address
        self._deadline_s = deadline_s
        self._is_lost = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(deadline_s)
            self._socket.connect(socket_name(address))
        except OSError as error:
            self._socket.close()
            raise InputError(
                f"{address} cannot be reached: {error}",
                hint="its publisher has ended, or is in another network namespace: use its slot",
            ) from error
        if (user := peer_of(self._socket)[1]) != os.geteuid():
            self._socket.close()
            raise InputError(
                f"{address} is served by user {user}, and this process is of user {os.geteuid()}",
                hint="run publisher and receiver as one user",
            )

    def ask(self, request: ControlRequest) -> ControlAnswer:
        """Send a request and return its answer. InputError, SnapshotError or DeadlineError."""
        self.send(request)
        return self.answer()

    def send(self, request: ControlRequest) -> None:
        if self._is_lost:
            raise SnapshotError(f"{self._address} was lost before", hint=AGAIN)
        try:
            self._socket.settimeout(self._deadline_s)
            self._socket.sendall(pack_request(request))
        except OSError as error:
            raise self._lost(error) from error

    def answer(self) -> ControlAnswer:
        """Return the next answer; the error that it names."""
        ends_at = time.monotonic() + self._deadline_s
        data = b""
        try:
            while len(data) < ANSWER_BYTES:
                self._socket.settimeout(max(ends_at - time.monotonic(), 1e-3))
                found = self._socket.recv(ANSWER_BYTES - len(data))
                if not found:
                    raise ConnectionResetError("its publisher has ended")
                data += found
        except TimeoutError as error:
            self.give_up()
            raise DeadlineError(
                f"{self._address} has not answered within {self._deadline_s:g} s",
                hint="its publisher may hang; " + AGAIN,
            ) from error
        except OSError as error:
            raise self._lost(error) from error
        answer = unpack_answer(data)
        if answer.code != OK:
            self.give_up()
            kind: type[GyreError] = InputError if answer.code == GONE else SnapshotError
            message = answer.text.rstrip(b"\0").decode(errors="ignore")
            raise kind(f"{self._address}: {message}", hint=AGAIN)
        return answer

    def look(self) -> None:
        """Raise what the publisher has said unasked, that the group is lost."""
        try:
            told = select.poll()  # not select: a handle may be past 1,023
            told.register(self._socket, select.POLLIN)
            has_told = bool(told.poll(0))
        except (OSError, ValueError) as error:  # closed by another call
            raise self._lost(error) from error
        if has_told:
            self.answer()
            raise AssertionError("a publisher has answered what nobody asked")

    def give_up(self) -> None:
        """Ask nothing any more."""
        self._is_lost = True

    def close(self) -> None:
        self.give_up()
        self._socket.close()

    def _lost(self, error: Exception) -> SnapshotError:
        self.give_up()
        return SnapshotError(f"{self._address} was lost: {error}", hint=AGAIN)
