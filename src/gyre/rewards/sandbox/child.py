"""Child: one program from its fork to the death of its last process, as the fork server sees it.
In: limits and four open files: payload, stdin, stdout, stderr. Out: why it was killed, its report.

The program's process says on a channel that it starts, and closes it before the program's own code
runs. What is not said there did not happen: a program cannot report that the sandbox failed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from typing import Any, NamedTuple, NoReturn

from gyre.rewards.fork_server import kernel, processes
from gyre.rewards.fork_server.connection import Ended
from gyre.rewards.fork_server.server import Child, ForkServer
from gyre.rewards.sandbox import bubblewrap, folder, program, rootfs, syscall_filter, watchdog
from gyre.rewards.sandbox.meter import MemoryMeter
from gyre.rewards.sandbox.syscall_filter import Listener

_FILES_SHARE = 4  # a weak folder of many files is looked at for a fifth of the time at most
_PAYLOAD_FD = 3


class Isolation(NamedTuple):
    """How programs are isolated; the same for all of one server. No dataclass: each module that the
    server imports makes every fork slower."""

    mode: str  # "strong", "bubblewrap" or "weak"
    bwrap: str  # path, for bubblewrap
    bwrap_options: list[str]  # for bubblewrap
    stage: program.ProgramStage | None  # strong: made once, in the server
    # weak: None where the machine has none; bubblewrap installs its own
    call_filter: syscall_filter.CallFilter | None
    buffer_sizes: tuple[int, int]  # of a socket and of a TCP connection

    @property
    def strong(self) -> bool:
        return self.mode == "strong"


class ProgramChild(Child):
    """The process of one program, what watches it, and what it passed on its channel."""

    def __init__(self, isolation: Isolation, limits: dict[str, Any], files: list[int]) -> None:
        if isolation.mode == "bubblewrap":
            limits["processes"] += bubblewrap.OWN_PROCESSES
        # A weak run's folder, where the program itself and the files that it comes with take whole
        # blocks.
        limits["disk_bytes"] = limits["file_bytes"] + os.fstat(files[0]).st_size + (64 << 10)
        self._isolation = isolation
        self._limits = limits
        self._files = files
        self._started_s = time.monotonic()
        self._deadline_s = self._started_s + limits["wall_s"]
        self._cpu_before_s = watchdog.children_cpu_s()
        self._stage = isolation.stage or program.ProgramStage(
            folder.make() if isolation.mode == "weak" else rootfs.WORK
        )
        self._status, self._status_child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status.setblocking(False)
        self._started = False  # whether the program's own code may have run
        self._error = ""  # why not
        self._work_fd = -1
        self._meter = MemoryMeter(-1, *isolation.buffer_sizes)
        self._listener: Listener | None = None
        self._files_look_s = 0.0
        self.look_s = min(self._deadline_s, self._started_s + watchdog.PERIOD_S)

    def fork(self) -> int:
        """Fork; in strong mode as process 1 of a new namespace, so that all dies with it."""
        if not self._isolation.strong:
            return os.fork()
        own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        kernel.unshare(kernel.CLONE_NEWPID)  # for the next child, not for this process
        pid = os.fork()
        if pid:
            kernel.setns(own, kernel.CLONE_NEWPID)
            os.close(own)
        return pid

    def become(self, server: ForkServer) -> NoReturn:
        """Isolate this process, then run the program. What fails before the program starts is sent
        on the channel, which the program never has."""
        isolation, limits, stage, status = (
            self._isolation,
            self._limits,
            self._stage,
            self._status_child,
        )
        try:
            status = _arrange(self._files, status)
            os.setsid()
            if isolation.mode == "bubblewrap":
                os.execv(isolation.bwrap, bubblewrap.command(isolation.bwrap_options, limits))
            if isolation.strong:
                kernel.unshare(
                    kernel.CLONE_NEWNS
                    | kernel.CLONE_NEWNET
                    | kernel.CLONE_NEWIPC
                    | kernel.CLONE_NEWUTS
                )
                own_folder = os.open("/proc/self", os.O_PATH)
                rootfs.mount_proc(read_only=True)
                rootfs.mount_work_folder(limits["file_bytes"])
                program.lock_in(limits, own_folder)
                sockstat = os.open("/proc/self/net/sockstat", os.O_RDONLY)
                payload = program.prepare(_PAYLOAD_FD, stage)
                program.announce(status, isolation.call_filter, sockstat=sockstat)
            else:
                kernel.die_with_parent(signal.SIGKILL)
                stage.set_up()
                os.environ.update({"HOME": stage.folder, "TMPDIR": stage.folder})
                program.limit(limits, processes=_processes_of_user() + limits["processes"])
                payload = program.prepare(_PAYLOAD_FD, stage)
                program.announce(status, isolation.call_filter)
            program.run(payload, stage)
        except BaseException as error:  # noqa: BLE001 - the server reports it as its own failure
            status.send(repr(error).encode()[:4000])
        finally:
            os._exit(125)

    def attach(self, server: ForkServer) -> None:
        for fd in (*self._files, self._status_child.detach()):
            os.close(fd)

    def look(self, server: ForkServer, now_s: float) -> str | None:
        """Name the limit that the run is over."""
        if now_s >= self._deadline_s:
            return "timeout"
        self._take_status(server)
        reason = self._excess()
        self.look_s = min(self._deadline_s, time.monotonic() + watchdog.PERIOD_S)
        return reason

    def finish(self, server: ForkServer, exit_code: int) -> Ended:
        """Close what watched the run, remove its folder, and report."""
        self._take_status(server)
        self._close(server)
        reason, error = self.kill_reason, self._error
        if not (error or self._started or reason):
            error = "it ended before the program started"
        if self._isolation.mode == "weak":
            try:
                if folder.remove(self._stage.folder) > self._limits["disk_bytes"]:
                    reason = reason or "files"
            except OSError as left:
                error = f"the work folder {self._stage.folder} could not be removed: {left}"
        if self._isolation.mode == "bubblewrap":
            exit_code = bubblewrap.exit_code(exit_code)
        report = {
            "error": error,
            "refused": dict(self._listener.refused) if self._listener else {},
            "cpu_s": watchdog.children_cpu_s() - self._cpu_before_s,
            "wall_s": time.monotonic() - self._started_s,
        }
        return Ended(self.name, exit_code, reason, report)

    def abandon(self) -> None:
        if self._isolation.mode == "weak":
            folder.remove(self._stage.folder)

    def _take_status(self, server: ForkServer) -> None:
        """Read the channel if there is news. Not watched: a wake-up for each program would cost
        more than the wait of a first refused call until the next look."""
        try:
            message, files, _, _ = socket.recv_fds(self._status, 4096, 4)
        except BlockingIOError:
            return
        word, *names = message.decode("utf-8", "replace").split(" ")
        if word == "started":
            passed = dict(zip(names, files, strict=True))
            self._started = True
            self._work_fd = passed.get("work", -1)
            self._meter.sockstat = passed.get("sockstat", -1)
            if "listener" in passed:
                self._meter.counts_mappings = True
                self._listener = Listener(passed["listener"], self._meter)
                server.watch(self._listener.fd, lambda events: self._answer(server, events))
        elif message:
            self._error = message.decode("utf-8", "replace")

    def _answer(self, server: ForkServer, events: int) -> None:
        """Answer one call that the filter handed over."""
        assert self._listener is not None
        if events & select.POLLIN:
            self._listener.answer_one()
        else:  # every process that could ask is on its way out
            server.unwatch(self._listener.fd)

    def _excess(self) -> str | None:
        pids = processes.list_others() if self._isolation.strong else processes.list_descendants()
        reason = watchdog.excess(pids, self._limits, self._cpu_before_s, self._meter)
        if reason is None and time.monotonic() >= self._files_look_s:
            begun_s = time.monotonic()
            reason = self._files_excess(pids)
            ended_s = time.monotonic()
            self._files_look_s = ended_s + _FILES_SHARE * (ended_s - begun_s)
        return reason

    def _files_excess(self, pids: list[int]) -> str | None:
        """Check the work folder, which in strong mode holds itself to its limits."""
        entries = size_bytes = 0
        if self._isolation.mode == "weak":
            size_bytes, entries = folder.used(self._stage.folder, pids, rootfs.WORK_FILES)
        elif self._work_fd >= 0:
            found = os.fstatvfs(self._work_fd)
            entries = found.f_files - found.f_ffree
        over = size_bytes > self._limits["disk_bytes"] or entries > rootfs.WORK_FILES
        return "files" if over else None

    def _close(self, server: ForkServer) -> None:
        self._status.close()
        if self._listener is not None:
            server.unwatch(self._listener.fd)
            os.close(self._listener.fd)
        for fd in (self._work_fd, self._meter.sockstat):
            if fd >= 0:
                os.close(fd)


def _arrange(files: list[int], status: socket.socket) -> socket.socket:
    """Put stdin, stdout and stderr in their places, the payload at 3 and the channel at 4; close
    all else."""
    payload, stdin, stdout, stderr, channel = (
        os.dup2(fd, 100 + place) for place, fd in enumerate((*files, status.detach()))
    )
    for place, fd in enumerate((stdin, stdout, stderr, payload, channel)):
        os.dup2(fd, place)  # inheritable, for bwrap
    os.closerange(5, program.OPEN_FILES)
    return socket.socket(fileno=4)


def _processes_of_user() -> int:
    """Count processes of this user: weak mode shares the kernel's count with all that it runs."""
    me, count = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == me:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue  # ended meanwhile
    return count
