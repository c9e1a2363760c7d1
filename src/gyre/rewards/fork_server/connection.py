"""Connection: the messages between a fork server and its client. In: records and open files. Out:
the same, one per packet.

    client ── StartChild + files, Kill ──▶ server ──fork──▶ children
           ◀── Ready | Refused, Ended ──

The socket keeps packets apart (SOCK_SEQPACKET). Only the two ends hold it, since a child closes the
server's end before it runs other code. So what arrives was sent by the peer. The encoding is
marshal, which a Python without site-packages has.
"""

from __future__ import annotations

import contextlib
import marshal
import socket
from typing import Any, NamedTuple

MOST_FILES = 8  # with one message
_MOST_BYTES = 1 << 16


class StartChild(NamedTuple):
    """Fork a child. The files that come with the message are the child's."""

    name: int  # the client's number for it, used once
    request: Any  # plain data, for the kind of child that the server forks


class Kill(NamedTuple):
    """Kill a child. Ignored when it has ended."""

    name: int
    reason: str


class Ready(NamedTuple):
    """Report that the server takes orders."""

    note: str  # what is worth an event, or ""


class Refused(NamedTuple):
    """Report that the server cannot be set up and exits."""

    error: str


class Ended(NamedTuple):
    """Report that a child has ended and was reaped."""

    name: int
    exit_code: int  # -n: ended by signal n
    reason: str | None  # why the server killed it; None when it ended by itself
    report: dict[str, Any]  # what this kind of child adds


class OutputDropped(NamedTuple):
    """Report, once, that a supervisor's log is full."""


Message = StartChild | Kill | Ready | Refused | Ended | OutputDropped
_KINDS = (StartChild, Kill, Ready, Refused, Ended, OutputDropped)


def make_pair() -> tuple[Connection, Connection]:
    """Make the two ends of a connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Connection(ours), Connection(theirs)


class Connection:
    """One end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Message, files: list[int] | None = None) -> None:
        """Send one message. A peer that has gone gets none; `receive` shows it."""
        data = marshal.dumps((_KINDS.index(type(message)), *message))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.socket, [data], files or [])

    def receive(self) -> tuple[Any, list[int]] | None:
        """Take one message with its files; None when the peer has gone."""
        try:
            data, files, _, _ = socket.recv_fds(self.socket, _MOST_BYTES, MOST_FILES)
        except ConnectionResetError:  # it went while messages for it were on their way
            return None
        if not data:
            return None
        kind, *fields = marshal.loads(data)
        return _KINDS[kind](*fields), files

    def close(self) -> None:
        self.socket.close()
