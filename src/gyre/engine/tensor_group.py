"""Tensor group: an engine over the ranks of the tensor axis. In: on rank 0 the entries of its
journal, as they take effect, and the versions that it is offered; on the others a stream of them.
Out: the same steps on every rank.

Rank 0 leads: it has the requests, and sends each entry before it plays it, each step before its
first collective. The others follow: what they choose equals what rank 0 chooses, and is dropped.
A version is prepared and committed on all ranks or on none. All ranks are on one host. A rank that
fails or dies ends the steps on all.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from typing import cast

import msgspec
import torch

from gyre.core.codec import decode, encode
from gyre.core.errors import ConfigError, GyreError, RankError
from gyre.core.events import Emit
from gyre.core.offers import FolderTensors, Offer, RegisteredShards
from gyre.core.records import Manifest, Phase
from gyre.distributed.process_group import RankGroup
from gyre.engine.config import EngineConfig, plan_num_pages
from gyre.engine.core_worker import CoreFailed, CoreWorker
from gyre.engine.memory import free_device_bytes
from gyre.engine.scheduler.journal import (
    Commit,
    Entry,
    MoveComponent,
    Start,
)
from gyre.models.decoder import Decoder
from gyre.weights.receive import refuse_local

WHAT = "the engine's steps"
LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 16
# for a connection to show the token; for one look once the deadline has passed
GREETING_S, LEAST_S = 5.0, 1e-3
TOLD_S = 3.0  # for a rank that has ended to be known as the one at fault, and why
_LENGTH = struct.Struct("<I")  # bytes of the entry that follows


class PrepareVersion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The ranks prepare a version, each its part. Its manifest and its place travel here."""

    manifest: Manifest
    folder: FolderTensors | None = None  # one of the two
    registered: RegisteredShards | None = None
    reverts: bool = False

    @staticmethod
    def of(offer: Offer, *, reverts: bool) -> PrepareVersion:
        """InputError for a version that another process cannot read."""
        refuse_local(offer)
        return PrepareVersion(
            manifest=offer.manifest,
            folder=offer.folder,
            registered=offer.registered,
            reverts=reverts,
        )

    def offer(self) -> Offer:
        source = self.folder or self.registered
        assert source is not None, "rank 0 sends nothing else"
        return Offer(manifest=self.manifest, source=source)


class PrepareOwn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Each rank takes the version of the trainer in its own process."""

    version: int
    reverts: bool = False


class ForgetVersion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was prepared is given up."""


class EnteredPhase(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rank 0's memory is where a phase needs it, and so is that of a rank that has come to this."""

    phase: Phase
    step: int


class EndCore(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The core ends, and the ranks free their memory."""


Message = Entry | PrepareVersion | PrepareOwn | ForgetVersion | EnteredPhase | EndCore
OwnOffer = Callable[[int], Offer]  # a version of the trainer in this process


class EntryStream:
    """Entries, and what goes with them, over a connected socket."""

    def __init__(self, connection: socket.socket, rank: int, *, timeout_s: float) -> None:
        """Bind the socket. `rank` is at the other end."""
        connection.settimeout(timeout_s)
        self._socket = connection
        self._rank = rank
        self._timeout_s = timeout_s
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def write(self, message: Message) -> None:
        """RankError if the other end takes nothing within the timeout."""
        data = encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise RankError(
                f"rank {self._rank} of the engine took no entry within {self._timeout_s:g} s: "
                f"{error}",
                hint="it hangs, or has ended; its log says why",
            ) from error

    def messages(self) -> Iterator[Message]:
        """Yield messages as they come, until the other end closes. An idle leader sends none."""
        self._socket.settimeout(None)
        with self._socket.makefile("rb") as file:
            while head := file.read(_LENGTH.size):
                size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
                data = file.read(size)
                if len(data) != size or size == 0:
                    raise RankError(f"rank {self._rank} ended within an entry")
                # callers give whole numbers for floats too, so it need not be written so again
                yield decode(data, cast(type[Message], Message), exact=False)

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none begins within the time. EOFError once the other end
        has closed."""
        if not self._poll.poll(1e3 * timeout_s):
            return None
        try:
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
            return decode(self._read(size), cast(type[Message], Message), exact=False)
        except OSError as error:
            raise EOFError(f"rank {self._rank} is gone: {error}") from error

    def _read(self, size_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < size_bytes:
            if not (part := self._socket.recv(size_bytes - len(data))):
                raise EOFError(f"rank {self._rank} has ended")
            data += part
        return bytes(data)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class Followers:
    """The other ranks, as rank 0 sees them. For the compute thread."""

    def __init__(
        self, group: RankGroup, streams: Sequence[EntryStream], *, have_trainers: bool = False
    ) -> None:
        """`have_trainers`: each rank's process has a trainer's rank, too, with the same cut."""
        self._group = group
        self._streams = streams
        self._have_trainers = have_trainers
        self._life = ExitStack()

    def begin(self) -> None:
        """Watch the ranks, from the start of a core to its end."""
        self._life.enter_context(self._group.guard(WHAT))

    def send(self, entry: Message) -> None:
        """RankError if a rank takes nothing within the timeout. One that has ended may have said
        why: that error is the one that the failure detector knows."""
        for stream in self._streams:
            try:
                stream.write(entry)
            except RankError as error:
                with suppress(RuntimeError):  # `fault` has the same words
                    self._group.look_for(WHAT, lambda: None, TOLD_S)
                if fault := self._group.fault:
                    raise RankError(f"{WHAT} ended: {fault}") from error
                raise

    def prepare(self, offer: Offer, *, reverts: bool) -> None:
        if self._have_trainers and offer.is_per_rank:
            self.send(PrepareOwn(version=offer.version, reverts=reverts))
            return
        self.send(PrepareVersion.of(offer, reverts=reverts))

    def rollback(self) -> None:
        self.send(ForgetVersion())

    def entered(self, phase: Phase, step: int) -> None:
        self.send(EnteredPhase(phase=phase, step=step))

    def end(self, error: Exception | None) -> Exception | None:
        """End the watch with the core. Returns the error that names the rank at fault. After an
        error there are no followers any more."""
        life, self._life = self._life, ExitStack()
        try:
            if error is None:
                with life:
                    self.send(EndCore())
            else:
                self.close()
                life.__exit__(type(error), error, error.__traceback__)
        except RankError as named:
            return named
        return error

    def close(self) -> None:
        """Let the followers end."""
        for stream in self._streams:
            stream.close()


def lead(
    group: RankGroup, *, timeout_s: float, emit: Emit, have_trainers: bool = False
) -> Followers:
    """Connect rank 0 with the others, which call `enlist`. `timeout_s`: for all of them to come,
    and for each to take an entry."""
    token, ends_at = secrets.token_bytes(TOKEN_BYTES), time.monotonic() + timeout_s
    streams: dict[int, EntryStream] = {}
    with (
        closing(socket.create_server((LOOPBACK, 0), backlog=group.size)) as server,
        ExitStack() as failing,
    ):
        group.share([server.getsockname()[1], token.hex()])
        while len(streams) < group.size - 1:
            try:
                server.settimeout(max(LEAST_S, ends_at - time.monotonic()))
                connection, (peer, _) = server.accept()
            except OSError as error:
                missing = sorted({*range(1, group.size)} - {*streams})
                raise RankError(
                    f"ranks {missing} of the engine did not connect within {timeout_s:g} s"
                ) from error
            failing.callback(connection.close)
            limit_s = max(LEAST_S, min(GREETING_S, ends_at - time.monotonic()))
            rank = _greeted(connection, token, limit_s)
            if rank is None:  # another process of this host
                connection.close()
                emit("engine.stranger", peer=peer)
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            streams[rank] = EntryStream(connection, rank, timeout_s=timeout_s)
        failing.pop_all()
    ordered = [streams[rank] for rank in sorted(streams)]
    return Followers(group, ordered, have_trainers=have_trainers)


def enlist(group: RankGroup, *, timeout_s: float) -> EntryStream:
    """Connect one of the other ranks with rank 0, which calls `lead`."""
    port, token = group.share(None)[0]
    connection = socket.create_connection((LOOPBACK, port), timeout=timeout_s)
    connection.sendall(bytes.fromhex(token) + bytes([group.rank]))
    return EntryStream(connection, 0, timeout_s=timeout_s)


def connect(
    group: RankGroup, emit: Emit, *, have_trainers: bool = False
) -> tuple[Followers | None, EntryStream | None]:
    """Connect the ranks of an engine: the first gets the others, another its way to hear.
    `have_trainers`: each process has a trainer's rank as well."""
    if group.rank == 0:
        timeout_s = group.timeout_s
        return lead(group, timeout_s=timeout_s, emit=emit, have_trainers=have_trainers), None
    return None, enlist(group, timeout_s=group.timeout_s)


def agree_on_pages(
    config: EngineConfig, decoder: Decoder, group: RankGroup, *, dtype: torch.dtype
) -> EngineConfig:
    """Return the config with as many KV pages as each rank has room for: their devices may have
    other bytes free. `config` leaves nothing else open. All ranks call it."""
    spec = decoder.spec
    own = plan_num_pages(
        config,
        page_bytes=spec.kv_bytes_per_token(dtype) * config.page_tokens,
        context_tokens=spec.context_tokens,
        free_bytes=free_device_bytes(decoder.device),
    )
    return config.model_copy(update={"num_pages": min(group.share(own))})


def follow(
    stream: EntryStream,
    worker: CoreWorker,
    group: RankGroup,
    *,
    played: Callable[[Message], None] = lambda message: None,
) -> None:
    """Play what rank 0 plays, until it closes the stream or is gone. `played` hears of each message
    behind it. RankError names a rank that failed, ConfigError what differs from rank 0."""
    with closing(stream), ExitStack() as life:
        for message in stream.messages():
            if isinstance(message, Start):
                life.close()  # of the core before it
                life.enter_context(group.guard(WHAT))
            try:
                play_message(message, worker, group)
            except CoreFailed as failed:
                raise cause_of(failed) from None
            played(message)
            if isinstance(message, EndCore):
                life.close()
    if worker.core is not None:
        worker.terminate()


def cause_of(error: BaseException) -> BaseException:
    """Return what broke a core. The guard distinguishes a lost rank from a cause by its type."""
    return (error.__cause__ or error) if isinstance(error, CoreFailed) else error


def play_message(
    message: Message, worker: CoreWorker, group: RankGroup, own_offer: OwnOffer | None = None
) -> None:
    """Do what rank 0 does. A version that all ranks refuse is no error here."""
    match message:
        case Start():
            if worker.core is not None:
                worker.terminate()
            _refuse_other(message, worker.describe_start(message.dummy), group)
            worker.start(message.dummy)
        case PrepareVersion():
            _agree(lambda: worker.prepare(message.offer(), reverts=message.reverts))
        case PrepareOwn(version=version, reverts=reverts):
            assert own_offer is not None, "rank 0 knows which ranks have a trainer beside them"
            offer = own_offer(version)
            _agree(lambda: worker.prepare(offer, reverts=reverts))
        case ForgetVersion():
            worker.rollback()
        case Commit(version=version, policy=policy):
            _agree(lambda: worker.commit(version, policy))
        case EnteredPhase():
            pass
        case EndCore():
            worker.terminate()
        case MoveComponent(component=component, tier=tier):
            if worker.memory.tier(component) != tier:
                worker.move([component], tier)
        case _:
            worker.play([message])


def _agree(work: Callable[[], None]) -> None:
    """Do what all ranks do, or none. Rank 0 reports a refusal to its caller."""
    try:
        work()
    except (RankError, CoreFailed):
        raise
    except GyreError:
        return


def _refuse_other(leader: Start, own: Start, group: RankGroup) -> None:
    """Refuse to follow a core that is built otherwise: its decisions would differ."""
    parts = {
        **{f"engine.{name}": (leader.settings[name], own.settings[name]) for name in own.settings},
        "KV pages": (leader.num_pages, own.num_pages),
        "host pages": (leader.num_slots, own.num_slots),
        "the version of the weights": (leader.version, own.version),
        "eos ids": (tuple(leader.eos_ids), tuple(own.eos_ids)),
    }
    differing = [
        f"{what} ({theirs} there, {ours} here)"
        for what, (theirs, ours) in parts.items()
        if theirs != ours
    ]
    if differing:
        raise ConfigError(
            f"rank {group.rank} of the engine differs from rank 0 in {', '.join(differing)}",
            hint="give all ranks of an engine the same config, and engine.num_pages or kv_bytes",
        )


def _greeted(connection: socket.socket, token: bytes, timeout_s: float) -> int | None:
    """Return the rank at the other end; None for who does not know the token."""
    connection.settimeout(timeout_s)
    try:
        found = connection.recv(TOKEN_BYTES + 1, socket.MSG_WAITALL)
    except OSError:
        return None
    is_rank = len(found) == TOKEN_BYTES + 1 and hmac.compare_digest(found[:-1], token)
    return found[-1] if is_rank else None
