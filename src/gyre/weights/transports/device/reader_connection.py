"""Reader connection: one reader of a live server, from its first request to its end. In: its
requests, each within the publisher's process. Out: answers, in their order.

    its thread         Takes requests, begins fills, and answers what is quick. Woken by the
                       reader. Ends when the reader hangs up, or the server closes.
    a second thread    Answers fills that the link to the host takes long for, while the first one
                       begins further ones: so the link never waits for an answer.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from gyre.core.errors import GyreError, InputError
from gyre.weights.transports.addresses import GROUP_SCHEMES, LIVE_SCHEMES
from gyre.weights.transports.device.control import (
    CHECK,
    FILL,
    GONE,
    LOST,
    OK,
    OPEN,
    REQUEST_BYTES,
    SEAT,
    STAGING_BUCKETS,
    STRETCH_BYTES,
    ControlAnswer,
    ControlRequest,
    count_stretches,
    pack_answer,
    unpack_request,
)
from gyre.weights.transports.device.reader_ring import RingSeat
from gyre.weights.transports.device.served_part import Filling
from gyre.weights.transports.part_range import ALIGN_BYTES, PartRange

if TYPE_CHECKING:
    from gyre.weights.transports.device.live_server import LiveServer


class ReaderConnection:
    """A reader, which has one part of one version."""

    def __init__(self, accepted: socket.socket, server: LiveServer, *, peer: str) -> None:
        self.peer = peer
        self._socket = accepted
        self._server = server
        self.reader = b""
        self.epoch = -1
        self.version = -1
        self._part_bytes = 0
        self._is_open = False
        self._place: RingSeat | None = None  # among the readers of staging buckets
        self._num_waiting = 0  # fills that the second thread has yet to answer
        self._is_sound = True  # the device
        self._sending = threading.Lock()
        self._answering = ThreadPoolExecutor(1, thread_name_prefix="answer-reader")
        self.thread = threading.Thread(target=self._serve, name="serve-reader", daemon=True)
        # of sends alone: reads wait as long as the reader is there
        limit = struct.pack("ll", math.ceil(server.answer_s), 0)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def tell_lost(self, reason: str) -> None:
        self._send(ControlAnswer(code=LOST, text=reason.encode()))

    def close(self) -> None:
        with suppress(OSError):  # the reader may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        reason = "hung up"
        try:
            while (request := self._next()) is not None:
                self._answer(request)
        except OSError as error:
            reason = str(error)
            self._server.note_lost(self.peer, error)
        except RuntimeError as error:  # of the device
            reason = str(error).splitlines()[0]
            self._lose_device(error)
        finally:
            self._answering.shutdown()  # once what is being filled is there
            try:
                self._leave_ring()
            except (GyreError, RuntimeError) as error:  # of the device
                self._server.note_lost(self.peer, error)
            finally:
                self._server.broadcaster.leave(self, reason)
                self._server.forget(self)
                self._socket.close()

    def _leave_ring(self) -> None:
        """Give the staging buckets back, now that the reader has closed them, or ended. If this
        side hung up first, the reader may still copy them."""
        if self._place is None:
            return
        if self._is_sound and not self._server.is_closed:
            self._server.rings.leave(self._place)
        else:
            self._place.ring.abandon()

    def _lose_device(self, error: Exception) -> None:
        self._is_sound = False
        self._server.note_lost(self.peer, error)

    def _next(self) -> ControlRequest | None:
        """Wait for the next request, as long as the reader is there. None when it hung up."""
        if (head := self._receive(REQUEST_BYTES)) is None:
            return None
        count = count_stretches(head)
        if count > self._server.bucket_bytes // ALIGN_BYTES:
            raise OSError(f"it asked for {count} stretches, more than a bucket has lines")
        if (rest := self._receive(count * STRETCH_BYTES)) is None:
            return None
        return unpack_request(head + rest)

    def _receive(self, size_bytes: int) -> bytes | None:
        data = b""
        while len(data) < size_bytes:
            found = self._socket.recv(size_bytes - len(data))
            if not found:
                return None
            data += found
        return data

    def _answer(self, request: ControlRequest) -> None:
        try:
            if request.op == FILL:
                self._fill(request.stretches)
                return
            answer = self._handle(request)
        except GyreError as error:
            # perhaps before answers that wait: the reader takes the first error as the end of all
            answer = _refusal(error)
        self._send(answer)

    def _handle(self, request: ControlRequest) -> ControlAnswer:
        server = self._server
        if request.op == OPEN:
            return self._open(request)
        if not self._is_open:
            raise InputError("a part was asked for that was not opened")
        if request.op == SEAT:
            seat = server.broadcaster.seat(self)
            numbers = (seat.generation, seat.rank, seat.size, seat.store_port)
            return ControlAnswer(code=OK, numbers=numbers)
        if request.op == CHECK:
            has_all = bool(request.first)
            server.broadcaster.settle(self, has_all=has_all)
            if not has_all:
                server.check(
                    epoch=self.epoch, version=self.version, of_slot=self._place is not None
                )
            return ControlAnswer(code=OK)
        raise InputError(f"{request.op} is no request")

    def _open(self, request: ControlRequest) -> ControlAnswer:
        if request.first >= len(LIVE_SCHEMES):
            raise InputError(f"{request.first} is no scheme: publisher and reader differ")
        server, scheme = self._server, LIVE_SCHEMES[request.first]
        server.open_part(request, scheme)
        if self._is_open:
            raise InputError("a connection opens one part, and this one has")
        self.reader, self.epoch, self.version = request.reader, request.epoch, request.version
        self._part_bytes = request.part_bytes
        handle, num_buckets = b"", 0
        if scheme in GROUP_SCHEMES:
            server.broadcaster.enter(self)
        else:
            self._place = server.rings.enter(epoch=self.epoch, version=self.version)
            handle, num_buckets = self._place.ring.handle, self._place.ring.num_buckets
        self._is_open = True
        numbers = (server.bucket_bytes, num_buckets, 0, 0)
        return ControlAnswer(code=OK, numbers=numbers, text=handle)

    def _fill(self, stretches: tuple[PartRange, ...]) -> None:
        """Have stretches of the part in a bucket, and say in which."""
        place, server = self._place, self._server
        if place is None or not can_fill(stretches, server.bucket_bytes, self._part_bytes):
            raise InputError(
                f"{len(stretches)} stretches cannot be filled in: they are no bucket of a part of "
                f"{self._part_bytes} bytes"
            )
        if self._num_waiting >= STAGING_BUCKETS:
            raise InputError(f"more than {STAGING_BUCKETS} buckets were asked for at once")
        of_version = {"epoch": self.epoch, "version": self.version}
        server.await_version(**of_version)  # here, where no other reader waits for this one
        begin = server.filling(**of_version)
        bucket, filling = place.ring.take(place.seat, stretches, begin)
        if filling.takes_long or self._num_waiting:
            with self._sending:
                self._num_waiting += 1
            self._answering.submit(self._answer_later, bucket, filling)
        else:
            self._send(_answer_filled(bucket, filling))

    def _answer_later(self, bucket: int, filling: Filling) -> None:
        try:
            answer = _answer_filled(bucket, filling)
        except GyreError as error:
            answer = _refusal(error)
        except (RuntimeError, OSError) as error:  # of the device, or of the slot's file
            self._lose_device(error)
            self.close()
            return
        self._send(answer)
        with self._sending:
            self._num_waiting -= 1

    def _send(self, answer: ControlAnswer) -> None:
        with self._sending, suppress(OSError):  # one that hung up is found by its thread
            self._socket.sendall(pack_answer(answer))


def can_fill(stretches: Sequence[PartRange], bucket_bytes: int, part_bytes: int) -> bool:
    """Return whether stretches of a part follow each other, at lines of 64 bytes, in a bucket."""
    end = 0
    for one in stretches:
        if not one.is_sound or one.at < end or one.stop > part_bytes:
            return False
        end = one.end
    return 0 < end <= bucket_bytes


def _answer_filled(bucket: int, filling: Filling) -> ControlAnswer:
    """Answer once the bucket is filled."""
    filling.finish()
    return ControlAnswer(code=OK, numbers=(bucket, 0, 0, 0))


def _refusal(error: GyreError) -> ControlAnswer:
    code = GONE if isinstance(error, InputError) else LOST
    return ControlAnswer(code=code, text=error.message.encode())
