"""Client: a fork server as the process that started it sees it. In: a module to run, orders. Out:
the server's messages; its end.

The owner blocks on `connection`, or registers it with an event loop.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

from gyre.core.errors import DeadlineError
from gyre.rewards.fork_server.connection import Kill, StartChild, make_pair

KILL_S = 10.0  # for a killed process to be gone


class ForkServerProcess:
    """One fork server, in a session of its own. Starts when made."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        python: Sequence[str],
        environment: Mapping[str, str],
        files: Sequence[int] = (),
        folder: str | None = None,
        quiet: bool = False,
    ) -> None:
        """Run `module` with the numbers of its socket and of `files`, then `arguments`.

        `python` are options of the interpreter, `folder` is its working folder. `quiet` drops what
        the server prints.
        """
        self.connection, theirs = make_pair()
        numbers = (theirs.fileno(), *files)
        self._process = subprocess.Popen(
            [sys.executable, *python, "-m", module, *map(str, numbers), *arguments],
            pass_fds=numbers,
            env=environment,
            cwd=folder,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """-n for an end by signal n; None while the server runs."""
        return self._process.poll()

    def start(self, name: int, request: object, files: list[int]) -> None:
        """Order a child. The server has the files, so the caller may close its own."""
        self.connection.send(StartChild(name, request), files)

    def kill_child(self, name: int, reason: str) -> None:
        """Order the end of a child; its Ended has the reason."""
        self.connection.send(Kill(name, reason))

    def kill(self) -> None:
        """Kill the server itself."""
        self._process.kill()

    def wait(self, limit_s: float) -> bool:
        """Block until the server has ended, `limit_s` at most. Returns whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        return self._process.returncode is not None

    def end(self, limit_s: float) -> None:
        """Hang up, so that the server ends its children and itself; kill it after `limit_s`.

        DeadlineError when even that does not end it.
        """
        self.connection.close()
        if not self.wait(limit_s):
            self.kill()
            if not self.wait(KILL_S):
                raise self.unkillable()

    def unkillable(self) -> DeadlineError:
        """Make the error for a server that no signal ends."""
        return DeadlineError(
            f"the fork server (pid {self.pid}) was killed and did not end within {KILL_S:g} s",
            hint="it hangs within the kernel, as on a file system that does not answer: see `ps "
            "-o stat,wchan` of it",
        )
