"""Executors: start programs in the sandbox and bring back what came of them. In: Program, Limits.
Out: ProgramResult.

`Cell` owns one fork server (sandbox.server) and runs one program at a time, blocking: for
worker processes. `Cells` is the asynchronous sandbox: some cells, each behind a
thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import marshal
import os
import select
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

from gyre.core.errors import ConfigError
from gyre.core.events import Emit
from gyre.rewards.fork_server.client import ForkServerProcess
from gyre.rewards.fork_server.connection import Ended, Ready, Refused
from gyre.rewards.sandbox.records import Limits, Mode, Program, ProgramResult, classify

Wish = Literal["strong", "weak", "auto"]

_ISOLATION = {
    "strong": "namespaces: no network, own read-only file system, own processes, no capabilities, "
    "listed calls",
    "bubblewrap": "bubblewrap: no network, own read-only file system, own processes, no "
    "capabilities, listed calls",
    "weak": "weak: limits and listed system calls only; network, files and user are shared with "
    "this machine",
}
_START_S = 20.0  # until a server has answered
_END_S = 20.0  # until a server that was asked to end has done so
# beyond the wall limit, until a server that does not answer is replaced. Weak mode removes what a
# program left, which may be tens of thousands of folders on a slow disk.
_ANSWER_S = 60.0
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, SHRINK, GROW, WRITE: the file cannot change any more


class IsolationUnavailable(Exception):
    """Raised where the machine does not let us isolate in the mode asked for."""


class Cell:
    """One fork server of programs. Runs one program at a time; a server that dies is replaced at
    the next program."""

    def __init__(self, mode: Mode) -> None:
        self.mode: Mode = mode
        self.note = ""
        self._server: ForkServerProcess | None = None
        self._runs = 0  # programs so far

    @property
    def pid(self) -> int | None:
        """Process number of the server, while there is one."""
        return self._server.pid if self._server is not None else None

    def start(self) -> None:
        """Start the server and wait until it is ready. Unavailable when the machine refuses."""
        self._server = ForkServerProcess(
            "gyre.rewards.sandbox.server",
            [self.mode, shutil.which("bwrap") or "", *_shown_folders()],
            python=["-S", "-s", "-P", "-B"],
            environment=_environment(),
            folder="/",
            quiet=True,
        )
        self._server.connection.socket.settimeout(_START_S)
        try:
            received = self._server.connection.receive()
            first = received[0] if received else Refused("the server died while starting")
        except TimeoutError:
            first = Refused(f"the server did not answer within {_START_S:g} s")
        if not isinstance(first, Ready):
            self.close()
            raise IsolationUnavailable(first.error)
        self.note = first.note

    def run(self, program: Program, *, limits: Limits) -> ProgramResult:
        """Run one program in a fresh process. Never raises for what the program does."""
        if self._server is None:
            try:
                self.start()
            except IsolationUnavailable as error:
                return _failed(str(error))
        assert self._server is not None
        payload = {
            "source": program.source,
            "argv": list(program.argv),
            "files": dict(program.files),
        }
        inputs = [
            _sealed(marshal.dumps(payload)),
            _sealed(program.stdin.encode("utf-8", "replace")),
        ]
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        files = [*inputs, out_write, err_write]
        self._runs += 1
        try:
            try:
                self._server.start(self._runs, asdict(limits), files)
            finally:
                for fd in files:
                    os.close(fd)
            return self._follow(self._server, out_read, err_read, limits)
        except OSError as error:  # the server has gone; the next program gets a new one
            self.close()
            return _failed(f"the sandbox's fork server died: {error}")
        finally:
            os.close(out_read)
            os.close(err_read)

    def _follow(
        self, server: ForkServerProcess, out_fd: int, err_fd: int, limits: Limits
    ) -> ProgramResult:
        """Collect output until the server reports the end of the run.

        Then every process of the run is gone. What its pipes hold is taken without waiting for
        their end, which a socket that holds itself open would keep away.
        """
        control = server.connection.fileno()
        collected: dict[int, bytearray] = {out_fd: bytearray(), err_fd: bytearray()}
        poll = select.poll()
        for fd in (control, out_fd, err_fd):
            poll.register(fd, select.POLLIN)
        os.set_blocking(out_fd, False)
        os.set_blocking(err_fd, False)
        end: Ended | None = None
        give_up_s = time.monotonic() + limits.wall_s + _ANSWER_S
        flooded = False
        while end is None:
            ready = {fd for fd, _ in poll.poll(max(give_up_s - time.monotonic(), 0.0) * 1000 + 1)}
            if control in ready:
                received = server.connection.receive()
                if received is None:
                    raise ConnectionResetError("it closed its socket")
                end = received[0]
            elif not ready and time.monotonic() >= give_up_s:
                raise TimeoutError(f"no answer {_ANSWER_S:g} s after the wall limit")
            for fd in collected.keys() & ready:
                if not _take(fd, collected[fd]):
                    poll.unregister(fd)
            over = sum(map(len, collected.values())) - limits.output_bytes
            if over > 0 and end is None and not flooded:
                server.kill_child(self._runs, "output")
                flooded = True
            for kept in collected.values():
                del kept[limits.output_bytes :]
        for fd, kept in collected.items():
            while len(kept) <= limits.output_bytes and _take(fd, kept):
                pass
            del kept[limits.output_bytes :]
        out = bytes(collected[out_fd])
        err = bytes(collected[err_fd])
        return _result(end, out, err, limits, flooded=flooded)

    def close(self) -> None:
        """End the server and whatever it runs."""
        server, self._server = self._server, None
        if server is not None:
            server.end(_END_S)


class Cells:
    """An asynchronous sandbox: up to `in_flight` programs at a time, the others wait in
    order."""

    def __init__(self, mode: Mode, *, in_flight: int = 2) -> None:
        self.mode: Mode = mode
        self.isolation = _ISOLATION[mode]
        self._idle: SimpleQueue[Cell] = SimpleQueue()
        self._cells = [Cell(mode) for _ in range(in_flight)]
        for cell in self._cells:
            self._idle.put(cell)
        self._threads = ThreadPoolExecutor(in_flight, thread_name_prefix="sandbox")

    async def run(self, program: Program, *, limits: Limits) -> ProgramResult:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._run, program, limits
        )

    def _run(self, program: Program, limits: Limits) -> ProgramResult:
        cell = self._idle.get_nowait()  # there are as many as threads
        try:
            return cell.run(program, limits=limits)
        finally:
            self._idle.put(cell)

    def close(self) -> None:
        """Wait for running programs (each has a wall limit) and leave no process."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for cell in self._cells:
            cell.close()


def choose_mode(wish: Wish, *, emit: Emit) -> Mode:
    """Try what the machine allows and say so: `sandbox.started`, or `sandbox.weak` where walls are
    missing.

    "strong" raises ConfigError where the machine has no strong mode; "weak" does not try.
    """
    refusals: dict[str, str] = {}
    for mode in ("strong", "bubblewrap") if wish != "weak" else ():
        try:
            note = _probe(mode)
        except IsolationUnavailable as error:
            refusals[mode] = str(error)
            continue
        isolation, counted = _ISOLATION[mode], bool(refusals)  # the second choice is a fallback
        emit(
            "sandbox.started",
            mode=mode,
            isolation=isolation,
            note=note,
            refused=refusals,
            counted=counted,
        )
        return mode
    said = "; ".join(f"{mode}: {why}" for mode, why in refusals.items())
    if wish == "strong":
        raise ConfigError(
            f'rewards.sandbox = "strong", but this machine refuses the isolation ({said})',
            hint="allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone = "
            "1, or the AppArmor "
            "setting kernel.apparmor_restrict_unprivileged_userns = 0), install bubblewrap, or "
            'set sandbox = "auto" '
            "to run programs without network and file system isolation",
        )
    emit(
        "sandbox.weak",
        mode="weak",
        isolation=_ISOLATION["weak"],
        reason=said or 'rewards.sandbox = "weak"',
    )
    return "weak"


def _probe(mode: Mode) -> str:
    """Start a cell, run one empty program in it, and return the server's note."""
    if mode == "bubblewrap" and shutil.which("bwrap") is None:
        raise IsolationUnavailable("bwrap is not installed")
    cell = Cell(mode)
    try:
        cell.start()
        result = cell.run(Program(source="print('ready')"), limits=Limits())
        if result.outcome != "ok":
            raise IsolationUnavailable(
                f"a first program ended as {result.outcome}: "
                f"{result.detail or result.stderr[-300:]}"
            )
        return cell.note
    finally:
        cell.close()


def _shown_folders() -> list[str]:
    """List the folders that hold Python itself."""
    return sorted({sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__)})


def _environment() -> dict[str, str]:
    """Make the whole environment of programs. Hashes are fixed so that a program prints the same
    each time."""
    package = str(Path(__file__).resolve().parents[3])
    path = "/usr/local/bin:/usr/bin:/bin"
    return {
        "PATH": path,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHONPATH": package,
    }


def _sealed(data: bytes) -> int:
    """Return an open file in memory with this content, at its beginning, that no one can change."""
    fd = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def _take(fd: int, into: bytearray) -> bool:
    """Read what is there. False at the end of the pipe, and when it is empty."""
    try:
        data = os.read(fd, 65536)
    except BlockingIOError:
        return False
    into += data
    return bool(data)


def _result(end: Ended, out: bytes, err: bytes, limits: Limits, *, flooded: bool) -> ProgramResult:
    stdout = out.decode("utf-8", "replace")
    stderr = err.decode("utf-8", "replace")
    reason = "output" if flooded else end.reason
    cpu_s = end.report["cpu_s"]
    outcome, detail = classify(
        end.exit_code, reason, stderr, error=end.report["error"], cpu_s=cpu_s, limits=limits
    )
    return ProgramResult(
        outcome=outcome,
        stdout=stdout,
        stderr=stderr,
        exit_code=end.exit_code if end.exit_code >= 0 and reason is None else None,
        wall_s=end.report["wall_s"],
        cpu_s=cpu_s,
        detail=detail,
        refused_calls=end.report["refused"],
    )


def _failed(why: str) -> ProgramResult:
    return ProgramResult(
        outcome="failed", stdout="", stderr="", exit_code=None, wall_s=0.0, cpu_s=0.0, detail=why
    )
