"""Handshake: how a member and a driver prove to each other that both have the run's token. In: a
connected socket, the token. Out: who asks to join, or an error that says why it was refused.

    driver  hello    protocol, 32 random bytes.
    member  asks     32 random bytes, its Gyre, name and place, HMAC-SHA256 over all of it.
    driver  answers  A code, HMAC-SHA256 over all that was said, a message.

Messages have fixed sizes, so a stranger makes the other side keep a few hundred bytes.
The token itself is never sent. What follows is neither encrypted nor authenticated, so the network
must be trusted.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from gyre.core import VERSION
from gyre.core.errors import DeadlineError, InputError

PROTOCOL = b"GYREMBR1"
NONCE_BYTES = 32
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?")
_HELLO = struct.Struct("<8s32s")
_ASK = struct.Struct("<32s32s48s128s32s")
_ANSWER = struct.Struct("<B32s256s")
ADMITTED, REFUSED = range(2)
NO_PROOF = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What a member says of itself."""

    name: str
    place: str  # host and process id, for people


Refuse = Callable[[JoinRequest], None]  # raises InputError for one that may not join


def prove(token: bytes, side: bytes, *said: bytes) -> bytes:
    return hmac.digest(token, side + b"".join(said), "sha256")


def pack_ask(token: bytes, hello: bytes, nonce: bytes, request: JoinRequest) -> bytes:
    """Return the member's message, with its proof. Pure."""
    place = request.place.encode()[:128]
    data = _ASK.pack(nonce, VERSION.encode(), request.name.encode("ascii"), place, NO_PROOF)[:-32]
    return data + prove(token, b"member", hello, data)


def read_ask(token: bytes, hello: bytes, ask: bytes) -> JoinRequest:
    """Return who asks. InputError for one that has another token, another Gyre, or a name that is
    none. Pure."""
    if not hmac.compare_digest(prove(token, b"member", hello, ask[:-32]), ask[-32:]):
        raise InputError(
            "the token is not that of this run", hint="copy the run's token file to the member"
        )
    _, version, name, place, _ = _ASK.unpack(ask)
    if version.rstrip(b"\0") != VERSION.encode():
        raise InputError(
            f"it has Gyre {version.rstrip(bytes(1)).decode('ascii', 'replace')}, the run {VERSION}",
            hint="install the run's version of Gyre on the member's host",
        )
    text = name.rstrip(b"\0").decode("ascii", "replace")
    if not NAME.fullmatch(text):
        raise InputError(
            f"{text!r} is no name of a member: letters, digits and hyphens",
            hint="give another one: --name",
        )
    shown = place.rstrip(b"\0").decode(errors="replace")
    return JoinRequest(name=text, place="".join(c if c.isprintable() else "?" for c in shown))


def pack_answer(token: bytes, hello: bytes, ask: bytes, code: int, message: str = "") -> bytes:
    """Return the driver's answer. It proves that it has the token where it admits. Pure."""
    told = message.encode()[:256]
    proof = prove(token, b"driver", hello, ask) if code == ADMITTED else NO_PROOF
    return _ANSWER.pack(code, proof, told)


def check_answer(token: bytes, hello: bytes, ask: bytes, answer: bytes) -> None:
    """Raise InputError unless the driver admits this member, and has the token. Pure."""
    code, proof, told = _ANSWER.unpack(answer)
    if code != ADMITTED:
        raise InputError(
            f"the driver refuses this member: {told.rstrip(bytes(1)).decode(errors='replace')}",
            hint="the run's events.jsonl says more (member.refused)",
        )
    if not hmac.compare_digest(prove(token, b"driver", hello, ask), proof):
        raise InputError(
            "who listens there does not have the run's token",
            hint="see whether the address is that of the run (member.listening)",
        )


async def admit(
    link: socket.socket, token: bytes, *, refuse: Refuse, deadline_s: float
) -> JoinRequest:
    """Take the driver's side, over a socket that does not block. InputError for one that is
    refused, which gets the reason; DeadlineError for one that says nothing; OSError for one that
    hung up."""
    loop = asyncio.get_running_loop()
    hello = _HELLO.pack(PROTOCOL, secrets.token_bytes(NONCE_BYTES))
    try:
        async with asyncio.timeout(deadline_s):
            await loop.sock_sendall(link, hello)
            ask = await _receive(link, _ASK.size)
            try:
                request = read_ask(token, hello, ask)
                refuse(request)
            except InputError as error:
                refusal = pack_answer(token, hello, ask, REFUSED, error.message)
                await loop.sock_sendall(link, refusal)
                raise
            await loop.sock_sendall(link, pack_answer(token, hello, ask, ADMITTED))
            return request
    except TimeoutError:
        raise DeadlineError(
            f"it had not asked to join after {deadline_s:g} s",
            hint="see whether another program connects to the members' address",
        ) from None


def ask_to_join(
    link: socket.socket, token: bytes, request: JoinRequest, *, deadline_s: float
) -> None:
    """Take the member's side. InputError when it is refused, or the driver has another token;
    DeadlineError for one that says nothing, OSError for one that hung up."""
    link.settimeout(deadline_s)
    try:
        hello = _read(link, _HELLO.size)
        protocol, _ = _HELLO.unpack(hello)
        if protocol != PROTOCOL:
            raise InputError(
                f"who listens there begins with {protocol!r}, need {PROTOCOL!r}",
                hint="give the members' address of a run (member.listening), of the same Gyre",
            )
        ask = pack_ask(token, hello, secrets.token_bytes(NONCE_BYTES), request)
        link.sendall(ask)
        check_answer(token, hello, ask, _read(link, _ANSWER.size))
    except TimeoutError:
        raise DeadlineError(
            f"the driver had not answered after {deadline_s:g} s",
            hint="see whether the address is that of a run (member.listening)",
        ) from None
    link.settimeout(None)


def _read(link: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        if not (part := link.recv(size_bytes - len(data))):
            raise ConnectionResetError("the driver hung up")
        data += part
    return data


async def _receive(link: socket.socket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        if not (part := await asyncio.get_running_loop().sock_recv(link, size_bytes - len(data))):
            raise ConnectionResetError("it hung up")
        data += part
    return data


def notice_silence(link: socket.socket, silence_s: float) -> None:
    """Let the system end a connection whose network is silent for so long, idle or not."""
    wait_s = max(1, round(silence_s / 4))
    for option, value in (
        (socket.TCP_KEEPIDLE, wait_s),
        (socket.TCP_KEEPINTVL, wait_s),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, round(1000 * silence_s)),
        (socket.TCP_NODELAY, 1),
    ):
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
