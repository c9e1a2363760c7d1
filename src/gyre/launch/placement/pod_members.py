"""Pod members: rollout engines of other hosts that join a pod's run and leave it. In: the address
to listen at, a stage and its pool. Out: guests of the pool; the address of a server that gives
their weights.

    token proved ─▶ built ─▶ [in each stage: current version ─▶ takes work] ─▶ leaves, or is lost

A member has no disk in common with the driver. It gets the config, the model's sizes and the
tokenizer's files, and takes each version by TCP. It is not ours to start: one that is gone may
join again under its name.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from gyre.cluster.engine_pool.pool import EnginePool
from gyre.cluster.members import MOST_FRAME_BYTES, AdmittedMember, MemberListener
from gyre.cluster.process_cluster import ProcessCluster
from gyre.cluster.worker.handshake import JoinRequest
from gyre.cluster.worker.link import LinkHandle
from gyre.cluster.worker.rpc import STARTS, ask
from gyre.cluster.worker.server import WorkerFault
from gyre.core.codec import encode
from gyre.core.errors import GyreError, InputError
from gyre.core.events import Emit
from gyre.core.records import RoleSpec
from gyre.launch.factories import Facts
from gyre.launch.placement.pod_metadata import PodMetadata
from gyre.launch.stages import Stage
from gyre.planner.plan import Dtype, Plan
from gyre.runconfig.run_config import RunConfig
from gyre.weights.transports.tcp_server import PartServer

MEMBER_BUILDER = "gyre.launch.placement.member:build_member"
TOKEN_FILE = "members.token"
LEAST_TOKEN_BYTES = 16
PART_S = 10.0  # for a member to take the goodbye
# what a member may fail with; it costs the member alone
FAILURES = (GyreError, WorkerFault, OSError)


class PodMembers:
    """The members of one attempt at a run. They stay from stage to stage."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        facts: Facts,
        dtype: Dtype,
        *,
        cluster: ProcessCluster,
        run_id: str,
        emit: Emit,
        metadata: PodMetadata | None = None,
    ) -> None:
        """Listen at once, on the event loop that runs. With `metadata` the rendezvous has who
        is there."""
        self._metadata = metadata
        settings = config.cluster
        self._cluster = cluster
        self._emit = emit
        self._start_deadline_s = settings.start_deadline_s
        self._arguments = describe_member(config, folder / "tokenizer", facts, dtype)
        token = keep_token(folder / TOKEN_FILE)
        host, port = listening_address(settings.members_address)
        self._stage: tuple[str, str] | None = None
        self._pool: EnginePool | None = None
        self._handles: dict[str, LinkHandle | None] = {}  # by name; None while it is built
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()  # those that bring a member to the pool
        self._fault: BaseException | None = None
        parts_port = port + 1 if port else 0
        self._parts = PartServer(run_id=run_id, token=token, emit=emit, host=host, port=parts_port)
        self.served_at = (self._parts.place,)
        try:
            self._listener = MemberListener(
                host=host,
                port=port,
                token=token,
                refuse=self._refuse,
                on_admitted=self._admit,
                emit=emit,
            )
        except BaseException:
            self._parts.close()
            raise
        emit("member.listening", address=self._listener.place, token_file=str(folder / TOKEN_FILE))

    async def begin(self, stage: Stage, plan: Plan, pool: EnginePool) -> None:
        """Let the members that are there, and those that come, work for a stage."""
        self._stage, self._pool = (stage.name, plan.to_json()), pool
        for handle in self._handles.values():
            if handle is not None:
                self._begin_serving(handle)

    async def leave_pool(self) -> None:
        """Bring no member to the stage's pool any more, which is to be closed."""
        self._stage = self._pool = None
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def end(self, *, last: bool) -> None:
        """End the stage on the members, after `leave_pool`. They wait for the next one; after the
        last they go."""
        for handle in [one for one in self._handles.values() if one is not None]:
            try:
                await ask(handle, "end", deadline_s=self._start_deadline_s, key=STARTS)
                if last:
                    await self._let_go(handle, "the run has ended")
            except FAILURES as error:
                await self._part_with(handle, str(error))
        if self._fault is not None:
            raise self._fault

    async def close(self) -> None:
        """Stop listening, and let all members go."""
        await self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for handle in [one for one in self._handles.values() if one is not None]:
            await self._cluster.stop(handle)
        await asyncio.to_thread(self._parts.close)

    def _refuse(self, request: JoinRequest) -> None:
        if worker_name(request) in self._handles:
            raise InputError(
                f"a member named {request.name} is there",
                hint="give each member a name of its own: --name",
            )

    def _admit(self, admitted: AdmittedMember) -> None:
        name = worker_name(admitted.request)
        if name in self._handles:  # another one was faster
            admitted.link.close()
            return
        self._handles[name] = None
        self._keep(self._take_in(name, admitted))

    async def _take_in(self, name: str, admitted: AdmittedMember) -> None:
        """Build a member, let it work, and follow it to its end."""
        spec = RoleSpec(
            name=name,
            builder=MEMBER_BUILDER,
            arguments=self._arguments,
            deadline_s=self._start_deadline_s,
        )
        place = f"{admitted.peer}, {admitted.request.place}"
        handle = LinkHandle(
            spec,
            admitted.link,
            place=place,
            on_event=lambda worker, kind, **fields: self._emit(kind, worker=worker, **fields),
            most_bytes=MOST_FRAME_BYTES,
        )
        try:
            await self._cluster.adopt(handle, spec)
        except FAILURES as error:
            del self._handles[name]
            self._emit("member.refused", peer=admitted.peer, reason=str(error), count=1)
            return
        self._handles[name] = handle
        self._emit("member.joined", member=name, place=place)
        if self._metadata is not None:
            self._metadata.note_joined(name, place)
        self._keep(self._follow(handle))
        if self._stage is not None:
            self._begin_serving(handle)

    def _begin_serving(self, handle: LinkHandle) -> None:
        task = self._keep(self._serve(handle))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, handle: LinkHandle) -> None:
        """Make a member a guest of the stage's pool."""
        stage, pool = self._stage, self._pool
        assert stage is not None and pool is not None
        limits = {"deadline_s": self._start_deadline_s, "key": STARTS}
        try:
            await ask(handle, "begin", *stage, **limits)
            await pool.add(handle)
        except FAILURES as error:
            await self._part_with(handle, str(error))

    async def _follow(self, handle: LinkHandle) -> None:
        """Wait until a member asks to leave, or is lost."""
        try:
            drain_s = await asyncio.wrap_future(handle.begin("until_leaving"))
            if self._pool is not None:
                await self._pool.remove(handle, deadline_s=drain_s)
            await self._let_go(handle, "it was asked to")
        except FAILURES as error:
            await self._part_with(handle, str(error))

    async def _let_go(self, handle: LinkHandle, reason: str) -> None:
        """Say goodbye, and hang up."""
        await ask(handle, "part", reason, deadline_s=PART_S, key="")
        await self._part_with(handle, reason)

    async def _part_with(self, handle: LinkHandle, reason: str) -> None:
        if self._handles.get(handle.name) is not handle:
            return
        del self._handles[handle.name]
        requests = 0 if self._pool is None else self._pool.balancer.num_routed(handle.name)
        await self._cluster.stop(handle)
        if self._metadata is not None:
            self._metadata.note_left(handle.name)
        self._emit(
            "member.left",
            member=handle.name,
            place=handle.place,
            reason=reason,
            requests=requests,
        )

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Hold a task until it ends; a fault in one ends the run with the stage."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def done(finished: asyncio.Task[None]) -> None:
            self._tasks.discard(finished)
            if not finished.cancelled() and finished.exception() is not None:
                self._fault = self._fault or finished.exception()

        task.add_done_callback(done)
        return task


def describe_member(
    config: RunConfig, tokenizer_folder: Path, facts: Facts, dtype: Dtype
) -> Mapping[str, Any]:
    """Return what a member needs of a run: plain values, with a digest of the files."""
    run = config.run.model_copy(update={"dtype": dtype})
    files = {
        path.name: path.read_bytes()
        for path in sorted(tokenizer_folder.iterdir())
        if path.is_file()
    }
    return {
        "config_json": config.model_copy(update={"run": run}).model_dump_json(),
        "model": encode(facts.spec),
        "tokenizer_files": files,
        "digest": digest_files(files),
    }


def digest_files(files: Mapping[str, bytes]) -> str:
    """Return a digest of files by name. Pure."""
    whole = hashlib.sha256()
    for name, data in sorted(files.items()):
        whole.update(f"{len(name)} {name} {len(data)} ".encode() + data)
    return whole.hexdigest()


def worker_name(request: JoinRequest) -> str:
    """Return the name that a member has among the workers of a run. Pure."""
    return f"member-{request.name}"


def keep_token(path: Path) -> bytes:
    """Return the run's token, from its file or made now. InputError for a file that others may
    read."""
    try:
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return read_token(path)
    with os.fdopen(made, "wb") as out:
        out.write(secrets.token_hex(32).encode() + b"\n")
    return read_token(path)


def read_token(path: Path) -> bytes:
    """Return the token in a file. InputError for a file that is not there, that others may read, or
    without a token."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror}",
            hint=f"copy {TOKEN_FILE} of the run's folder to the member",
        ) from error
    with os.fdopen(handle, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        token = file.read(4096).strip()
    if mode & 0o077:
        raise InputError(
            f"{path} has mode {mode:o}: others may read the token", hint=f"chmod 600 {path}"
        )
    if len(token) < LEAST_TOKEN_BYTES:
        raise InputError(
            f"{path} has {len(token)} bytes, a token has {LEAST_TOKEN_BYTES} or more",
            hint=f"copy {TOKEN_FILE} of the run's folder to the member, whole",
        )
    return token


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of "host:port" or "[host]:port". InputError for another text. Pure."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or not port.isdecimal() or int(port) > 65535 or (":" in bare) != (host != bare):
        raise InputError(
            f"{address!r} is no address", hint="give host:port, or [host]:port for IPv6"
        )
    return bare, int(port)


def listening_address(address: str) -> tuple[str, int]:
    """Return where a run listens for members; the weights are at the next port. InputError for an
    address that is no use to members. Pure."""
    host, port = split_address(address)
    if host in ("0.0.0.0", "::") or port == 65535:
        raise InputError(
            f"cluster.members_address = {address!r}: members get this host, this port "
            "and the next one",
            hint="give the address of this host in the members' network, and a port below 65535",
        )
    return host, port


def name_here() -> str:
    """Return a name for a member on this host. Pure, but for the host's name."""
    kept = "".join(c if c.isalnum() and c.isascii() else "-" for c in socket.gethostname().lower())
    return kept.strip("-")[:40].strip("-") or "member"
