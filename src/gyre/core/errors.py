"""Errors: the exception tree for users and programs. In: the details of a failure. Out: one
sentence and a hint.

    GyreError
    ├── ConfigError       A key, type or value in the TOML or on the command line.
    ├── InputError        A model folder, data file, row, prompt or reward function of the user's.
    │   └── PromptTooLong A prompt that certainly has more tokens than its context.
    ├── RewardError       A reward that broke during a run; a command ends with exit code 1.
    ├── DivergedError     Training that no longer makes finite numbers; exit code 1.
    ├── MemoryBudgetError A component or a move does not fit, or memory did not come back.
    ├── SnapshotError     A snapshot, export or run folder that cannot be used.
    ├── DeadlineError     A wait ended without what it waited for; names the owner.
    │   └── WorkerLate    A worker has not answered in time.
    ├── RankError         A rank of a group died, hangs or raised; names it.
    │   └── WorkerLost    The process of a worker is gone.
    └── EngineRefused     A request that the engine will not run, with the reason.

Each carries `kind` (for programs), the message (what we got, what we accept) and `hint` (what to do
next). Faults of ours are assertions, never a GyreError.
"""

from __future__ import annotations

import errno
import signal
from typing import TypeGuard


class GyreError(Exception):
    """Base of every fault that a user can act on."""

    kind = "error"
    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def as_dict(self) -> dict[str, str]:
        return {"kind": self.kind, "message": self.message, "hint": self.hint}


class ConfigError(GyreError):
    kind = "config"


class InputError(GyreError):
    kind = "input"


class PromptTooLong(InputError):
    """A prompt certainly has more tokens than fit; how many is not known."""


class RewardError(GyreError):
    kind = "reward"
    exit_code = 1


class DivergedError(GyreError):
    kind = "diverged"
    exit_code = 1


class MemoryBudgetError(GyreError):
    kind = "memory"


class SnapshotError(GyreError):
    kind = "snapshot"


class DeadlineError(GyreError):
    kind = "deadline"


class WorkerLate(DeadlineError):
    """A worker missed its caller's deadline; it may still be working."""


class RankError(GyreError):
    kind = "rank"


class WorkerLost(RankError):
    """A worker's process exited or was abandoned."""


class EngineRefused(GyreError):
    kind = "refused"


class RunStopped(Exception):
    """A signal ended the run, which can be resumed. Nothing is at fault, so this is not a
    GyreError."""

    def __init__(self, signum: int, message: str = "", *, hint: str = "") -> None:
        """Set the message, which follows the signal's name: "at step 3 of main"."""
        by = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
        super().__init__(f"stopped by {by}{message and f' {message}'}")
        self.signum = signum
        self.hint = hint

    @property
    def exit_code(self) -> int:
        """The shell's exit code for a process ended by that signal."""
        return 128 + self.signum


def is_disk_full(error: BaseException) -> TypeGuard[OSError]:
    """Return whether a write failed for lack of space or quota, which a user can fix."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
