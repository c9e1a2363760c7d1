"""Call filter: installs the system call filter and answers what it hands over. In: a filter; calls.
Out: what was refused.

A program's process installs the filter and passes a listener to the server. A refused call answers
its error and is noted by name; a metered call continues, and sandbox.meter counts what it holds.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import platform
import struct
from collections import Counter

from gyre.rewards.fork_server import kernel
from gyre.rewards.sandbox import syscalls
from gyre.rewards.sandbox.meter import MemoryMeter

_RECEIVE, _SEND, _GO_ON = 0xC0502100, 0xC0182101, 1
_MOST_NAMES = 32  # kinds of refused calls that are counted apart per run


def available() -> bool:
    """Check that this machine can filter calls: its kernel has seccomp, and sandbox.syscalls knows
    its numbers."""
    return platform.machine() in syscalls.MACHINES and os.path.exists("/proc/sys/kernel/seccomp")


class CallFilter:
    """The filter, ready to be installed by a fork. Made once per server."""

    def __init__(self) -> None:
        self._with_listener = _program(notify=True)
        self._alone = _program(notify=False)

    def install(self) -> int:
        """Apply it to this process and all that it starts; needs no_new_privs. Returns the
        listener, or -1 where the kernel gives none: before Linux 5.0, or when this process has one
        already. Then nothing is named or metered."""
        try:
            return kernel.install_filter(self._with_listener[1], listen=True)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBUSY, errno.ENOSYS):
                raise
        kernel.install_filter(self._alone[1], listen=False)
        return -1


def _program(*, notify: bool) -> tuple[ctypes.Array[ctypes.c_char], bytes]:
    """Return the lines, kept alive, and the kernel's head that points to them."""
    code = b"".join(
        struct.pack("HBBI", *line)
        for line in syscalls.filter_lines(platform.machine(), notify=notify)
    )
    kept = ctypes.create_string_buffer(code, len(code))
    return kept, struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(kept))


@functools.cache
def _names() -> dict[int, str]:
    return syscalls.names(platform.machine())


class Listener:
    """Answers the calls of one run."""

    def __init__(self, fd: int, meter: MemoryMeter) -> None:
        self.fd = fd
        self.refused: Counter[str] = Counter()
        self._meter = meter

    def answer_one(self) -> None:
        """Take one waiting call and answer it. Its process may die meanwhile."""
        request = bytearray(80)
        try:
            fcntl.ioctl(self.fd, _RECEIVE, request)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            return
        number, *arguments = struct.unpack_from("iIQ6Q", request, 16)
        name, given = _names().get(number, f"call {number}"), tuple(arguments[2:])
        if syscalls.decide(name, given) == syscalls.METER:
            self._meter.charge(name, given)
            self._send(request, 0, _GO_ON)
            return
        said = syscalls.describe(name, given)
        self.refused[
            said if said in self.refused or len(self.refused) < _MOST_NAMES else "others"
        ] += 1
        self._send(request, -syscalls.error_of(name), 0)

    def _send(self, request: bytearray, error: int, flags: int) -> None:
        answer = struct.pack("QqiI", struct.unpack_from("Q", request)[0], 0, error, flags)
        try:
            fcntl.ioctl(self.fd, _SEND, answer)
        except OSError as failed:
            if failed.errno != errno.ENOENT:
                raise
