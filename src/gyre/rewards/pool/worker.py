"""Worker: the processes that judge. A nursery loads the libraries once and forks workers, so a
killed one costs little.

    scorer ── "fork N" + socket, "kill N" ──▶ nursery ──fork──▶ worker N ◀─ Job / Verdict ─▶ scorer
           ◀── "gone N STATUS" ──────────────

The nursery runs no reward. When the scorer goes, its socket closes: the nursery ends every worker
and all that they started, then itself; likewise when its guard goes. What a worker started ends
with it: it inherits its own orphans, and the nursery those of a worker that has ended, which it
kills after a moment in which sandboxes clean up. Imports no torch, numpy or pydantic.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn, cast

import msgspec

from gyre.rewards.answers.answer import compare
from gyre.rewards.checks import QUICK, Check, Tools, build_check
from gyre.rewards.function import place_of
from gyre.rewards.messages import (
    MOST_REASON_CHARS,
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
from gyre.rewards.pool import process_tree
from gyre.rewards.sandbox import kernel, watchdog
from gyre.rewards.sandbox.executors import Cell
from gyre.rewards.sandbox.records import Limits, Mode, Program, ProgramResult

_GRACE_S = 1.0  # for what a dead worker started to end by itself
_LEAK_SHARE = 0.5  # of the address space that a worker has to grow in
_MOST_CHILDREN = 64  # processes that rewards may leave behind in one worker
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def nursery(control: socket.socket, guard_fd: int) -> NoReturn:
    """Fork and end workers as told, until the scorer or the guard has gone."""
    kernel.become_subreaper()  # what a worker leaves behind comes to us, and ends with us
    gc.collect()
    gc.freeze()
    workers: dict[int, tuple[str, int]] = {}  # pidfd → name and pid
    orphans_s: float | None = None  # when to end what dead workers left behind
    poll = select.poll()
    for fd in (control.fileno(), guard_fd):
        poll.register(fd, select.POLLIN)
    while True:
        now_s = time.monotonic()
        if orphans_s is not None and now_s >= orphans_s:
            none_left = process_tree.end_orphans([pid for _, pid in workers.values()])
            orphans_s = None if none_left else now_s + 0.05
        for fd, _ in poll.poll(None if orphans_s is None else max(0.0, orphans_s - now_s) * 1000):
            if fd == guard_fd:
                _end_all()
            elif fd == control.fileno():
                _obey(control, guard_fd, workers, poll)
            else:
                poll.unregister(fd)
                name, pid = workers.pop(fd)
                os.close(fd)
                _, status = os.waitpid(pid, 0)
                orphans_s = time.monotonic() + _GRACE_S
                tell_gone(control, name, status)


def tell_gone(control: socket.socket, name: str, status: int) -> None:
    """Say that a worker has ended. A scorer that is leaving may have left such news unread, which
    resets the socket."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.send(f"gone {name} {os.waitstatus_to_exitcode(status)}".encode())


def _obey(
    control: socket.socket, guard_fd: int, workers: dict[int, tuple[str, int]], poll: select.poll
) -> None:
    """Take one order of the scorer's."""
    try:
        message, files, _, _ = socket.recv_fds(control, 4096, 1)
    except ConnectionResetError:  # the scorer went while news for it was on its way
        message, files = b"", []
    if not message:
        _end_all()
    order, name = message.decode().split()
    if order == "fork":
        pid = _fork_worker(control, files[0], [guard_fd, *workers])
        fd = os.pidfd_open(pid)
        workers[fd] = name, pid
        poll.register(fd, select.POLLIN)
        return
    for other, pid in workers.values():
        if other == name:
            _kill_group(pid)


def _end_all() -> NoReturn:
    watchdog.end_descendants()
    os._exit(0)


def _kill_group(pid: int) -> None:
    """A worker with what it started; it may have ended already, but until we wait for it its number
    is its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _fork_worker(control: socket.socket, channel_fd: int, others: Sequence[int]) -> int:
    pid = os.fork()
    if pid:
        os.close(channel_fd)
        return pid
    code = 1
    try:
        os.setsid()
        kernel.die_with_parent(signal.SIGKILL)
        kernel.become_subreaper()
        control.close()
        for fd in others:
            os.close(fd)
        serve(socket.socket(fileno=channel_fd))
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        code = 0  # the scorer has let go of this worker
    except BaseException as error:  # noqa: BLE001 - a fork must not return into the nursery's loop
        os.write(2, f"gyre.rewards.pool.worker: {error!r}\n".encode())
    finally:
        os._exit(code)


def serve(channel: socket.socket) -> None:
    """Worker: take the setup, then jobs, until the scorer hangs up."""
    buffer = bytearray()
    setup = decode_setup(_next_frame(channel, buffer) or b"")
    if setup.memory_bytes:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        # programs in the sandbox have their own
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, hard))
    known = bytearray()  # verdicts not yet told

    def tell() -> None:
        channel.sendall(known)
        known.clear()

    me = os.getpid()
    inside: list[int] = []  # of the check that runs
    refused: Counter[str] = Counter()  # likewise
    checks = build_checks(setup, tell, inside.append, refused)
    if os.getpid() != me:
        os._exit(0)  # a module forked while it was imported, and this is the copy
    quick = [part["kind"] in QUICK for part in setup.parts]
    wear = Wear(setup.memory_bytes)
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
            verdict = judge(index, checks[part], items[place], token=job.token)
            worn = wear.reason() if not quick[part] or index + 1 == len(job.checks) else ""
            verdict = msgspec.structs.replace(
                verdict, decided_inside=sum(inside), refused_calls=dict(refused)
            )
            known += frame(msgspec.structs.replace(verdict, worn=worn))
            inside.clear()
            refused.clear()
            if worn:
                break  # the scorer replaces this worker and gives the rest to others
        tell()


class Wear:
    """What checks leave behind in a worker: memory and processes."""

    def __init__(self, memory_bytes: int) -> None:
        self._first_bytes = _address_space_bytes()
        room_bytes = max(0, memory_bytes - self._first_bytes)
        self._most_bytes = self._first_bytes + int(_LEAK_SHARE * room_bytes) if memory_bytes else 0

    def reason(self) -> str:
        """Why this worker should be replaced; "" when it can go on."""
        grown_bytes = _address_space_bytes() - self._first_bytes
        if self._most_bytes and self._first_bytes + grown_bytes > self._most_bytes:
            grown = f"{grown_bytes >> 20} MiB more than at its start"
            return (
                f"its rewards hold {grown}, over {_LEAK_SHARE:.0%} of what "
                "rewards.worker_memory_mib leaves"
            )
        num_children = len(process_tree.children())
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
    """The checks of all parts, with one sandbox cell among them, started at the first program.
    System calls that it refuses are added to `refused`."""
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


def judge(index: int, check: Check, item: Item, *, token: bytes = b"") -> Verdict:
    """Run one check. Whatever it raises is its verdict. A copy of this process that the check
    forked ends here."""
    started_s, me = time.monotonic(), os.getpid()
    try:
        value, reason, outcome = check(item)
    except MemoryError:
        value, reason, outcome = 0.0, "it needs more memory than a worker may use", "error"
    except Exception as error:  # noqa: BLE001
        # becomes a labelled score, and an event at the scorer
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
    return Verdict(index, value, reason, outcome, started_s, time.monotonic(), token)


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
