"""Supervisor: the parent of the workers' fork server. In: a socket to the scorer, a log. Out: no
process left; what rewards print, up to a bound.

    scorer ──▶ supervisor ──fork──▶ fork server ──fork──▶ workers ──▶ whatever rewards start
               subreaper: inherits every orphan when the fork server is killed
               reads stdout and stderr of all of them;
               writes the log up to its bound, counts the rest

Each of the two watches the other. When the fork server ends, the supervisor kills all that is left
below it and ends with the same status. When the supervisor is killed, a pipe shows it to the fork
server, which does the same. When the scorer hangs up its supervisor socket, everything ends at
once. The supervisor runs no reward and loads no library. argv: numbers of the fork server's and the
supervisor's sockets, log ("" is stderr), bytes that the log may have, libraries to load.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from typing import NoReturn

from gyre.rewards.fork_server import kernel, processes
from gyre.rewards.fork_server.connection import Connection, OutputDropped

_READ_BYTES = 1 << 16


class BoundedLog:
    """Appends until the file has `most_bytes`; what comes after is counted and dropped. Without a
    path it writes that many bytes to stderr."""

    def __init__(self, path: str, most_bytes: int) -> None:
        self._owned = bool(path)
        self._fd = (
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            if path
            else 2
        )
        self._left = max(0, most_bytes - (os.fstat(self._fd).st_size if path else 0))
        self.dropped_bytes = 0

    def write(self, data: bytes) -> bool:
        """Keep what fits. True when this is the first time that something was dropped."""
        kept, first = data[: self._left], not self.dropped_bytes
        written = 0
        try:
            while written < len(kept):
                written += os.write(self._fd, kept[written:])
        # a full disk, or a terminal that has gone: dropped and counted like the rest
        except OSError:
            self._left = written
        self._left -= written
        self.dropped_bytes += len(data) - written
        return first and self.dropped_bytes > 0

    def close(self) -> None:
        """Say at the end how much is missing."""
        if self.dropped_bytes:
            self._left = 200  # the bound is for what rewards print
            self.write(
                f"\n[gyre: {self.dropped_bytes} more bytes were printed and dropped]\n".encode()
            )
        if self._owned:
            os.close(self._fd)


def supervise(
    scorer: Connection, client: Connection, log: BoundedLog, libraries: list[str]
) -> NoReturn:
    """Fork the fork server and stand by until it ends or the scorer hangs up."""
    kernel.become_subreaper()
    out_read, out_write = os.pipe()
    alive_read, alive_write = os.pipe()  # its write end is open for as long as this process lives
    server_pid = os.fork()
    if server_pid == 0:
        try:
            scorer.close()
            for fd in (out_read, alive_write):
                os.close(fd)
            _become_fork_server(client, alive_read, out_write, libraries)
        finally:
            os._exit(1)
    client.close()
    for fd in (out_write, alive_read):
        os.close(fd)
    os.set_blocking(out_read, False)
    server_fd = os.pidfd_open(server_pid)
    poll = select.poll()
    for fd in (out_read, server_fd, scorer.fileno()):
        poll.register(fd, select.POLLIN)
    status = None
    while status is None:
        for fd, _ in poll.poll():
            if fd == out_read:
                if not _keep(out_read, log, scorer):
                    poll.unregister(out_read)  # all writers have closed it, the fork server too
            elif fd == server_fd:
                status = os.waitpid(server_pid, 0)[1]
            else:
                poll.unregister(scorer.fileno())
                if status is None:  # one poll may report both; a reaped server has no pid
                    os.kill(server_pid, signal.SIGKILL)  # the scorer has gone or waits no longer
    processes.end_descendants()
    while _keep(out_read, log, scorer):
        pass
    log.close()
    _end_like(os.waitstatus_to_exitcode(status))


def _become_fork_server(
    client: Connection, alive_fd: int, out_fd: int, libraries: list[str]
) -> NoReturn:
    """Load the libraries, then fork workers. What is printed from here on goes to the log."""
    os.setsid()
    kernel.die_with_parent(signal.SIGKILL)  # while it loads; later it has to end its workers first
    for fd in (1, 2):
        os.dup2(out_fd, fd)
    os.close(out_fd)
    # a killed worker loses no whole line
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        from gyre.rewards.pool import worker

        worker.preload(libraries)
        kernel.die_with_parent(0)
        worker.run_fork_server(client, alive_fd)
    except BaseException:
        traceback.print_exc()
        raise


def _keep(fd: int, log: BoundedLog, scorer: Connection) -> bool:
    """Move what was printed to the log. False when there is no more, for now or for ever."""
    try:
        data = os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return False
    if log.write(data):
        scorer.send(OutputDropped())
    return bool(data)


def _end_like(code: int) -> NoReturn:
    """End with the fork server's own status."""
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 1) if code < 0 else code)


if __name__ == "__main__":
    client_fd, supervisor_fd, log_path, most_bytes, *names = sys.argv[1:]
    supervise(
        Connection(socket.socket(fileno=int(supervisor_fd))),
        Connection(socket.socket(fileno=int(client_fd))),
        BoundedLog(log_path, int(most_bytes)),
        names,
    )
