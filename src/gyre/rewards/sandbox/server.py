"""Sandbox server: a warm Python that forks one fresh, isolated process per program. Runs as a
process of its own.

    client ── StartChild(limits) + 4 open files ──▶ server ──fork──▶ program
           ◀── Ready, Ended ───────────────────────

A program is process 1 of new namespaces. It reads source and input, and writes to the client's
pipes.

The server never sees a program. Source and input arrive as open files that only the program's
process reads. Output goes through pipes to the client. So no fork can find anything of another run
in its memory. It imports the standard library and this package alone, and shares no process with
the reward workers. One run at a time. When the client goes, so does the server, and with it (strong
mode) its whole process namespace. argv: socket number, mode, path of bwrap, folders to show.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from functools import partial
from typing import NoReturn

from gyre.rewards.fork_server import kernel
from gyre.rewards.fork_server.connection import Connection, Ready, Refused
from gyre.rewards.fork_server.server import ForkServer
from gyre.rewards.sandbox import bubblewrap, meter, program, rootfs, syscall_filter
from gyre.rewards.sandbox.child import Isolation, ProgramChild

# Loaded once so that programs find them warm. Each extension library among them makes every fork a
# little slower.
_WARM_SOURCE = """
import bisect, collections, copy, functools, heapq, itertools, math, random, re, string, typing
class A:
    def f(self, x):
        return [y for y in x]
try:
    sum(A().f(range(3)))
except Exception:
    pass
"""
_NOBODY = 65534


def main(socket_fd: int, mode: str, bwrap: str, folders: list[str]) -> NoReturn:
    """Set up, say how, then serve until the client hangs up."""
    # the lowest number: a child closes those of its limit only
    client = Connection(socket.socket(fileno=os.dup(socket_fd)))
    os.close(socket_fd)
    sys.executable = os.path.realpath(sys.executable)
    bwrap_options: list[str] = []
    try:
        if mode != "bubblewrap":  # a bwrap with the setuid bit could not use it
            kernel.forbid_new_privileges()
        program.limit_for_all()
        filters = mode != "weak" or syscall_filter.available()
        call_filter = syscall_filter.CallFilter() if filters else None
        buffer_sizes = meter.buffer_sizes()
        if mode == "bubblewrap":
            bwrap_options, note = _enter_bubblewrap(folders)
        else:
            note = _enter_strong(folders) if mode == "strong" else _enter_weak()
    except OSError as error:
        client.send(Refused(str(error)))
        os._exit(1)
    if mode != "bubblewrap":
        _warm_up()
        program.forget_package()
    stage = None
    if mode == "strong":
        os.environ.update({"HOME": rootfs.WORK, "TMPDIR": rootfs.WORK})
        stage = program.ProgramStage(rootfs.WORK)
        stage.set_up()
    isolation = Isolation(
        mode=mode,
        bwrap=bwrap,
        bwrap_options=bwrap_options,
        stage=stage,
        call_filter=call_filter,
        buffer_sizes=buffer_sizes,
    )
    client.send(Ready(note))
    ForkServer(client, partial(ProgramChild, isolation)).run()


def _enter_strong(folders: list[str]) -> str:
    """Take an own root and own namespaces, as a user without rights outside. Returns what is worth
    a note."""
    user = os.geteuid()
    group = os.getegid()
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
    """Never be root: bwrap maps the program's user to ours, and the machine's settings ask for the
    user alone. Returns bwrap's options and what is worth a note."""
    kernel.become_subreaper()
    as_root = os.geteuid() == 0
    staged = as_root and _try_mount_namespace()
    options = bubblewrap.options(folders, staged=staged)
    if as_root:
        _become_nobody()
    hidden = [path for path in folders if not staged and not os.access(path, os.R_OK | os.X_OK)]
    if hidden:
        raise OSError(f"programs run as nobody, who may not read {hidden[0]}")
    return options, "each program starts a new Python"


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
    exec(compile(_WARM_SOURCE, "warm", "exec"), {})
    own = os.path.realpath(os.environ.pop("PYTHONPATH"))
    sys.path = [path for path in sys.path if os.path.realpath(path) != own]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
