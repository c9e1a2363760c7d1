"""Bubblewrap: the same isolation made by bwrap, for machines that let only `bwrap` make namespaces.

In: limits and folders. Out: a command that starts a fresh Python inside, which runs this file as a
script and becomes the program. Slower than the server's own namespaces, since nothing is warm.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from gyre.rewards.fork_server import kernel
from gyre.rewards.sandbox import program, rootfs, syscall_filter

_PAYLOAD_FD, _STATUS_FD = 3, 4
OWN_PROCESSES = 2  # bwrap outside and inside; they count among the run's
_PACKAGE = "/gyre-sandbox"  # where the program's starter is shown
_REWARDS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SUB_ROOMS = ("fork_server", "sandbox")  # that the starter imports
_MASKED = ("/proc/sysrq-trigger", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kmsg")


def options(folders: list[str], *, staged: bool) -> list[str]:
    """List the arguments of bwrap that isolate. `staged`: first bind what may be hidden from other
    users than root where every user can reach it; then the caller may become one."""
    shown = rootfs.shown(folders)
    links = {path: os.readlink(path) for path in shown if os.path.islink(path)}
    own = [path for path in shown if path not in links and path in map(os.path.realpath, folders)]
    packages = {f"{_REWARDS}/{name}": f"{_PACKAGE}/gyre/rewards/{name}" for name in _SUB_ROOMS}
    sources = rootfs.stage([*own, *packages]) if staged else {}
    words = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000"]
    words += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    for path in shown:
        words += (
            ["--symlink", links[path], path]
            if path in links
            else ["--ro-bind", sources.get(path, path), path]
        )
    words += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
    for path in filter(os.path.exists, _MASKED):
        words += ["--ro-bind", "/dev/null", path]
    for path in rootfs.DEVICES:
        words += ["--dev-bind", path, path]
    for path, target in rootfs.LINKS.items():
        words += ["--symlink", target, path]
    for path, inside in packages.items():
        words += ["--ro-bind", sources.get(path, path), inside]
    return words


def command(words: list[str], limits: dict[str, Any]) -> list[str]:
    """List the arguments of bwrap for one program. The payload is open at 3, the server's channel
    at 4."""
    words = [*words, "--size", str(limits["file_bytes"]), "--tmpfs", rootfs.WORK]
    words += ["--symlink", rootfs.WORK, "/tmp"]
    for name, value in (("PYTHONPATH", _PACKAGE), ("HOME", rootfs.WORK), ("TMPDIR", rootfs.WORK)):
        words += ["--setenv", name, value]
    words += ["--remount-ro", "/", "--chdir", rootfs.WORK]
    script = f"{_PACKAGE}/gyre/rewards/sandbox/bubblewrap.py"
    python = [sys.executable, "-S", "-s", "-P", "-B", script]
    return [*words, *python, json.dumps(limits)]


def exit_code(code: int) -> int:
    """Return the program's own end: bwrap ends with 128 + n where signal n ended it."""
    return 128 - code if code > 128 else code


def main(limits: dict[str, Any]) -> None:
    """Inside: set the limits that bwrap has no option for, then become the program."""
    os.environ.pop("PYTHONPATH")
    sys.path.remove(_PACKAGE)
    kernel.forbid_new_privileges()
    program.limit_for_all()
    program.limit(limits, processes=limits["processes"])
    stage = program.ProgramStage(rootfs.WORK)
    stage.set_up()
    program.forget_package()
    status = socket.socket(fileno=_STATUS_FD)
    sockstat = os.open("/proc/self/net/sockstat", os.O_RDONLY)
    work = os.open(rootfs.WORK, os.O_PATH)
    payload = program.prepare(_PAYLOAD_FD, stage)
    program.announce(status, syscall_filter.CallFilter(), sockstat=sockstat, work=work)
    program.run(payload, stage)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
