"""Guard: the parent of the nursery. It ends what the nursery leaves behind, and keeps what rewards
print.

    scorer ──▶ guard ──fork──▶ nursery ──fork──▶ workers ──▶ whatever rewards start
               subreaper: inherits every orphan when the nursery is killed
               reads stdout and stderr of all of them;
               writes the log up to its bound, counts the rest

Each of the two watches the other: when the nursery ends, however it ends, the guard kills all that
is left below it and ends with the same status; when the guard is killed, a pipe tells the nursery,
which does the same. When the scorer hangs up its watch socket the guard ends everything at once. It
runs no reward and loads no library. argv: numbers of the watch and control sockets, log ("" is
stderr), bytes that the log may have, libraries to load. Started as `python -m
gyre.rewards.pool.guard` by rewards.pool.channel.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import traceback
from typing import NoReturn

from gyre.rewards.pool.output import BoundedLog
from gyre.rewards.sandbox import kernel, watchdog

DROPPED = b"dropped"  # the only message to the scorer: the log is full
_READ_BYTES = 1 << 16


def guard(
    scorer: socket.socket, control_fd: int, log: BoundedLog, libraries: list[str]
) -> NoReturn:
    """Fork the nursery and stand by until it ends or the scorer hangs up."""
    kernel.become_subreaper()
    out_read, out_write = os.pipe()
    alive_read, alive_write = os.pipe()  # its write end is open for as long as this process lives
    nursery_pid = os.fork()
    if nursery_pid == 0:
        try:
            scorer.close()
            for fd in (out_read, alive_write):
                os.close(fd)
            _become_nursery(control_fd, alive_read, out_write, libraries)
        finally:
            os._exit(1)
    for fd in (control_fd, out_write, alive_read):
        os.close(fd)
    os.set_blocking(out_read, False)
    nursery_fd = os.pidfd_open(nursery_pid)
    poll = select.poll()
    for fd in (out_read, nursery_fd, scorer.fileno()):
        poll.register(fd, select.POLLIN)
    status = None
    while status is None:
        for fd, _ in poll.poll():
            if fd == out_read:
                if not _keep(out_read, log, scorer):
                    poll.unregister(out_read)  # all writers have closed it, the nursery among them
            elif fd == nursery_fd:
                status = os.waitpid(nursery_pid, 0)[1]
            else:
                os.kill(nursery_pid, signal.SIGKILL)  # the scorer has gone or waits no longer
                poll.unregister(scorer.fileno())
    watchdog.end_descendants()
    while _keep(out_read, log, scorer):
        pass
    log.close()
    _end_like(os.waitstatus_to_exitcode(status))


def _become_nursery(control_fd: int, alive_fd: int, out_fd: int, libraries: list[str]) -> NoReturn:
    """In the child: load what is needed, then fork workers. What is printed from here on goes to
    the guard."""
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
        worker.nursery(socket.socket(fileno=control_fd), alive_fd)
    except BaseException:
        traceback.print_exc()
        raise


def _keep(fd: int, log: BoundedLog, scorer: socket.socket) -> bool:
    """Move what was printed to the log. False when there is no more, for now or for ever."""
    try:
        data = os.read(fd, _READ_BYTES)
    except BlockingIOError:
        return False
    if log.write(data):
        try:
            scorer.send(DROPPED)
        except OSError:  # the scorer has gone: nobody is left to be told
            return bool(data)
    return bool(data)


def _end_like(code: int) -> NoReturn:
    """End with the nursery's own status."""
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 1) if code < 0 else code)


if __name__ == "__main__":
    watch_fd, control_number, log_path, most_bytes, *names = sys.argv[1:]
    guard(
        socket.socket(fileno=int(watch_fd)),
        int(control_number),
        BoundedLog(log_path, int(most_bytes)),
        names,
    )
