"""Meter: memory of a run that no process shows as its own. In: sockets in use, metered calls, maps,
locks. Out: bytes.

    sockets            what each may hold in its send buffer; the count holds unaccepted and closed
                       ones, too.
    TCP connections    what a send buffer may grow to.
    shared mappings    their length, as long as any process maps them: their pages outlive the page
                       tables.
    epoll              a fixed size for each file watched, never given back.
    file locks         a fixed size for each; more than 10,000 count as too much, since only reading
                       them counts them.

Each is an upper bound. `SO_SNDBUF` and the like are refused (sandbox.syscalls), so a buffer stays
as it was made.
"""

from __future__ import annotations

import heapq
import os
import socket

_ENTRY_BYTES = 256  # of a file lock or a watched file, rounded up
_MOST_LOCKS = 10_000
_TOO_MUCH = 1 << 62


class MemoryMeter:
    """Of one run. `sockstat`: an open /proc/net/sockstat of the run's network namespace, or -1."""

    def __init__(self, sockstat: int, socket_bytes: int, tcp_bytes: int) -> None:
        self.sockstat = sockstat
        self.counts_mappings = False  # whether mmap is metered
        self._socket_bytes = socket_bytes
        self._tcp_bytes = tcp_bytes
        self._watched = 0
        self._shared: list[int] = []  # lengths of all shared mappings ever made

    def charge(self, name: str, arguments: tuple[int, ...]) -> None:
        """Take note of a metered call."""
        if name == "mmap":
            self._shared.append(arguments[1])
        else:
            self._watched += 1

    def total(self, pids: list[int]) -> int:
        """Bytes that the run may hold, beside what its processes show."""
        return self._watched * _ENTRY_BYTES + self._sockets() + _locks(pids) + self._mappings(pids)

    def _sockets(self) -> int:
        if self.sockstat < 0:
            return 0
        fields = os.pread(self.sockstat, 4096, 0).split()  # "sockets: used N TCP: inuse N …"
        return int(fields[2]) * self._socket_bytes + int(fields[5]) * self._tcp_bytes

    def _mappings(self, pids: list[int]) -> int:
        """Return the longest of those ever made, as many as are mapped somewhere."""
        if not self._shared:
            return 0
        alive: set[tuple[bytes, bytes]] = set()
        for pid in pids:
            try:
                with open(f"/proc/{pid}/maps", "rb") as file:
                    alive.update(
                        (at[3], at[4])
                        for line in file
                        if (at := line.split(None, 5))[1][3:4] == b"s"
                    )
            except OSError:
                continue  # ended meanwhile
        return sum(heapq.nlargest(len(alive), self._shared))


def _locks(pids: list[int]) -> int:
    """Bytes of the file locks that processes hold."""
    own, count = {b"%d" % pid for pid in pids}, 0
    with open("/proc/locks", "rb") as file:
        for line in file:  # "1: POSIX  ADVISORY  WRITE PID device:inode first last"
            count += line.replace(b"-> ", b"").split(None, 5)[4] in own  # "->" marks one that waits
            if count > _MOST_LOCKS:
                return _TOO_MUCH
    return count * _ENTRY_BYTES


def buffer_sizes() -> tuple[int, int]:
    """Bytes that a new socket may hold, and that a TCP connection may grow to."""
    with socket.socket(socket.AF_UNIX) as fresh:
        plain = fresh.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    try:
        with open("/proc/sys/net/ipv4/tcp_wmem") as file:
            return plain, int(file.read().split()[2])
    except OSError:
        return plain, 4 << 20  # the kernel's default; not every view shows the setting
