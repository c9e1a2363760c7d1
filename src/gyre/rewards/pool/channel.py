"""Link: the scorer's ends of the sockets to its processes, on the event loop. In: frames and orders
to send. Out: frames and news, by callback, in the loop's thread.

`Channel` talks to one worker, `Nursery` starts and talks to the process that forks workers, under
its guard. Neither decides anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from gyre.core.errors import DeadlineError
from gyre.rewards.messages import MOST_VERDICT_BYTES, take_frame

_CLOSE_S = 3.0
_END_S = 1.0  # for a process that has hung up to end
_KILL_S = 10.0  # for a killed one to be gone
_TURN_BYTES = 1 << 20  # read from one worker before others get their turn


class Channel:
    """Framed bytes to and from one worker. Its end is silent here: the nursery tells of it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        end: socket.socket,
        hear: Callable[[list[bytes], bool], None],
    ) -> None:
        """`hear(bodies, broken)`: whole frames, and whether what follows them is no frame of a
        worker's."""
        self._loop = loop
        self._end = end
        self._hear = hear
        self._incoming = bytearray()
        self._outgoing = bytearray()
        end.setblocking(False)
        loop.add_reader(end, self.receive)

    def send(self, data: bytes) -> None:
        self._outgoing += data
        self._flush()

    def receive(self) -> None:
        """Read what is there, up to a bound, and hand on every whole frame."""
        ended, end_bytes = False, len(self._incoming) + _TURN_BYTES
        with contextlib.suppress(BlockingIOError):
            try:
                while not ended and len(self._incoming) < end_bytes:
                    data = self._end.recv(1 << 18)
                    self._incoming += data
                    ended = not data
            except ConnectionResetError:
                ended = True
        if ended:
            self._loop.remove_reader(self._end)
        bodies, broken = [], False
        try:
            while (body := take_frame(self._incoming, most_bytes=MOST_VERDICT_BYTES)) is not None:
                bodies.append(body)
        except ValueError:
            broken = True
        if bodies or broken:
            self._hear(bodies, broken)

    def close(self) -> None:
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._end.send(self._outgoing)]
        except BlockingIOError:
            self._loop.add_writer(self._end, self._flush)
            return
        except (BrokenPipeError, ConnectionResetError):
            self._outgoing.clear()  # it has ended
        self._loop.remove_writer(self._end)


class Nursery:
    """The process that loads libraries once and forks workers, under a guard. Starts when made.

    `log` takes what the workers print, up to `log_bytes`; "" is stderr.
    """

    def __init__(
        self, libraries: Sequence[str], *, log: str = "", log_bytes: int = 1 << 20
    ) -> None:
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._watch, watch = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._watch.setblocking(False)
        self._loop: asyncio.AbstractEventLoop | None = None
        numbers = (watch.fileno(), control.fileno())
        with control, watch:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "gyre.rewards.pool.guard",
                    *map(str, numbers),
                    log,
                    str(log_bytes),
                    *libraries,
                ],
                pass_fds=numbers,
                env=worker_environment(),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        gone: Callable[[int, int], None],
        died: Callable[[], None],
        dropped: Callable[[], None],
    ) -> None:
        """Begin to listen: `gone(name, status)` for each worker that has ended, `died()` for the
        nursery's own end, `dropped()` once when the log is full."""

        def listen() -> None:
            try:
                message = self._control.recv(4096)
            except BlockingIOError:
                return
            except ConnectionResetError:
                message = b""
            if not message:
                died()
                return
            _, name, status = message.decode().split()
            gone(int(name), int(status))

        def watch() -> None:
            # it has one thing to say; its end shows in the nursery's
            loop.remove_reader(self._watch)
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                if self._watch.recv(64):
                    dropped()

        self._loop = loop
        loop.add_reader(self._control, listen)
        loop.add_reader(self._watch, watch)

    def fork(self, name: int) -> socket.socket:
        """Ask for a worker; return our end of its channel, good at once."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._tell(f"fork {name}", [theirs.fileno()])
        return ours

    def kill(self, name: int) -> None:
        self._tell(f"kill {name}", [])

    def _tell(self, order: str, fds: list[int]) -> None:
        # it has died, and `died` says so
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [order.encode()], fds)

    def bury(self) -> int:
        """After its own end: let go of it and return its exit code. One that only hung up is
        killed; DeadlineError when even that does not end it."""
        self._hang_up()
        # without its watch the guard kills all below it
        for end in (None, self._watch.close, self._process.kill):
            if end is not None:
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_KILL_S if end == self._process.kill else _END_S)
                self._watch.close()
                return code
        raise self._unkillable()

    async def close(self, *, idle: bool) -> bool:
        """Hang up, whereupon it ends its workers, what they started, and itself. False when it had
        to be killed; DeadlineError when even that does not end it. `idle`: it has no worker at
        work, and may still be loading; it is ended without waiting for that."""
        self._hang_up()
        if idle:
            self._watch.close()
        if await self._ends_within(_CLOSE_S):
            self._watch.close()
            return True
        self._watch.close()
        if await self._ends_within(_END_S):
            return False
        self._process.kill()
        if not await self._ends_within(_KILL_S):
            raise self._unkillable()
        return False

    async def _ends_within(self, limit_s: float) -> bool:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while self._process.poll() is None:
            if loop.time() > end_s:
                return False
            await asyncio.sleep(0.002)
        return True

    def _unkillable(self) -> DeadlineError:
        return DeadlineError(
            f"the process that starts reward workers (pid {self._process.pid}) was killed and did "
            "not end within "
            f"{_KILL_S:g} s",
            hint="it hangs within the kernel, as on a file system that does not answer: see `ps "
            "-o stat,wchan` of it",
        )

    def _hang_up(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._control)
            self._loop.remove_reader(self._watch)
            self._loop = None
        self._control.close()


def worker_environment() -> dict[str, str]:
    """The user's environment; modules are found as here, and numeric libraries keep to one
    thread."""
    paths = [path for path in sys.path if path]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0", **one_thread}
