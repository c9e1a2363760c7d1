"""Live server: gives readers of this host a publisher's part from its device. In: a run, an owner,
the schemes to serve. Out: addresses of each version, valid until it is withdrawn.

One thread accepts, and one serves each connection.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor

from gyre.core.errors import GyreError, InputError, SnapshotError
from gyre.core.events import Emit
from gyre.weights.transports.addresses import (
    CUDA_IPC,
    GROUP_SCHEMES,
    LIVE_SCHEMES,
    PartAddress,
)
from gyre.weights.transports.device.broadcaster import Broadcaster
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
    peer_of,
    socket_name,
    unpack_request,
)
from gyre.weights.transports.device.cuda_ipc import CudaStaging, Staging
from gyre.weights.transports.device.live_part import CurrentPart, LivePart
from gyre.weights.transports.part_layout import ALIGN_BYTES, PartRange, PlacedSegment

BUCKET_BYTES = 64 << 20  # of device memory; a group has two, and a staged reader three
MOST_READERS = 64
RETRY_S = 1.0  # after an error of accept, which may last


def live_name(run_id: str, owner: int) -> str:
    """Return the name of an owner's part on its device."""
    return f"gyre-{run_id}-{owner}-live"


class LiveServer:
    """Serves at most one version, which is the publisher's own."""

    def __init__(
        self,
        *,
        name: str,
        host: str,
        device: torch.device,
        emit: Emit,
        schemes: Sequence[str],
        make_staging: Callable[[torch.device, int], Staging] = CudaStaging,
        writes_behind: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        deadline_s: float = 60.0,
    ) -> None:
        """Listen at once. `name`: of `live_name`. `host`: as `addresses.host_id` names it.
        `writes_behind`: slots may be written after their version is offered; no other process reads
        them then. InputError where another serves that name, or a scheme is not for the device."""
        if CUDA_IPC in schemes and device.type != "cuda" and make_staging is CudaStaging:
            raise InputError(
                f"cuda-ipc is for weights on a GPU, and this publisher's are on {device}",
                hint="use shared memory (shm), or a group over gloo",
            )
        self.make_staging = partial(make_staging, device)
        self._device = device
        self._emit = emit
        self._schemes = tuple(schemes)
        self._deadline_s = deadline_s
        self._bucket_bytes = bucket_bytes
        self._writes_behind = writes_behind
        self._stream: torch.cuda.Stream | None = None
        self._addresses = {
            scheme: PartAddress(scheme=scheme, place=host, name=name) for scheme in schemes
        }
        self.current = CurrentPart(deadline_s=deadline_s)
        self.broadcaster = Broadcaster(
            self.current,
            name=name,
            device=device,
            emit=emit,
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
        )
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._listening.bind(socket_name(next(iter(self._addresses.values()))))
            self._listening.listen()
        except OSError as error:
            self._listening.close()
            raise InputError(
                f"{name} is served by another process",
                hint="end the other one first, or give this run an id of its own",
            ) from error
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="serve-live", daemon=True)
        self._accepting.start()

    def put(
        self, *, epoch: int, version: int, placed: Sequence[PlacedSegment], runs: Sequence[Tensor]
    ) -> tuple[str, ...]:
        """Serve a part whose numbers are `runs`, which stay as they are until `withdraw` has
        returned. Returns its addresses; none where the runs are not on the device."""
        if any(run_N.device.type != self._device.type for run_N in runs):
            self.withdraw()
            return ()
        self.current.put(LivePart(epoch=epoch, version=version, placed=placed, runs=runs))
        return tuple(str(address) for address in self._addresses.values())

    def write_behind(self, *, epoch: int, version: int, write: Callable[[], None]) -> bool:
        """Run `write` on a thread of its own; False where slots are to be written before."""
        if not self._writes_behind:
            return False
        reading = ExitStack()
        reading.enter_context(self.current.reading(epoch=epoch, version=version))

        def run() -> None:
            try:
                with reading, self._beside_readers():
                    write()
            except (GyreError, OSError, RuntimeError) as error:
                self._emit("weights.slot_failed", version=version, error=str(error))

        threading.Thread(target=run, name="write-slot", daemon=True).start()
        return True

    def _beside_readers(self) -> AbstractContextManager[object]:
        """Use a stream of its own: what is filled for a reader waits for the default one."""
        if self._device.type != "cuda":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._stream)

    def withdraw(self) -> None:
        """Serve nothing any more; returns when nothing reads the tensors. DeadlineError."""
        self.current.withdraw()

    def close(self) -> None:
        """Withdraw, and end every connection."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        self.withdraw()
        self.broadcaster.close()
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepting.join(self._deadline_s)
        self._listening.close()
        with self._lock:
            ending = tuple(self._open)
        for connection in ending:
            connection.close()
            connection.thread.join(self._deadline_s)

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._listening.accept()
            except OSError as error:
                if not self._closed:
                    self._emit("weights.reader_lost", peer="", error=str(error))
                    time.sleep(RETRY_S)
                continue
            pid, user = peer_of(accepted)
            refused = ""
            if user != os.geteuid():
                refused = f"it is of user {user}, and this process of user {os.geteuid()}"
            elif len(self._open) >= MOST_READERS:
                refused = f"the publisher has {MOST_READERS} readers, as many as it may have"
            if refused:
                self._emit("weights.reader_refused", peer=f"process {pid}", reason=refused)
                accepted.close()
                continue
            connection = _Connection(accepted, self, peer=f"process {pid}")
            with self._lock:
                self._open.add(connection)
            connection.thread.start()

    def forget(self, connection: _Connection) -> None:
        with self._lock:
            self._open.discard(connection)

    def note_lost(self, peer: str, error: Exception) -> None:
        if not self._closed:
            self._emit("weights.reader_lost", peer=peer, error=str(error))

    def open_part(self, request: ControlRequest, scheme: str) -> None:
        """Raise unless the part that is there is the one asked for."""
        if scheme not in self._schemes:
            raise InputError(f"this publisher serves {', '.join(self._schemes)}, and not {scheme}")
        with self.current.reading(epoch=request.epoch, version=request.version) as part:
            if part.size_bytes != request.part_bytes:
                raise InputError(
                    f"the part of version {request.version} has {part.size_bytes} bytes, and its "
                    f"manifest lists {request.part_bytes}"
                )

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def bucket_bytes(self) -> int:
        return self._bucket_bytes

    @property
    def answer_s(self) -> float:
        return self._deadline_s


def can_fill(stretches: Sequence[PartRange], bucket_bytes: int) -> bool:
    """Return whether stretches follow each other, at lines of 64 bytes, in a bucket."""
    end = 0
    for one in stretches:
        if one.at < end or one.start >= one.stop or one.at % ALIGN_BYTES or one.start % ALIGN_BYTES:
            return False
        end = one.end
    return 0 < end <= bucket_bytes


class _Connection:
    """A reader, from its first request to its end. It has one version."""

    def __init__(self, accepted: socket.socket, server: LiveServer, *, peer: str) -> None:
        self.peer = peer
        self._socket = accepted
        self._server = server
        self.reader = b""
        self.epoch = -1
        self.version = -1
        self._is_open = False
        self._staging: Staging | None = None
        self._num_fills = 0
        self._sending = threading.Lock()
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
            self._free()
        except OSError as error:
            reason = str(error)
            self._server.note_lost(self.peer, error)
            self._free()
        except RuntimeError as error:  # of the device
            reason = str(error).splitlines()[0]
            self._server.note_lost(self.peer, error)
        finally:
            self._server.broadcaster.leave(self, reason)
            self._server.forget(self)
            self._socket.close()

    def _free(self) -> None:
        """Free the staging buckets, now that the reader has closed them, or ended. If this side
        hung up first, they stay until the process ends."""
        if self._staging is not None and not self._server.is_closed:
            self._staging.close()

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
            answer = self._handle(request)
        except GyreError as error:
            code = GONE if isinstance(error, InputError) else LOST
            answer = ControlAnswer(code=code, text=error.message.encode())
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
        if request.op == FILL:
            self._fill(request)
            return ControlAnswer(code=OK)
        if request.op == CHECK:
            has_all = bool(request.first)
            server.broadcaster.settle(self, has_all=has_all)
            if not has_all and not server.current.has(epoch=self.epoch, version=self.version):
                raise SnapshotError(
                    f"version {self.version} was withdrawn or overwritten while it was read",
                    hint="read it from its slot",
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
        handle = b""
        if scheme in GROUP_SCHEMES:
            server.broadcaster.enter(self)
        else:
            self._staging = server.make_staging(STAGING_BUCKETS * server.bucket_bytes)
            handle = self._staging.handle
        self._is_open = True
        return ControlAnswer(code=OK, numbers=(server.bucket_bytes, 0, 0, 0), text=handle)

    def _fill(self, request: ControlRequest) -> None:
        """Write stretches of the part into the bucket whose turn it is."""
        server, stretches = self._server, request.stretches
        if self._staging is None or not can_fill(stretches, server.bucket_bytes):
            raise InputError(f"{len(stretches)} stretches cannot be filled in: they are no bucket")
        first = self._num_fills % STAGING_BUCKETS * server.bucket_bytes
        self._num_fills += 1
        with server.current.reading(epoch=self.epoch, version=self.version) as part:
            part.fill(stretches, self._staging.bytes_N[first : first + server.bucket_bytes])

    def _send(self, answer: ControlAnswer) -> None:
        with self._sending, suppress(OSError):  # one that hung up is found by its thread
            self._socket.sendall(pack_answer(answer))
