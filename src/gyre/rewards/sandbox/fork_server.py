"""Zygote: a warm Python that forks one fresh, locked-in process per program. Runs as a script of
its own.

    client ── limits + 4 open files ──▶ zygote ──fork──▶ program: process 1 of new namespaces
           ◀── how it ended ───────────                  reads source and input,
                                                        writes to the client's pipes

The zygote never sees a program: source and input arrive as open files that only the program's
process reads, and output goes through pipes to the client. So no fork can find anything of another
run in its memory. One run at a time. When the client goes, so does the zygote, and with it (strong
mode) its whole process namespace. argv: mode, socket number, path of bwrap, folders to show.
"""

from __future__ import annotations

import gc
import marshal
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from gyre.rewards.sandbox import (
    bubblewrap,
    folder,
    kernel,
    meter,
    program,
    rootfs,
    syscall_filter,
    watchdog,
)
from gyre.rewards.sandbox.run import ClientGone, ProgramRun

# Loaded once so that programs find them warm. Each extension library among them makes every fork a
# little slower.
_WARM = (
    "bisect",
    "collections",
    "copy",
    "functools",
    "heapq",
    "itertools",
    "math",
    "random",
    "re",
    "string",
    "typing",
)
_WARM_SOURCE = """
class A:
    def f(self, x):
        return [y for y in x]
try:
    sum(A().f(range(3)))
except Exception:
    pass
"""
_NOBODY, _PAYLOAD_FD = 65534, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """How programs are locked in."""

    mode: str  # "strong", "bubblewrap" or "weak"
    bwrap: str  # path, for bubblewrap
    walls: list[str]  # bubblewrap: its options
    stage: program.ProgramStage | None  # strong: put up once, in the zygote
    # weak: None where the machine has none; bubblewrap installs its own
    call_filter: syscall_filter.CallFilter | None
    buffer_sizes: tuple[int, int]  # of a socket and of a TCP connection

    @property
    def strong(self) -> bool:
        return self.mode == "strong"


def main(mode: str, socket_fd: int, bwrap: str, folders: list[str]) -> NoReturn:
    """Set up, say how, then serve until the client hangs up."""
    # the lowest number: a child closes those of its limit only
    client = socket.socket(fileno=os.dup(socket_fd))
    os.close(socket_fd)
    sys.executable = os.path.realpath(sys.executable)
    try:
        if mode != "bubblewrap":  # a bwrap with the setuid bit could not use it
            kernel.forbid_new_privileges()
        program.limit_for_all()
        call_filter = (
            syscall_filter.CallFilter() if mode != "weak" or syscall_filter.available() else None
        )
        buffer_sizes, walls = meter.buffer_sizes(), []
        if mode == "bubblewrap":
            walls, note = _enter_bubblewrap(folders)
        else:
            note = _enter_strong(folders) if mode == "strong" else _enter_weak()
    except OSError as error:
        client.send(marshal.dumps({"ok": False, "error": str(error)}))
        os._exit(1)
    if mode != "bubblewrap":
        _warm_up()
    stage = None
    if mode == "strong":
        os.environ.update({"HOME": rootfs.WORK, "TMPDIR": rootfs.WORK})
        stage = program.ProgramStage(rootfs.WORK)
        stage.set_up()
    jail = Jail(
        mode=mode,
        bwrap=bwrap,
        walls=walls,
        stage=stage,
        call_filter=call_filter,
        buffer_sizes=buffer_sizes,
    )
    client.send(marshal.dumps({"ok": True, "note": note}))
    gc.collect()
    gc.disable()
    gc.freeze()
    while _serve_one(client, jail):
        pass
    os._exit(0)


def _enter_strong(folders: list[str]) -> str:
    """Take an own root and own namespaces, as a user without rights outside. Returns what is worth
    a note."""
    user, group = os.geteuid(), os.getegid()
    spaces = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    note = ""
    if user == 0 and _try_mount_namespace():
        # Real root can show Python even where only root may read it, and then has no more use for
        # being root.
        rootfs.build_root(folders)
        _become_nobody()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | spaces)
        kernel.map_one_user(0, _NOBODY, _NOBODY)
    else:
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | spaces)
        kernel.map_one_user(0, user, group)
        rootfs.build_root(folders)
        if user == 0:
            note = "the kernel does not count root's processes; their number is checked every 20 ms"
    inner = os.fork()
    if inner:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
    kernel.die_with_parent(signal.SIGKILL)
    rootfs.mount_proc(read_only=False)
    return note


def _try_mount_namespace() -> bool:
    """Root in a container may lack the right; then it goes the way of an ordinary user."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
    except PermissionError:
        return False
    return True


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    kernel.stay_readable()


def _enter_bubblewrap(folders: list[str]) -> tuple[list[str], str]:
    """bwrap maps the program's user to ours, and the machine's settings ask for the user alone:
    never be root. Returns bwrap's options and what is worth a note."""
    kernel.become_subreaper()
    as_root = os.geteuid() == 0
    staged = as_root and _try_mount_namespace()
    walls = bubblewrap.options(folders, staged=staged)
    if as_root:
        _become_nobody()
    hidden = [path for path in folders if not staged and not os.access(path, os.R_OK | os.X_OK)]
    if hidden:
        raise OSError(f"programs run as nobody, who may not read {hidden[0]}")
    return walls, "each program starts a new Python"


def _enter_weak() -> str:
    """Be the one that inherits every orphan, so that none is missed."""
    kernel.become_subreaper()
    user = "programs run as root" if os.geteuid() == 0 else "programs run as the same user"
    return (
        user
        if syscall_filter.available()
        else f"{user}; system calls are not filtered, System V objects may stay"
    )


def _warm_up() -> None:
    """Load what programs will want; the first compile of a process builds tables. All of it is ours
    and constant."""
    for name in _WARM:
        __import__(name)
    exec(compile(_WARM_SOURCE, "warm", "exec"), {})
    own = os.path.realpath(os.environ.pop("PYTHONPATH"))
    sys.path = [path for path in sys.path if os.path.realpath(path) != own]


def _serve_one(client: socket.socket, jail: Jail) -> bool:
    """One program from request to answer. False when the client has hung up."""
    message, files, _, _ = socket.recv_fds(client, 65536, 8)
    if not message:
        return False
    if len(files) != 4:  # a wish to end a run that had just ended
        return True
    limits = marshal.loads(message)
    if jail.mode == "bubblewrap":
        limits["processes"] += bubblewrap.OWN_PROCESSES
    # A weak run's folder, where the program itself and the files that it comes with take whole
    # blocks.
    limits["disk_bytes"] = limits["file_bytes"] + os.fstat(files[0]).st_size + (64 << 10)
    started_s, cpu_before_s = time.monotonic(), watchdog.children_cpu_s()
    stage = jail.stage or program.ProgramStage(
        folder.make() if jail.mode == "weak" else rootfs.WORK
    )
    status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = _fork(limits, files, theirs, stage, jail)
    for fd in (*files, theirs.detach()):
        os.close(fd)
    run = ProgramRun(
        child,
        status,
        limits,
        mode=jail.mode,
        work_folder=stage.folder,
        buffer_sizes=jail.buffer_sizes,
        cpu_before_s=cpu_before_s,
    )
    try:
        reason = run.wait(client, started_s)
    except ClientGone:
        _kill_and_leave(child, stage, jail)
    _, code = os.waitpid(child, 0)
    if not jail.strong:
        watchdog.end_descendants()
    run.close()
    error = run.error or ("" if run.started or reason else "it ended before the program started")
    if jail.mode == "weak":
        try:
            if folder.remove(stage.folder) > limits["disk_bytes"]:
                reason = reason or "files"
        except OSError as left:
            error = f"the work folder {stage.folder} could not be removed: {left}"
    code = os.waitstatus_to_exitcode(code)
    ended = {
        "code": bubblewrap.exit_code(code) if jail.mode == "bubblewrap" else code,
        "reason": reason,
        "error": error,
        "refused": run.refused,
        "cpu_s": watchdog.children_cpu_s() - cpu_before_s,
        "wall_s": time.monotonic() - started_s,
    }
    try:
        client.send(marshal.dumps(ended))
    except BrokenPipeError:  # the client went while this run was cleared away
        return False
    return True


def _fork(
    limits: dict[str, Any],
    files: list[int],
    status: socket.socket,
    stage: program.ProgramStage,
    jail: Jail,
) -> int:
    """Fork the program's process; in strong mode as process 1 of a new namespace, so that all dies
    with it."""
    own = -1
    if jail.strong:
        own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        kernel.unshare(kernel.CLONE_NEWPID)  # for the next child, not for us
    pid = os.fork()
    if pid == 0:
        _become_program(limits, files, status, stage, jail)
    if jail.strong:
        kernel.setns(own, kernel.CLONE_NEWPID)
        os.close(own)
    return pid


def _become_program(
    limits: dict[str, Any],
    files: list[int],
    status: socket.socket,
    stage: program.ProgramStage,
    jail: Jail,
) -> NoReturn:
    """Lock in, then run. What fails before the program starts is told on the channel, which the
    program never has."""
    try:
        status = _arrange(files, status)
        os.setsid()
        if jail.mode == "bubblewrap":
            os.execv(jail.bwrap, bubblewrap.command(jail.walls, limits))
        if jail.mode == "strong":
            kernel.unshare(
                kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
            )
            own_folder = os.open("/proc/self", os.O_PATH)
            rootfs.mount_proc(read_only=True)
            rootfs.mount_work_folder(limits["file_bytes"])
            program.lock_in(limits, own_folder)
            sockstat = os.open("/proc/self/net/sockstat", os.O_RDONLY)
            payload = program.prepare(_PAYLOAD_FD, stage)
            program.announce(status, jail.call_filter, sockstat=sockstat)
        else:
            kernel.die_with_parent(signal.SIGKILL)
            stage.set_up()
            os.environ.update({"HOME": stage.folder, "TMPDIR": stage.folder})
            program.limit(limits, processes=_processes_of_user() + limits["processes"])
            payload = program.prepare(_PAYLOAD_FD, stage)
            program.announce(status, jail.call_filter)
        program.run(payload, stage)
    except BaseException as error:  # noqa: BLE001 - a fork must never return into the zygote's loop
        status.send(repr(error).encode()[:4000])
    finally:
        os._exit(125)


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


def _kill_and_leave(child: int, stage: program.ProgramStage, jail: Jail) -> NoReturn:
    os.kill(child, signal.SIGKILL)
    if not jail.strong:
        watchdog.end_descendants()
    if jail.mode == "weak":
        folder.remove(stage.folder)
    os._exit(0)


def _processes_of_user() -> int:
    """Weak mode shares the user's process count with everything else that the user runs."""
    me, count = os.getuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == me:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue  # ended meanwhile
    return count


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
