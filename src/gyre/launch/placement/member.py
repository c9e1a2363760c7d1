"""Member: a rollout engine of another host that works for a pod's run. In: the run's address and
its token. Out: a process that answers the driver's calls until the run ends, or a signal lets it
leave.

The first SIGTERM or SIGINT asks the driver for leave, which lets the engine end what it has. A
second one ends the process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch.nn.modules.module import register_module_forward_pre_hook

from gyre.cluster.members import SILENCE_S
from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.cluster.worker.handshake import NAME, JoinRequest, ask_to_join, notice_silence
from gyre.cluster.worker.process import WorkerProcess
from gyre.cluster.worker.server import Context
from gyre.core.codec import decode
from gyre.core.errors import InputError
from gyre.launch.factories import Policy, blank_decoder, make_machine
from gyre.launch.placement.pod_members import (
    MEMBER_BUILDER,
    digest_files,
    name_here,
    read_token,
    split_address,
)
from gyre.launch.placement.worker import RankWorker, WorkerSpec
from gyre.models.spec import ModelSpec
from gyre.runconfig.run_config import RunConfig
from gyre.text.tokenizer import load_tokenizer
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.opened import Reading

CONNECT_S = 10.0
GRACE_S = 15.0  # for the driver to let it go, on top of the time to drain


class MemberEnd:
    """Ends the process: with code 0 after the driver's goodbye, with 1 where the link was lost, so
    that a supervisor may start it again."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.goodbye = ""

    def __call__(self, cause: str) -> None:
        print(f"left the run: {self.goodbye or cause}", file=sys.stderr, flush=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0 if self.goodbye else 1)  # nothing is unsaved, and threads may be anywhere


class MemberWorker:
    """One engine, which begins and ends with each stage."""

    def __init__(
        self, worker: RankWorker, reading: Reading, *, drain_s: float, end: MemberEnd
    ) -> None:
        self._worker = worker
        self._reading = reading
        self._drain_s = drain_s
        self._end = end
        self._leaves = asyncio.Event()
        self._turn = asyncio.Lock()  # a stage may end while it begins

    @property
    def engine(self) -> EngineEndpoint | None:
        return self._worker.engine

    async def begin(self, stage_name: str, plan_json: str) -> None:
        """Make the stage's engine, on dummy weights."""
        async with self._turn:
            await self._worker.begin(stage_name, plan_json, 0, "")
            assert self._worker.engine is not None
            self._worker.engine.engine.read_parts(self._reading)

    async def end(self) -> None:
        """End the stage, and keep what the next one needs."""
        async with self._turn:
            if self._worker.engine is not None:
                await self._worker.end(False)

    async def until_leaving(self) -> float:
        """Return when a signal asks this member to leave, with the seconds that it may take. Waits
        for: that signal, or the end of the link."""
        await self._leaves.wait()
        return self._drain_s

    def part(self, reason: str) -> None:
        """Take the driver's goodbye; it hangs up next."""
        self._end.goodbye = reason

    def leave(self) -> None:
        """Ask for leave; a second time end now."""
        if self._leaves.is_set():
            self._end("a second signal ended it")
        self._leaves.set()
        wait_s = self._drain_s + GRACE_S
        why = f"the driver had not let it go after {wait_s:g} s"
        asyncio.get_running_loop().call_later(wait_s, self._end, why)


async def build_member(
    context: Context,
    *,
    config_json: str,
    model: bytes,
    tokenizer_files: Mapping[str, bytes],
    digest: str,
    folder: Path,
    token: bytes,
    drain_s: float,
    end: MemberEnd,
) -> MemberWorker:
    """Make the model, without its weights. The driver gives the first four; the others are this
    process's own. InputError for files that are not whole."""
    if digest_files(tokenizer_files) != digest:
        raise InputError(
            "the tokenizer's files did not arrive whole", hint="join again; look at the network"
        )
    kept = folder / "tokenizer"
    kept.mkdir(exist_ok=True)
    for name, data in tokenizer_files.items():
        if Path(name).name != name:
            raise InputError(f"{name!r} is no file's name", hint="join another run")
        (kept / name).write_bytes(data)
    config = RunConfig.model_validate_json(config_json)
    machine, tokenizer = make_machine(config), load_tokenizer(kept)
    spec = decode(model, ModelSpec)
    policy = Policy(decoder=blank_decoder(spec, machine), tokenizer=tokenizer, spec=spec)
    # one for each layer that runs
    register_module_forward_pre_hook(lambda module, args: context.tick())
    alone = WorkerSpec(
        config_json=config_json,
        folder=str(folder),
        directory=str(folder),
        rank=None,
        has_engine=True,
        shares_process=False,
        run_id="",
        world_size=0,
        store_host="",
        store_port=0,
        round_id="",
    )
    worker = RankWorker(context, alone, config, machine, policy, None, None)
    reading = Reading(host_id=host_id(), token=token)
    member = MemberWorker(worker, reading, drain_s=drain_s, end=end)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, member.leave)
    return member


def join_run(address: str, token_file: Path, *, name: str, drain_s: float) -> None:
    """Join a run, and work for it until it ends this process. InputError where it cannot."""
    token = read_token(token_file)
    own = name or name_here()
    if not NAME.fullmatch(own):
        raise InputError(
            f"{own!r} is no name of a member", hint="small letters, digits and hyphens: --name"
        )
    link = connect(address)
    request = JoinRequest(name=own, place=f"{socket.gethostname()}, pid {os.getpid()}")
    try:
        ask_to_join(link, token, request, deadline_s=CONNECT_S)
    except OSError as error:
        raise InputError(
            f"{address} hung up: {error}", hint="the run's events.jsonl says why (member.refused)"
        ) from error
    print(f"joined {address} as member-{own}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="gyre-member-") as folder:
        end = MemberEnd(folder)
        own_parts = {
            "folder": Path(folder),
            "token": token,
            "drain_s": drain_s,
            "end": end,
        }
        builders = {MEMBER_BUILDER: partial(build_member, **own_parts)}
        WorkerProcess(link, builders=builders, on_end=end).run()


def connect(address: str) -> socket.socket:
    """Return a connection to a run. InputError where there is none."""
    host, port = split_address(address)
    try:
        link = socket.create_connection((host, port), CONNECT_S)
    except OSError as error:
        raise InputError(
            f"{address} cannot be reached: {error}",
            hint="see whether the run is there (member.listening in its events.jsonl), and the "
            "network between",
        ) from error
    notice_silence(link, SILENCE_S)
    return link
