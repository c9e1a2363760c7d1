"""Bubble: the same walls put up by bubblewrap, for machines that let only `bwrap` make namespaces.

In: limits and folders. Out: a command that starts a fresh Python inside, which runs this file as a script and becomes
the program. Slower than the zygote's own namespaces, since nothing is warm. Caller: jail.zygote.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gyre.rewards.jail import kernel, program, view

_PAYLOAD_FD, _FILTER_FD = 3, 4
OWN_PROCESSES = 2  # bwrap outside and inside; they count among the run's
_PACKAGE = "/gyre-jail"  # where the program's starter is shown


def command(limits: dict[str, Any], folders: list[str]) -> list[str]:
    """Arguments of bwrap. The payload is open at 3 and the call filter at 4."""
    jail = os.path.dirname(os.path.abspath(__file__))
    inside = f"{_PACKAGE}/gyre/rewards/jail"
    words = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    words += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--seccomp", str(_FILTER_FD)]
    for path in view.shown(folders):
        words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    words += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", jail, inside]
    words += ["--size", str(limits["file_bytes"]), "--tmpfs", view.WORK, "--symlink", view.WORK, "/tmp"]
    words += ["--setenv", "PYTHONPATH", _PACKAGE, "--setenv", "HOME", view.WORK, "--setenv", "TMPDIR", view.WORK]
    words += ["--remount-ro", "/", "--chdir", view.WORK]
    python = [sys.executable, "-S", "-s", "-P", "-B", f"{inside}/bubble.py"]
    return [*words, *python, json.dumps(limits)]


def exit_code(code: int) -> int:
    """bwrap ends with 128 + n where its program was ended by signal n."""
    return 128 - code if code > 128 else code


def main(limits: dict[str, Any]) -> None:
    """Inside: set the limits that bwrap has no option for, then become the program."""
    os.environ.pop("PYTHONPATH")
    sys.path.remove(_PACKAGE)
    kernel.forbid_new_privileges()
    program.limit_for_all()
    program.limit(limits, processes=limits["processes"])
    stage = program.Stage(view.WORK)
    stage.set_up()
    program.run(program.read_payload(_PAYLOAD_FD), stage)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
