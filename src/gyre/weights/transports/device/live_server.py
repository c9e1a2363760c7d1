"""Live server: gives readers of this host a publisher's part by way of its device. In: a run, an
owner, the schemes to serve. Out: addresses of each version, valid until the next one begins.

Bytes come from the publisher's tensors while these are of the version. Then staging buckets are
filled from its slot. One thread accepts, and one serves each connection.
"""

# N bytes

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor

from gyre.core.errors import GyreError, InputError, SnapshotError
from gyre.core.events import Emit
from gyre.weights.transports.addresses import CUDA_IPC, PartAddress
from gyre.weights.transports.contracts import OpenSlot
from gyre.weights.transports.device.broadcaster import Broadcaster
from gyre.weights.transports.device.control import ControlRequest, peer_of, socket_name
from gyre.weights.transports.device.cuda_ipc import CudaStaging, Staging
from gyre.weights.transports.device.live_part import LivePart
from gyre.weights.transports.device.reader_connection import ReaderConnection
from gyre.weights.transports.device.reader_ring import Begin, ReaderRings
from gyre.weights.transports.device.served_part import CurrentPart, Filling, ServedPart, SlotPart
from gyre.weights.transports.device.staging_ring import SEATS, Fill
from gyre.weights.transports.part_layout import PlacedSegment

BUCKET_BYTES = 64 << 20  # of device memory; a group has two, and a ring three for each seat
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
        num_seats: int = SEATS,
        bucket_bytes: int = BUCKET_BYTES,
        deadline_s: float = 60.0,
    ) -> None:
        """Listen at once. `name`: of `live_name`. `host`: as `addresses.host_id` names it.
        `writes_behind`: slots may be written after their version is offered; no other process reads
        them then. `num_seats`: of readers that share staging buckets; 1 where only one comes.
        InputError where another serves that name, or a scheme is not for the device."""
        if CUDA_IPC in schemes and device.type != "cuda" and make_staging is CudaStaging:
            raise InputError(
                f"cuda-ipc is for weights on a GPU, and this publisher's are on {device}",
                hint="use shared memory (shm), or a group over gloo",
            )
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
        self.current: CurrentPart[LivePart] = CurrentPart(
            deadline_s=deadline_s, place="on its publisher's device"
        )
        self._slots: CurrentPart[SlotPart] = CurrentPart(
            deadline_s=deadline_s, place="in a slot that its publisher serves"
        )
        self.rings = ReaderRings(
            partial(make_staging, device),
            num_seats=num_seats,
            bucket_bytes=bucket_bytes,
            on_apart=self._note_apart,
        )
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
        self._open: set[ReaderConnection] = set()
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="serve-live", daemon=True)
        self._accepting.start()

    def put(
        self, *, epoch: int, version: int, placed: Sequence[PlacedSegment], runs: Sequence[Tensor]
    ) -> tuple[str, ...]:
        """Serve a part whose numbers are `runs`, which stay as they are until `withdraw` has
        returned. Returns its addresses; none where the runs are not on the device."""
        self.end_version()
        if any(run_N.device.type != self._device.type for run_N in runs):
            return ()
        self.current.put(LivePart(epoch=epoch, version=version, placed=placed, runs=runs))
        return tuple(str(address) for address in self._addresses.values())

    def put_slot(self, *, epoch: int, version: int, slot: OpenSlot) -> tuple[str, ...]:
        """Serve a part whose slot is whole from there too, by staging buckets. Returns the
        addresses by which it is."""
        address = self._addresses.get(CUDA_IPC)
        if address is None or slot.check is None:
            return ()
        source = SlotPart(epoch=epoch, version=version, bytes_N=slot.bytes_N, check=slot.check)
        self._slots.put(source)
        return (str(address),)

    def write_behind(self, *, epoch: int, version: int, write: Callable[[], None]) -> bool:
        """Run `write` on a thread of its own; False where slots are to be written before."""
        if not self._writes_behind:
            return False
        reading = ExitStack()
        reading.enter_context(self.current.reading(epoch=epoch, version=version))
        if CUDA_IPC in self._schemes:
            self._slots.expect(epoch=epoch, version=version)

        def run() -> None:
            try:
                with reading, self._beside_readers():
                    try:
                        write()
                    except BaseException:
                        self._slots.withdraw()  # who waits for it is told
                        raise
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
        """Serve nothing from the tensors any more; returns when nothing reads them. Readers of
        staging buckets go on from the slot. DeadlineError."""
        self.current.withdraw()

    def end_version(self) -> None:
        """Serve nothing any more; returns when nothing reads tensors or slot. DeadlineError."""
        self.rings.retire()
        try:
            self.current.withdraw()
        finally:
            self._slots.withdraw()

    def await_version(self, *, epoch: int, version: int) -> None:
        """Return once the version's bytes are in the tensors, or whole in the slot. InputError
        where neither has it."""
        with ExitStack() as stack:
            self._hold(stack, epoch=epoch, version=version)

    def filling(self, *, epoch: int, version: int) -> Begin:
        """Return what begins to fill a bucket with a version's bytes. It raises InputError where
        they are not here now."""

        def begin(fill: Fill, out_N: torch.Tensor) -> Filling:
            with ExitStack() as stack:
                source = self._hold(stack, epoch=epoch, version=version)
                event = source.begin(fill, out_N)
                return Filling(source, event, stack.pop_all().close)

        return begin

    def check(self, *, epoch: int, version: int, of_slot: bool) -> None:
        """Raise SnapshotError unless the version is in the tensors still, or `of_slot` in its
        slot."""
        if self.current.has(epoch=epoch, version=version):
            return
        if of_slot:
            with suppress(InputError), self._slots.reading(epoch=epoch, version=version) as source:
                source.check()
                return
        raise SnapshotError(
            f"version {version} was withdrawn or overwritten while it was read",
            hint="read it from its slot",
        )

    def _hold(self, stack: ExitStack, *, epoch: int, version: int) -> ServedPart:
        """Keep the version's bytes as they are until the stack ends: those of the tensors, or else
        of the slot, once it is whole. InputError where neither has it."""
        try:
            return stack.enter_context(self.current.reading(epoch=epoch, version=version))
        except InputError:
            if not self._slots.has(epoch=epoch, version=version):
                raise
        return stack.enter_context(self._slots.reading(epoch=epoch, version=version))

    def close(self) -> None:
        """End the version, and every connection."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        try:
            self.end_version()
        finally:
            self._end_connections()

    def _end_connections(self) -> None:
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
            connection = ReaderConnection(accepted, self, peer=f"process {pid}")
            with self._lock:
                self._open.add(connection)
            connection.thread.start()

    def forget(self, connection: ReaderConnection) -> None:
        with self._lock:
            self._open.discard(connection)

    def note_lost(self, peer: str, error: Exception) -> None:
        if not self._closed:
            self._emit("weights.reader_lost", peer=peer, error=str(error))

    def _note_apart(self, version: int) -> None:
        self._emit("weights.readers_apart", version=version)

    def open_part(self, request: ControlRequest, scheme: str) -> None:
        """Raise unless the part that is there is the one asked for."""
        if scheme not in self._schemes:
            raise InputError(f"this publisher serves {', '.join(self._schemes)}, and not {scheme}")
        with ExitStack() as stack:
            # of a group: the slot is of no use to it, which its round then finds
            part = self._hold(stack, epoch=request.epoch, version=request.version)
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
