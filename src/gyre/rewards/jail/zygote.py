"""Zygote: a warm Python that forks one fresh, locked-in process per program. Runs as a script of its own.

    client ── limits + 4 open files ──▶ zygote ──fork──▶ program: process 1 of new namespaces
           ◀── how it ended ───────────                  reads source and input, writes to the client's pipes

The zygote never sees a program: source and input arrive as open files that only the program's process reads, and
output goes through pipes to the client. So no fork can find anything of another run in its memory. One run at a time.
When the client goes, so does the zygote, and with it (strong mode) its whole process namespace.
argv: mode, socket number, path of bwrap, folders to show. Caller: rewards.executors.
"""

from __future__ import annotations

import contextlib
import gc
import marshal
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from gyre.rewards.jail import bubble, kernel, program, view, watch

# Loaded once so that programs find them warm. Each extension library among them makes every fork a little slower.
_WARM = ("bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "random", "re", "string", "typing")
_WARM_SOURCE = """
class A:
    def f(self, x):
        return [y for y in x]
try:
    sum(A().f(range(3)))
except Exception:
    pass
"""
_NOBODY = 65534


@dataclass(frozen=True, slots=True, kw_only=True)
class Jail:
    """How programs are locked in."""

    mode: str  # "strong", "bubblewrap" or "weak"
    bwrap: str  # path, for bubblewrap
    folders: list[str]  # shown read-only beside the system
    stage: program.Stage | None  # strong: put up once, in the zygote
    call_filter: kernel.CallFilter | None  # strong and bubblewrap

    @property
    def strong(self) -> bool:
        return self.mode == "strong"


def main(mode: str, socket_fd: int, bwrap: str, folders: list[str]) -> NoReturn:
    """Set up, say how, then serve until the client hangs up."""
    client = socket.socket(fileno=os.dup(socket_fd))  # the lowest number: a child closes those of its limit only
    os.close(socket_fd)
    sys.executable = os.path.realpath(sys.executable)
    try:
        if mode != "bubblewrap":  # a bwrap with the setuid bit could not use it
            kernel.forbid_new_privileges()
        program.limit_for_all()
        call_filter = None if mode == "weak" else kernel.CallFilter()
        note = _enter_strong(folders) if mode == "strong" else _enter_plain(mode)
    except OSError as error:
        client.send(marshal.dumps({"ok": False, "error": str(error)}))
        os._exit(1)
    _warm_up()
    stage = None
    if mode == "strong":
        os.environ.update({"HOME": view.WORK, "TMPDIR": view.WORK})
        stage = program.Stage(view.WORK)
        stage.set_up()
    jail = Jail(mode=mode, bwrap=bwrap, folders=folders, stage=stage, call_filter=call_filter)
    client.send(marshal.dumps({"ok": True, "note": note}))
    gc.collect()
    gc.disable()
    gc.freeze()
    while _serve_one(client, jail):
        pass
    os._exit(0)


def _enter_strong(folders: list[str]) -> str:
    """Take an own root and own namespaces, as a user without rights outside. Returns what is worth a note."""
    user, group = os.geteuid(), os.getegid()
    spaces = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    note = ""
    if user == 0 and _try_mount_namespace():
        # Real root can show Python even where only root may read it, and then has no more use for being root.
        view.build_root(folders)
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        kernel.stay_readable()
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | spaces)
        kernel.map_one_user(0, _NOBODY, _NOBODY)
    else:
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | spaces)
        kernel.map_one_user(0, user, group)
        view.build_root(folders)
        if user == 0:
            note = "the kernel does not count root's processes; their number is checked every 20 ms"
    inner = os.fork()
    if inner:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]) & 0xFF)
    kernel.die_with_parent(signal.SIGKILL)
    view.mount_proc()
    return note


def _try_mount_namespace() -> bool:
    """Root in a container may lack the right; then it goes the way of an ordinary user."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
    except PermissionError:
        return False
    return True


def _enter_plain(mode: str) -> str:
    """Weak and bubblewrap: be the one that inherits every orphan, so that none is missed."""
    kernel.become_subreaper()
    if mode == "bubblewrap":
        return "each program starts a new Python"
    return "programs run as root" if os.geteuid() == 0 else "programs run as the same user"


def _warm_up() -> None:
    """Load what programs will want; the first compile of a process builds tables. All of it is ours and constant."""
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
        limits["processes"] += bubble.OWN_PROCESSES
    started_s, cpu_before_s = time.monotonic(), watch.children_cpu_s()
    stage = jail.stage or program.Stage(_make_folder() if jail.mode == "weak" else view.WORK)
    child = _fork(limits, files, stage, jail)
    for fd in files:
        os.close(fd)
    reason = _wait(client, child, started_s + limits["wall_s"], limits, cpu_before_s, strong=jail.strong)
    _, status = os.waitpid(child, 0)
    if not jail.strong:
        watch.end_descendants()
    if jail.mode == "weak":
        _remove(stage.folder)
    code = os.waitstatus_to_exitcode(status)
    ended = {
        "code": bubble.exit_code(code) if jail.mode == "bubblewrap" else code,
        "reason": reason,
        "cpu_s": watch.children_cpu_s() - cpu_before_s,
        "wall_s": time.monotonic() - started_s,
    }
    client.send(marshal.dumps(ended))
    return True


def _fork(limits: dict[str, Any], files: list[int], stage: program.Stage, jail: Jail) -> int:
    """Fork the program's process; in strong mode as process 1 of a new namespace, so that all dies with it."""
    own = -1
    if jail.strong:
        own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        kernel.unshare(kernel.CLONE_NEWPID)  # for the next child, not for us
    pid = os.fork()
    if pid == 0:
        _become_program(limits, files, stage, jail)
    if jail.strong:
        kernel.setns(own, kernel.CLONE_NEWPID)
        os.close(own)
    return pid


def _become_program(limits: dict[str, Any], files: list[int], stage: program.Stage, jail: Jail) -> NoReturn:
    """Lock in, then run. What fails before the program starts is told on stderr, with exit code 125."""
    try:
        payload_fd = _arrange(files)
        os.setsid()
        if jail.mode == "strong":
            assert jail.call_filter is not None
            kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS)
            view.mount_proc()
            view.mount_work_folder(limits["file_bytes"])
            program.lock_in(limits, jail.call_filter)
        elif jail.mode == "bubblewrap":
            assert jail.call_filter is not None
            jail.call_filter.open_at(4)
            os.set_inheritable(payload_fd, True)
            os.execv(jail.bwrap, bubble.command(limits, jail.folders))
        else:
            kernel.die_with_parent(signal.SIGKILL)
            stage.set_up()
            os.environ.update({"HOME": stage.folder, "TMPDIR": stage.folder})
            program.limit(limits, processes=_processes_of_user() + limits["processes"])
        program.run(program.read_payload(payload_fd), stage)
    except BaseException as error:  # noqa: BLE001 - a fork must never return into the zygote's loop
        os.write(2, f"the sandbox could not start the program: {error!r}\n".encode())
    finally:
        os._exit(125)


def _arrange(files: list[int]) -> int:
    """Put stdin, stdout and stderr in their places and the payload at 3; close all else."""
    payload, stdin, stdout, stderr = (os.dup2(fd, 100 + place) for place, fd in enumerate(files))
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.dup2(payload, 3, inheritable=False)
    os.closerange(4, program.OPEN_FILES)
    return 3


def _wait(
    client: socket.socket, child: int, deadline_s: float, limits: dict[str, Any], cpu_before_s: float, *, strong: bool
) -> str | None:
    """Wait until the program has ended, ending it when it must. Returns why we ended it."""
    ended = os.pidfd_open(child)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(client.fileno(), select.POLLIN)
    reason = None
    try:
        while True:
            left_s = deadline_s - time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(min(left_s, watch.PERIOD_S), 0.001) * 1000)}
            if ended in ready:
                return reason
            if client.fileno() in ready:
                wish = client.recv(64)
                if not wish:  # the client has gone
                    _kill_and_leave(child, strong=strong)
                reason = wish.decode()
            elif left_s <= 0.0:
                reason = "timeout"
            else:
                reason = watch.excess(watch.members(whole_namespace=strong), limits, cpu_before_s)
            if reason is not None:
                os.kill(child, signal.SIGKILL)  # in strong mode the whole namespace goes with it
                select.select([ended], [], [])
                return reason
    finally:
        os.close(ended)


def _kill_and_leave(child: int, *, strong: bool) -> NoReturn:
    os.kill(child, signal.SIGKILL)
    if not strong:
        watch.end_descendants()
    os._exit(0)


def _make_folder() -> str:
    """A work folder on disk, of one weak run alone."""
    folder = f"/tmp/gyre-program-{os.urandom(8).hex()}"
    os.mkdir(folder, 0o700)
    return folder


def _remove(folder: str) -> None:
    """Remove a weak run's folder with what the program left in it."""
    for path, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(os.path.join(path, name))
        for name in folders:
            full = os.path.join(path, name)
            os.unlink(full) if os.path.islink(full) else os.rmdir(full)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(folder)


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
