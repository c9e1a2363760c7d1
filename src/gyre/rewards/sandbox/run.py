"""Run: one program from its start to the death of its last process, as the zygote sees it. In: its
process, the channel on which it says that it starts, limits. Out: why it was ended, and what else
is to be told.

The channel is closed before the program's own code runs. What is not said there did not happen: a
program cannot tell the zygote that the sandbox failed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from typing import Any

from gyre.rewards.sandbox import folder, rootfs, watchdog
from gyre.rewards.sandbox.meter import MemoryMeter
from gyre.rewards.sandbox.syscall_filter import Listener

_FILES_SHARE = 4  # a weak folder of many files is looked at for a fifth of the time at most


class ClientGone(Exception):
    """Nobody waits for this run any more."""


class ProgramRun:
    """Owns the channel and what the program's process passed on it."""

    def __init__(
        self,
        child: int,
        status: socket.socket,
        limits: dict[str, Any],
        *,
        mode: str,
        work_folder: str,
        buffer_sizes: tuple[int, int],
        cpu_before_s: float,
    ) -> None:
        self.started = False  # whether the program's own code may have run
        self.error = ""  # why not
        self._child = child
        self._status = status
        self._status.setblocking(False)
        self._limits = limits
        self._mode = mode
        self._work_folder = work_folder
        self._work_fd = -1
        self._meter = MemoryMeter(-1, *buffer_sizes)
        self._listener: Listener | None = None
        self._cpu_before_s = cpu_before_s
        self._files_look_s = 0.0

    @property
    def refused(self) -> dict[str, int]:
        """Refused calls and how often each was made."""
        return dict(self._listener.refused) if self._listener else {}

    def wait(self, client: socket.socket, started_s: float) -> str | None:
        """Wait until the program has ended, ending it when it must. Returns why we ended it."""
        deadline_s, look_s = started_s + self._limits["wall_s"], started_s + watchdog.PERIOD_S
        ended = os.pidfd_open(self._child)
        poll = select.poll()
        for fd in (ended, client.fileno()):
            poll.register(fd, select.POLLIN)
        try:
            while True:
                wait_s = max(min(deadline_s, look_s) - time.monotonic(), 0.001)
                ready = dict(poll.poll(wait_s * 1000))
                if ended in ready:
                    self._take_status(poll)
                    return None
                if self._listener is not None and self._listener.fd in ready:
                    if ready[self._listener.fd] & select.POLLIN:
                        self._listener.answer_one()
                    else:  # every process that could ask is on its way out
                        poll.unregister(self._listener.fd)
                reason, now_s = None, time.monotonic()
                if client.fileno() in ready:
                    wish = client.recv(64)
                    if not wish:
                        raise ClientGone
                    reason = wish.decode()
                elif now_s >= deadline_s:
                    reason = "timeout"
                elif now_s >= look_s:
                    self._take_status(poll)
                    reason = self._excess()
                    look_s = time.monotonic() + watchdog.PERIOD_S
                if reason is not None:
                    # in strong mode the whole namespace goes with it
                    os.kill(self._child, signal.SIGKILL)
                    select.select([ended], [], [])
                    return reason
        finally:
            os.close(ended)

    def _take_status(self, poll: select.poll) -> None:
        """Read the channel if there is news. Not polled: a wake-up for each program would cost more
        than the wait of a first refused call until the next look."""
        try:
            message, files, _, _ = socket.recv_fds(self._status, 4096, 4)
        except BlockingIOError:
            return
        word, *names = message.decode("utf-8", "replace").split(" ")
        if word == "started":
            passed = dict(zip(names, files, strict=True))
            self.started = True
            self._work_fd = passed.get("work", -1)
            self._meter.sockstat = passed.get("sockstat", -1)
            if "listener" in passed:
                self._meter.counts_mappings = True
                self._listener = Listener(passed["listener"], self._meter)
                poll.register(self._listener.fd, select.POLLIN)
        elif message:
            self.error = message.decode("utf-8", "replace")

    def _excess(self) -> str | None:
        pids = watchdog.members(whole_namespace=self._mode == "strong")
        reason = watchdog.excess(pids, self._limits, self._cpu_before_s, self._meter)
        if reason is None and time.monotonic() >= self._files_look_s:
            begun_s = time.monotonic()
            reason = self._files(pids)
            ended_s = time.monotonic()
            self._files_look_s = ended_s + _FILES_SHARE * (ended_s - begun_s)
        return reason

    def _files(self, pids: list[int]) -> str | None:
        """Strong mode's work folder holds itself to its limits."""
        entries = size_bytes = 0
        if self._mode == "weak":
            size_bytes, entries = folder.used(self._work_folder, pids, rootfs.WORK_FILES)
        elif self._work_fd >= 0:
            found = os.fstatvfs(self._work_fd)
            entries = found.f_files - found.f_ffree
        return (
            "files"
            if size_bytes > self._limits["disk_bytes"] or entries > rootfs.WORK_FILES
            else None
        )

    def close(self) -> None:
        self._status.close()
        for fd in (
            self._work_fd,
            self._meter.sockstat,
            self._listener.fd if self._listener else -1,
        ):
            if fd >= 0:
                os.close(fd)
