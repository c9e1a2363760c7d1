"""Program: the process that becomes the untrusted program. In: payload and limits. Out: never
returns.

It is a fork of the sandbox server, so Python is warm; it locks itself in, then runs the source as
`__main__`. From `lock_in` on it holds no capability, cannot get one, and sees only its own
namespaces.

Each memory page that this process is the first to touch after the fork costs microseconds, and they
are most of what a start costs. So what can be made ready in the server is made there
(`ProgramStage`), and the code here is short and plain.
"""

from __future__ import annotations

import atexit
import gc
import io
import marshal
import math
import os
import resource
import site
import socket
import sys
import threading
import types
from typing import Any, NoReturn

from gyre.rewards.fork_server import kernel
from gyre.rewards.sandbox import syscall_filter

_USER = 1000  # who the program believes to be
OPEN_FILES = 256  # the server keeps to it too
_RLIMIT_SIGPENDING, _QUEUED_SIGNALS = 11, 1024  # no name in the library


class ProgramStage:
    """What a program finds: a fresh `__main__`, streams, a clean module table. Made once, used by
    every fork."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.path = folder + "/main.py"
        self.main = types.ModuleType("__main__")
        self.main.__file__ = self.path

    def set_up(self) -> None:
        """Set it up in the server, which needs none of these things itself."""
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(
            _buffer(0, "r"), encoding="utf-8", errors="replace"
        )
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(
            _buffer(1, "w"), encoding="utf-8", errors="backslashreplace"
        )
        sys.stderr = sys.__stderr__ = io.TextIOWrapper(
            _buffer(2, "w"), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        site.setquit()  # exit() and quit(), which Python started with -S has not
        sys.modules["__main__"] = self.main
        sys.path.insert(0, self.folder)


def _buffer(fd: int, mode: str) -> Any:
    return open(fd, mode + "b", closefd=False)


def forget_package() -> None:
    """Take our modules out of the module table, before any fork: freeing one in a program touches
    its pages."""
    for name in [name for name in sys.modules if name == "gyre" or name.startswith("gyre.")]:
        del sys.modules[name]


def limit_for_all() -> None:
    """Limits that are the same for every program; the server takes them too."""
    for which, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (_RLIMIT_SIGPENDING, _QUEUED_SIGNALS),
    ):
        _limit(which, most, most)

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # `announce` lowers the other one
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))


def limit(limits: dict[str, Any], *, processes: int) -> None:
    """Kernel limits per process. The sums over all processes are watched by sandbox.watchdog."""
    cpu_s = math.ceil(limits["cpu_s"])
    _limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)  # SIGXCPU, then SIGKILL
    _limit(resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"])
    _limit(resource.RLIMIT_NPROC, processes, processes)


def _limit(which: int, soft: int, hard: int) -> None:
    """Never above the ceiling that Gyre itself was started with."""
    ceiling = resource.getrlimit(which)[1]
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(which, (soft, hard))


def lock_in(limits: dict[str, Any], own_folder: int) -> None:
    """Strong mode: an own user namespace, so that processes are counted apart; no capabilities.
    `own_folder`: an open /proc/self that can be written to."""
    kernel.unshare(kernel.CLONE_NEWUSER)
    kernel.map_one_user(_USER, 0, 0, own_folder)
    os.close(own_folder)
    limit(limits, processes=limits["processes"])
    kernel.drop_capabilities()


def announce(
    status: socket.socket, call_filter: syscall_filter.CallFilter | None, **files: int
) -> None:
    """Install the filter, if any, say that the program starts now, and pass on what the server
    watches it by.

    `files` by name; all are closed here, so that nothing of ours is open in the program.
    """
    listener = call_filter.install() if call_filter is not None else -1
    if listener >= 0:
        files["listener"] = listener
    # Files on their way are counted for all programs of a user together and held against the
    # sender's own limit. With the full one here, programs, which have less, cannot use up what this
    # needs.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    socket.send_fds(status, [" ".join(["started", *files]).encode()], list(files.values()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), min(OPEN_FILES, hard)))
    for fd in (*files.values(), status.detach()):
        os.close(fd)


def prepare(payload_fd: int, stage: ProgramStage) -> dict[str, Any]:
    """Take the program from its file, {"source", "argv", "files"}, and write its files. The server
    never reads it."""
    payload = marshal.loads(os.read(payload_fd, os.fstat(payload_fd).st_size))
    os.close(payload_fd)
    os.chdir(stage.folder)
    for name, text in payload["files"].items():
        os.makedirs(os.path.dirname(os.path.join(stage.folder, name)), exist_ok=True)
        _write(os.path.join(stage.folder, name), text)
    _write(stage.path, payload["source"])  # so that tracebacks show its lines
    return payload


def run(payload: dict[str, Any], stage: ProgramStage) -> NoReturn:
    """Run the source as `python main.py ARGV` would, and leave with its exit code."""
    sys.argv = [stage.path, *payload["argv"]]
    gc.enable()
    code = 0
    try:
        exec(compile(payload["source"], stage.path, "exec", dont_inherit=True), stage.main.__dict__)
    except SystemExit as leave:
        code = _exit_code(leave)
    except BaseException as error:  # noqa: BLE001 - the program's own fault, on its own stderr
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        code = 1
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except BaseException:  # noqa: BLE001 - its own hook failed; Python says so, too
            os.write(2, b"Error in sys.excepthook\n")
    os._exit(_finish(code))


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(fd, data) :]
    os.close(fd)


def _exit_code(leave: SystemExit) -> int:
    if leave.code is None:
        return 0
    if isinstance(leave.code, int):
        return leave.code & 0xFF
    print(leave.code, file=sys.stderr)
    return 1


def _finish(code: int) -> int:
    """Do what the interpreter does at its end: wait for threads, run atexit, flush."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001
        # a broken stream or a raising exit function is exit code 120, as in Python
        return code or 120
    return code
