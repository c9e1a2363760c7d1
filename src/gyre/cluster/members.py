"""Members: takes in workers that other hosts start. In: an address to listen at, the run's token.
Out: sockets of members that have proved the token, one for each name.

At most so many connections are in their handshakes, each by a deadline; a further one is closed at
once. Refusals make one event a second at most, with their number.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from gyre.cluster.worker.handshake import JoinRequest, admit, notice_silence
from gyre.core.errors import ConfigError, DeadlineError, InputError
from gyre.core.events import Emit

HANDSHAKE_S = 10.0
SILENCE_S = 30.0  # of the network, after which a member, or for it the driver, is lost
RETRY_S = 0.1  # after an error of accept, which may last
TELL_S = 1.0  # between two events of refusals
MOST_FRAME_BYTES = 1 << 30  # that a member may send at once


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedMember:
    """A member that has the token, and its socket."""

    request: JoinRequest
    peer: str
    link: socket.socket


class MemberListener:
    """Listens on the event loop that makes it."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        token: bytes,
        refuse: Callable[[JoinRequest], None],
        on_admitted: Callable[[AdmittedMember], None],
        emit: Emit,
        handshake_s: float = HANDSHAKE_S,
        silence_s: float = SILENCE_S,
        most_handshakes: int = 16,
    ) -> None:
        """Listen at once; ConfigError where the address cannot be had. `refuse` raises InputError
        for a member that may not join."""
        assert len(token) >= 16, "a token shorter than 16 bytes can be guessed"
        self._token = token
        self._refuse = refuse
        self._on_admitted = on_admitted
        self._emit = emit
        self._handshake_s = handshake_s
        self._silence_s = silence_s
        self._most_handshakes = most_handshakes
        try:
            self._listening = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            raise ConfigError(
                f"cluster.members_address: cannot listen at {host} port {port}: {error}",
                hint="choose an address of this host, and a port that is free (0 for any)",
            ) from error
        self._listening.setblocking(False)
        bound, taken_port = self._listening.getsockname()[:2]
        self.place = f"[{bound}]:{taken_port}" if ":" in bound else f"{bound}:{taken_port}"
        self._handshakes: set[asyncio.Task[None]] = set()
        self._untold: tuple[str, str] | None = None  # peer and reason of the last one
        self._num_untold = 0
        self._told_s = -TELL_S
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stop listening, and end the handshakes under way."""
        tasks = [self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()
        if self._untold is not None:
            self._tell(*self._untold)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                link, peer = await loop.sock_accept(self._listening)
            except OSError as error:  # a member that was gone at once, or too many open files
                self._note_refusal("", str(error))
                await asyncio.sleep(RETRY_S)
                continue
            if len(self._handshakes) >= self._most_handshakes:
                link.close()
                self._note_refusal(
                    peer[0], f"{self._most_handshakes} others are in their handshakes"
                )
                continue
            link.setblocking(False)
            task = asyncio.create_task(self._shake_hands(link, peer[0]))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, link: socket.socket, peer: str) -> None:
        try:
            notice_silence(link, self._silence_s)
            request = await admit(
                link, self._token, refuse=self._refuse, deadline_s=self._handshake_s
            )
        except (OSError, InputError, DeadlineError) as error:
            link.close()
            self._note_refusal(peer, str(error))
            return
        except BaseException:
            link.close()
            raise
        link.setblocking(True)
        self._on_admitted(AdmittedMember(request=request, peer=peer, link=link))

    def _note_refusal(self, peer: str, reason: str) -> None:
        self._num_untold += 1
        self._untold = peer, reason
        if time.monotonic() - self._told_s >= TELL_S:
            self._tell(peer, reason)

    def _tell(self, peer: str, reason: str) -> None:
        count, self._num_untold, self._untold = self._num_untold, 0, None
        self._told_s = time.monotonic()
        self._emit("member.refused", peer=peer, reason=reason, count=count)
