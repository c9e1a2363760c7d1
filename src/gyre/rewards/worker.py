"""Worker: the processes that judge. A nursery loads the libraries once and forks workers, so a killed one costs little.

    scorer ── "fork N" + socket, "kill N" ──▶ nursery ──fork──▶ worker N ◀── Job / Verdict ──▶ scorer
           ◀── "gone N STATUS" ──────────────

The nursery runs no reward. When the scorer goes, its socket closes: the nursery ends every worker and all that they
started, then itself. Imports no torch, numpy or pydantic. Started as `python -m gyre.rewards.worker SOCKET LIBRARY…`
by rewards.pool.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn, cast

import msgspec

from gyre.rewards.answer import compare
from gyre.rewards.checks import QUICK, Check, Tools, build_check
from gyre.rewards.executors import Cell
from gyre.rewards.jail import kernel, watch
from gyre.rewards.messages import (
    READY,
    Item,
    Setup,
    Verdict,
    decode_item,
    decode_job,
    decode_setup,
    frame,
    take_frame,
)
from gyre.rewards.sandbox import Limits, Mode, Program, ProgramResult


def nursery(control: socket.socket) -> NoReturn:
    """Fork and end workers as told, until the scorer hangs up."""
    kernel.become_subreaper()  # what a worker leaves behind comes to us, and ends with us
    gc.collect()
    gc.freeze()
    workers: dict[int, tuple[str, int]] = {}  # pidfd → name and pid
    poll = select.poll()
    poll.register(control.fileno(), select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != control.fileno():
                poll.unregister(fd)
                name, pid = workers.pop(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(BrokenPipeError):  # the scorer is leaving
                    control.send(f"gone {name} {os.waitstatus_to_exitcode(status)}".encode())
                continue
            try:
                message, files, _, _ = socket.recv_fds(control, 4096, 1)
            except ConnectionResetError:  # the scorer went while news for it was on its way
                message, files = b"", []
            if not message:
                watch.end_descendants()
                os._exit(0)
            order, name = message.decode().split()
            if order == "fork":
                pid = _fork_worker(control, files[0], list(workers))
                fd = os.pidfd_open(pid)
                workers[fd] = name, pid
                poll.register(fd, select.POLLIN)
            else:
                for other, pid in workers.values():
                    if other == name:
                        _kill_group(pid)


def _kill_group(pid: int) -> None:
    """A worker with what it started; it may have ended already, but until we wait for it its number is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _fork_worker(control: socket.socket, channel_fd: int, siblings: Sequence[int]) -> int:
    pid = os.fork()
    if pid:
        os.close(channel_fd)
        return pid
    code = 1
    try:
        os.setsid()
        kernel.die_with_parent(signal.SIGKILL)
        control.close()
        for fd in siblings:
            os.close(fd)
        serve(socket.socket(fileno=channel_fd))
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0  # the scorer has let go of this worker
    except BaseException as error:  # noqa: BLE001 - a fork must not return into the nursery's loop
        os.write(2, f"gyre.rewards.worker: {error!r}\n".encode())
    finally:
        os._exit(code)


def serve(channel: socket.socket) -> None:
    """Worker: take the setup, then jobs, until the scorer hangs up."""
    buffer = bytearray()
    setup = decode_setup(_next_frame(channel, buffer) or b"")
    if setup.memory_bytes:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, hard))  # programs in the sandbox have their own
    known = bytearray()  # verdicts not yet told

    def tell() -> None:
        channel.sendall(known)
        known.clear()

    refused: Counter[str] = Counter()
    checks = build_checks(setup, tell, refused)
    quick = [part["kind"] in QUICK for part in setup.parts]
    channel.sendall(frame(Verdict(index=READY)))
    while True:
        body = _next_frame(channel, buffer)
        if body is None:
            return
        job, items = decode_job(body), {}
        for index, (place, part) in enumerate(job.checks):
            if known and not quick[part]:
                tell()
            if place not in items:
                items[place] = decode_item(job.items[place])
            verdict = judge(index, checks[part], items[place])
            known += frame(msgspec.structs.replace(verdict, refused_calls=dict(refused)))
            refused.clear()
        tell()


def build_checks(setup: Setup, before_slow: Callable[[], None], refused: Counter[str]) -> list[Check]:
    """The checks of all parts, with one sandbox cell among them, started at the first program. System calls that it
    refuses are added to `refused`."""
    cell = Cell(cast(Mode, setup.sandbox)) if setup.sandbox else None

    def run(program: Program, limits: Limits) -> ProgramResult:
        assert cell is not None
        result = cell.run(program, limits=limits)
        refused.update(result.refused_calls)
        return result

    tools = Tools(run=run if cell is not None else None, before_slow=before_slow)
    return [build_check(part, tools) for part in setup.parts]


def judge(index: int, check: Check, item: Item) -> Verdict:
    """Run one check. Whatever it raises is its verdict."""
    started_s = time.monotonic()
    try:
        value, reason, outcome = check(item)
    except MemoryError:
        value, reason, outcome = 0.0, "it needs more memory than a worker may use", "error"
    except Exception as error:  # noqa: BLE001 - becomes a labelled score, and an event at the scorer
        value, reason, outcome = 0.0, f"{type(error).__name__}: {error}"[:500], "error"
    reason = reason.encode("utf-8", "replace").decode()
    return Verdict(index, value, reason, outcome, started_s, time.monotonic())


def _next_frame(channel: socket.socket, buffer: bytearray) -> bytes | None:
    """Wait for one frame. The scorer sends the next one only when this one is done."""
    while True:
        body = take_frame(buffer)
        if body is not None:
            return body
        data = channel.recv(1 << 20)
        if not data:
            return None
        buffer += data


def preload(libraries: Sequence[str]) -> None:
    """Load what the parts will need, so that forks have it warm."""
    if "math_verify" in libraries:
        compare(r"\frac{1}{2}", "0.5 + x", how="latex")  # the first use builds its tables
    if "reasoning_gym" in libraries:
        import reasoning_gym  # noqa: F401


if __name__ == "__main__":
    control_socket = socket.socket(fileno=int(sys.argv[1]))
    os.dup2(2, 1)  # what rewards print goes to stderr; stdout belongs to the command
    preload(sys.argv[2:])
    nursery(control_socket)
