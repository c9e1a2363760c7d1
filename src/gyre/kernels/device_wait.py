"""Device wait: the one wait for work that a device was given. In: an event behind that work, a
deadline. Out: nothing, or an error that names what was awaited. Torch-free.

A device that hangs cannot be stopped from here; the error at least frees the thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from gyre.core.errors import DeadlineError


class DeviceEvent(Protocol):
    """What is asked of a CUDA event."""

    def query(self) -> bool:
        """Return whether all work before it is complete."""
        ...


def wait_for(
    event: DeviceEvent,
    describe: Callable[[], str],
    deadline_s: float,
    *,
    key: str,
    slow: str,
    spin_s: float,
    nap_s: float,
    clock: Callable[[], float] = time.monotonic,
    nap: Callable[[float], None] = time.sleep,
) -> None:
    """Return when the event is complete. DeadlineError after `deadline_s`, which `key` of the
    config sets; `slow` advises work that is only slow. What went wrong on the device is raised as
    it is. Looks without a pause for `spin_s`, then every `nap_s`."""
    began_s = clock()
    while not event.query():
        waited_s = clock() - began_s
        if waited_s > deadline_s:
            raise DeadlineError(
                f"the device did not finish {describe()} within {key} = {deadline_s:g} s",
                hint="look for a hung kernel or a lost device (nvidia-smi, the driver's lines in "
                f"dmesg) and start again; {slow}",
            )
        # 0: other threads of this process may run between two looks
        nap(0.0 if waited_s < spin_s else nap_s)
