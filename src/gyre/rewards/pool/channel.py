"""Channel: the scorer's ends of the sockets to its processes, on the event loop. In: frames and
orders to send. Out: frames and messages, by callback, in the loop's thread.

`Channel` talks to one worker, `WorkerForkServer` to the fork server of the workers. Neither decides
anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Sequence

from gyre.rewards.fork_server import client
from gyre.rewards.fork_server.client import ForkServerProcess
from gyre.rewards.fork_server.connection import Ended, make_pair
from gyre.rewards.messages import MOST_RESULT_BYTES, take_frame

CLOSE_S = 3.0
END_S = 1.0  # for a process that has hung up to end
_TURN_BYTES = 1 << 20  # read from one worker before others get their turn


class Channel:
    """Framed bytes to and from one worker. The fork server reports its end, not the channel."""

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
            while (body := take_frame(self._incoming, most_bytes=MOST_RESULT_BYTES)) is not None:
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


class WorkerForkServer:
    """The fork server of the workers, under its supervisor. Starts when made.

    `log` takes what the workers print, up to `log_bytes`; "" is stderr.
    """

    def __init__(
        self, libraries: Sequence[str], *, log: str = "", log_bytes: int = 1 << 20
    ) -> None:
        self._supervisor, theirs = make_pair()
        self.process = ForkServerProcess(
            "gyre.rewards.pool.supervisor",
            [log, str(log_bytes), *libraries],
            python=["-P"],
            environment=worker_environment(),
            files=[theirs.fileno()],
        )
        theirs.close()
        self.process.connection.socket.setblocking(False)
        self._supervisor.socket.setblocking(False)
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[Ended], None],
        lost: Callable[[], None],
        dropped: Callable[[], None],
    ) -> None:
        """Begin to listen: `ended` for each worker, `lost` when the server hangs up, `dropped` once
        when the log is full."""

        def listen() -> None:
            try:
                received = self.process.connection.receive()
            except BlockingIOError:
                return
            if received is None:
                lost()
            elif isinstance(received[0], Ended):
                ended(received[0])

        def watch() -> None:
            # it has one message; its end shows in the server's
            loop.remove_reader(self._supervisor)
            with contextlib.suppress(BlockingIOError):
                if self._supervisor.receive():
                    dropped()

        self._loop = loop
        loop.add_reader(self.process.connection, listen)
        loop.add_reader(self._supervisor, watch)

    def fork(self, name: int) -> socket.socket:
        """Order a worker; return our end of its channel, which can be written to at once."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process.start(name, None, [theirs.fileno()])
        return ours

    def reap(self) -> int:
        """Wait for a server that hung up, or kill it; return its exit code. DeadlineError when no
        kill ends it."""
        self._hang_up()
        for end, limit_s in self._ways_to_end(END_S):
            end()
            if self.process.wait(limit_s):
                self._supervisor.close()
                assert self.process.exit_code is not None
                return self.process.exit_code
        raise self.process.unkillable()

    async def close(self, *, idle: bool) -> bool:
        """Hang up, so that the server ends its workers, what they started, and itself.

        False when it had to be killed; DeadlineError when no kill ends it. `idle`: no worker is
        ready, and the server may still be loading; it is ended without waiting for that.
        """
        self._hang_up()
        if idle:
            self._supervisor.close()
        for number, (end, limit_s) in enumerate(self._ways_to_end(CLOSE_S)):
            end()
            if await self._ends_within(limit_s):
                self._supervisor.close()
                return number == 0
        raise self.process.unkillable()

    def _ways_to_end(self, first_s: float) -> Sequence[tuple[Callable[[], object], float]]:
        """List the ways to end it, from gentle to hard, each with the seconds that it gets."""
        return (
            (lambda: None, first_s),
            (self._supervisor.close, END_S),  # then the supervisor kills all below it
            (self.process.kill, client.KILL_S),
        )

    async def _ends_within(self, limit_s: float) -> bool:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s
        while self.process.exit_code is None:
            if loop.time() > end_s:
                return False
            await asyncio.sleep(0.002)
        return True

    def _hang_up(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self.process.connection)
            self._loop.remove_reader(self._supervisor)
            self._loop = None
        self.process.connection.close()


def worker_environment() -> dict[str, str]:
    """Return the user's environment; modules are found as here, and numeric libraries keep to one
    thread."""
    paths = [path for path in sys.path if path]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0", **one_thread}
