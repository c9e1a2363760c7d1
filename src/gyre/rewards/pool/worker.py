"""Worker: the processes that judge. In: a setup, jobs. Out: a result for each check.

The fork server loads the libraries once and runs no reward, so a killed worker costs little. When
the scorer or the supervisor goes, it ends every worker with all that they started, then itself. A
worker inherits its own orphans; the fork server inherits those of a worker that has ended. It kills
them after a moment in which sandboxes clean up. Imports no torch, numpy or pydantic.

    scorer ── StartChild + channel, Kill ──▶ fork server ──fork──▶ worker ◀─ Job, CheckResult
           ◀── Ended ───────────────────────                           ─▶ scorer
"""

from __future__ import annotations

import gc
import math
import os
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn, cast

import msgspec

from gyre.core.errors import InputError
from gyre.rewards.answers.answer import compare
from gyre.rewards.checks import QUICK, Check, Tools, build_check
from gyre.rewards.fork_server import kernel, processes
from gyre.rewards.fork_server.connection import Connection
from gyre.rewards.fork_server.server import Child, ForkServer
from gyre.rewards.function import load_function, place_of
from gyre.rewards.messages import (
    MOST_REASON_CHARS,
    READY,
    CheckResult,
    Item,
    Setup,
    decode_item,
    decode_job,
    decode_setup,
    frame,
    take_frame,
)
from gyre.rewards.sandbox.executors import Cell
from gyre.rewards.sandbox.records import Limits, Mode, Program, ProgramResult

_GRACE_S = 1.0  # for what a dead worker started to end by itself
_LEAK_SHARE = 0.5  # of the address space that a worker has to grow in
_MOST_CHILDREN = 64  # processes that rewards may leave behind in one worker
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def run_fork_server(client: Connection, supervisor_fd: int) -> NoReturn:
    """Fork and end workers on order, until the scorer or the supervisor has gone."""
    kernel.become_subreaper()  # what a worker leaves behind comes to this process, and ends with it
    server = ForkServer(client, _make_worker, grace_s=_GRACE_S)
    server.watch(supervisor_fd, lambda _events: server.end())
    server.run()


def _make_worker(_request: object, files: list[int]) -> Child:
    return WorkerChild(files[0])


class WorkerChild(Child):
    """A worker, as the fork server forks it."""

    def __init__(self, channel_fd: int) -> None:
        self._channel_fd = channel_fd

    def attach(self, server: ForkServer) -> None:
        os.close(self._channel_fd)

    def become(self, server: ForkServer) -> None:
        """Serve the channel. What a worker starts is its own, and it dies with its parent."""
        try:
            os.setsid()
            kernel.die_with_parent(signal.SIGKILL)
            kernel.become_subreaper()
            server.close_files()
            gc.enable()
            serve(socket.socket(fileno=self._channel_fd))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the scorer has dropped this worker
        except BaseException as error:  # noqa: BLE001 - reported on stderr, which is the log
            os.write(2, f"gyre.rewards.pool.worker: {error!r}\n".encode())
            os._exit(1)
        os._exit(0)


def serve(channel: socket.socket) -> None:
    """Worker: take the setup, then jobs, until the scorer hangs up."""
    buffer = bytearray()
    setup = decode_setup(_next_frame(channel, buffer) or b"")
    if setup.memory_bytes:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        # programs in the sandbox have their own
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, hard))
    known = bytearray()  # results not yet sent

    def flush() -> None:
        channel.sendall(known)
        known.clear()

    me = os.getpid()
    inside: list[int] = []  # of the check that runs
    refused: Counter[str] = Counter()  # likewise
    checks = build_checks(setup, flush, inside.append, refused)
    if os.getpid() != me:
        os._exit(0)  # a module forked while it was imported, and this is the copy
    quick = [part["kind"] in QUICK for part in setup.parts]
    wear = Wear(setup.memory_bytes)
    channel.sendall(frame(CheckResult(index=READY)))
    while True:
        body = _next_frame(channel, buffer)
        if body is None:
            return
        job, items = decode_job(body), {}
        for index, (place, part) in enumerate(job.checks):
            if known and not quick[part]:
                flush()
            if place not in items:
                items[place] = decode_item(job.items[place])
            result = judge(index, checks[part], items[place], token=job.token)
            worn = wear.reason() if not quick[part] or index + 1 == len(job.checks) else ""
            result = msgspec.structs.replace(
                result, decided_inside=sum(inside), refused_calls=dict(refused)
            )
            known += frame(msgspec.structs.replace(result, worn=worn))
            inside.clear()
            refused.clear()
            if worn:
                break  # the scorer replaces this worker and gives the rest to others
        flush()


class Wear:
    """What checks leave behind in a worker: memory and processes."""

    def __init__(self, memory_bytes: int) -> None:
        self._first_bytes = _address_space_bytes()
        room_bytes = max(0, memory_bytes - self._first_bytes)
        self._most_bytes = self._first_bytes + int(_LEAK_SHARE * room_bytes) if memory_bytes else 0

    def reason(self) -> str:
        """Name why this worker should be replaced; "" when it can stay."""
        grown_bytes = _address_space_bytes() - self._first_bytes
        if self._most_bytes and self._first_bytes + grown_bytes > self._most_bytes:
            grown = f"{grown_bytes >> 20} MiB more than at its start"
            return (
                f"its rewards hold {grown}, over {_LEAK_SHARE:.0%} of what "
                "rewards.worker_memory_mib leaves"
            )
        num_children = len(processes.list_children())
        if num_children > _MOST_CHILDREN:
            return f"its rewards left {num_children} processes behind, more than {_MOST_CHILDREN}"
        return ""


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * _PAGE_BYTES


def build_checks(
    setup: Setup,
    before_slow: Callable[[], None],
    decided_inside: Callable[[int], None],
    refused: Counter[str],
) -> list[Check]:
    """Return the checks of all parts, with one sandbox cell among them, started at the first
    program. System calls that it refuses are added to `refused`."""
    cell = Cell(cast(Mode, setup.sandbox)) if setup.sandbox else None

    def run(program: Program, limits: Limits) -> ProgramResult:
        assert cell is not None
        result = cell.run(program, limits=limits)
        refused.update(result.refused_calls)
        return result

    tools = Tools(
        run=run if cell is not None else None,
        before_slow=before_slow,
        decided_inside=decided_inside,
    )
    return [build_check(part, tools) for part in setup.parts]


def judge(index: int, check: Check, item: Item, *, token: bytes = b"") -> CheckResult:
    """Run one check. Whatever it raises is its result. A copy of this process that the check
    forked ends here."""
    started_s, me = time.monotonic(), os.getpid()
    try:
        value, reason, outcome = check(item)
    except MemoryError:
        value, reason, outcome = 0.0, "it needs more memory than a worker may use", "error"
    except Exception as error:  # noqa: BLE001
        # becomes a labeled score, and an event at the scorer
        value, reason, outcome = (
            0.0,
            f"{type(error).__name__}{place_of(error)}: {error}"[:500],
            "error",
        )
    if os.getpid() != me:
        os._exit(0)
    if outcome == "ok" and not math.isfinite(value):
        value, reason, outcome = 0.0, f"it gave {value}, no finite number", "invalid"
    reason = reason.encode("utf-8", "replace").decode()[:MOST_REASON_CHARS]
    return CheckResult(index, value, reason, outcome, started_s, time.monotonic(), token)


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


def try_function() -> None:
    """Serve as the process in which a reward function is checked before a run.

    In (stdin): Setup, then Items, framed. Out (stdout): one CheckResult each, the first (index -1)
    for the import. Run by rewards.pool.validate.
    """
    # its parent ends it after its time, and may be killed before
    kernel.die_with_parent(signal.SIGKILL)
    answers = os.dup(1)
    os.dup2(2, 1)  # what the function prints must not get among the answers
    part = decode_setup(_read_frame() or b"").parts[0]
    try:
        load_function(part["path"])
    except InputError as error:
        os.write(answers, frame(CheckResult(READY, 0.0, error.message, "error")))
        return
    os.write(answers, frame(CheckResult(READY)))
    check = build_check(part, Tools())
    index = 0
    while (body := _read_frame()) is not None:
        os.write(answers, frame(judge(index, check, decode_item(body))))
        index += 1


def _read_frame() -> bytes | None:
    head = sys.stdin.buffer.read(4)
    return sys.stdin.buffer.read(int.from_bytes(head, "little")) if len(head) == 4 else None


if __name__ == "__main__":
    try_function()
