"""Guard: the processes around a driver on Ray. In: how often to start it again. Out: a driver that
can be lost, and no process of it that stays. Ray ends its driver from C++, without a word, when the
raylet is gone; and a driver that is killed leaves Ray's processes behind. No torch, no ray here: it
forks before they are loaded.

    front ──▶ guard ──▶ driver ──▶ Ray's processes, workers, rewards
      │         │          └─ report: its run folder, its end in good order
      │         └─ ends all below it when the driver or the front is gone;
      │            starts the driver again when Ray ended it
      └─ what the shell started: passes signals on, ends as the driver did;
         ends all when the guard is killed

Front and guard are subreapers: whatever loses its parent below them becomes theirs, so that they
find and reap it also where no init does. They end descendants of their own and nothing else.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from gyre.cluster.worker.process_group import PR_SET_PDEATHSIG, prctl
from gyre.core.errors import RankError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LOST = (1, -signal.SIGABRT)  # how Ray ends a driver
END_S = 20.0  # longest wait for killed processes to be gone
LOOK_S = 0.02
ENDED = "ended"
RAY_ENDED = "Ray ended the driver: its raylet or its head process is gone"


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """A driver's side of its guard: what it knows, and the pipe that it reports to."""

    number: int  # how often it was started again
    folder: Path | None  # of the run to go on with then
    report: int  # a pipe

    def tell_folder(self, folder: Path) -> None:
        os.write(self.report, f"{folder.absolute()}\n".encode())

    def tell_end(self) -> None:
        """Report that this process is ending, and has said why."""
        os.write(self.report, f"{ENDED}\n".encode())


def guard_driver(max_restarts: int) -> Guarded:
    """Return in the driver, once for each time that it is started. The caller's own process and
    the guard end in here with SystemExit, as the driver did. RankError, in the guard, when Ray has
    ended it once too often."""
    alive, held = os.pipe()  # the guard reads the end of the front
    _become_subreaper()
    pid = _fork()
    if pid == 0:
        os.close(held)
        os.setsid()
        return _guard(alive, max_restarts)
    os.close(alive)
    _pass_on([pid])
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        end_descendants()
        raise RankError(
            f"the guard of the driver was ended by signal {-code}",
            hint="go on with gyre train --resume RUN",
        )
    raise SystemExit(code)


def _guard(alive: int, max_restarts: int) -> Guarded:
    _become_subreaper()
    passed: list[int] = []  # signals that the driver got
    current: list[int] = []  # the driver's process
    _pass_on(current, passed)
    folder: Path | None = None
    for number in range(max_restarts + 1):
        report, told = os.pipe()
        pid = _fork()
        if pid == 0:
            _become_driver(alive, report)
            return Guarded(number=number, folder=folder, report=told)
        os.close(told)
        current[:] = [pid]
        code = _follow(pid, alive)
        current.clear()
        end_descendants()
        lines = _read_all(report)
        folder = next((Path(line) for line in lines if line != ENDED), folder)
        if ENDED in lines or passed or code not in LOST:
            break
        if folder is None:
            raise RankError(RAY_ENDED, hint="the run had no folder yet: begin it again")
    else:
        raise RankError(
            f"{RAY_ENDED}, {max_restarts + 1} times (cluster.max_restarts = {max_restarts})",
            hint=f"see why it is ended, then go on with: gyre train --resume {folder}",
        )
    if code < 0:
        hint = f"go on with: gyre train --resume {folder}" if folder else ""
        raise RankError(
            f"the driver was ended by signal {-code}; its processes were ended with it", hint=hint
        )
    raise SystemExit(code)


def _follow(pid: int, alive: int) -> int:
    """Return the driver's exit code. Where the front is gone first, everything ends, this process
    too."""
    handle = os.pidfd_open(pid)
    try:
        while True:
            ready, _, _ = select.select([handle, alive], [], [])
            if handle in ready:
                _, status = os.waitpid(pid, 0)
                return os.waitstatus_to_exitcode(status)
            end_descendants()
            os._exit(1)
    finally:
        os.close(handle)


def end_descendants() -> None:
    """Kill and reap every process below this one, and those that become its children meanwhile."""
    me, end_s = psutil.Process(), time.monotonic() + END_S
    while time.monotonic() < end_s:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = me.children(recursive=True)
        if not left:
            return
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(LOOK_S)
    names = ", ".join(f"{process.pid}" for process in me.children(recursive=True))
    print(
        f"warning: processes that stay {END_S:g} s after they were killed: {names}", file=sys.stderr
    )


def _become_driver(*not_mine: int) -> None:
    """Signals and a process group as a command has them, an end with the guard's."""
    for handle in not_mine:
        os.close(handle)
    os.setpgid(0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )


def _pass_on(to: list[int], passed: list[int] | None = None) -> None:
    """Signals go to the processes that `to` holds, then."""

    def handle(number: int, frame: FrameType | None) -> None:
        if passed is not None:
            passed.append(number)
        for pid in to:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return os.fork()


def _read_all(handle: int) -> list[str]:
    """Return the whole lines of a report; no process is left that could write more."""
    with os.fdopen(handle, "rb") as file:
        return [line.decode() for line in file.read().split(b"\n")[:-1]]


def _become_subreaper() -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
