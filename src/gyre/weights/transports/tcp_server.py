"""TCP server: gives the parts of one run to readers on other hosts. In: the folder of its slots, an
address, the run's token. Out: the bytes that are asked for, from the pages of the slots.

It needs no store: a process that outlives the trainer may serve what the trainer has left.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

from gyre.core.errors import ConfigError, DeadlineError, GyreError, InputError
from gyre.core.events import Emit
from gyre.weights.transports.addresses import SHARED_MEMORY
from gyre.weights.transports.slot_header import HEADER_BYTES, name_parts
from gyre.weights.transports.slots import SlotFile
from gyre.weights.transports.tcp_wire import (
    NONCE_BYTES,
    NOT_THERE,
    OK,
    PROOF_BYTES,
    REFUSED,
    REQUEST_BYTES,
    TORN,
    PartAnswer,
    PartRequest,
    is_proof,
    pack_answer,
    read_bytes,
    unpack_request,
)

HANDSHAKE_S = 10.0
RETRY_S = 1.0  # after an error of accept, which may last
# dead peers: asked after 60 s of silence, every 10 s, given up after 6
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))


class PartServer:
    """One thread accepts, and one serves each connection. At most `max_connections` readers are
    served, and as many may be in their handshakes."""

    def __init__(
        self,
        *,
        run_id: str,
        token: bytes,
        emit: Emit,
        host: str,
        port: int = 0,
        folder: Path = SHARED_MEMORY,
        max_connections: int = 256,
        deadline_s: float = 60.0,
    ) -> None:
        """Listen at once. `host`: the address that readers connect to. ConfigError where that
        cannot be had."""
        assert len(token) >= 16, "a token shorter than 16 bytes can be guessed"
        self._run_id = run_id
        self._token = token
        self._folder = folder
        self._emit = emit
        self._deadline_s = deadline_s
        self._max = max_connections
        try:
            self._listening = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            raise ConfigError(
                f"weights cannot be served at {host} port {port}: {error}",
                hint="choose an address of this host, and a port that is free (0 for any)",
            ) from error
        bound, taken_port = self._listening.getsockname()[:2]
        # as addresses have it
        self.place = f"[{bound}]:{taken_port}" if ":" in bound else f"{bound}:{taken_port}"
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._readers: set[socket.socket] = set()  # those that have shown the token
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, name="serve-parts", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop listening and end every connection; readers see that their server is gone."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepting.join(HANDSHAKE_S)
        self._listening.close()
        with self._lock:
            ending = dict(self._open)
        for connection, thread in ending.items():
            with suppress(OSError):  # the reader may have been faster
                connection.shutdown(socket.SHUT_RDWR)  # wakes its thread
            thread.join(self._deadline_s)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, peer = self._listening.accept()
            except OSError as error:
                if not self._closed:  # a reader that was gone at once, or too many open files
                    self._emit("weights.reader_lost", peer="", error=str(error))
                    time.sleep(RETRY_S)
                continue
            if len(self._open) >= 2 * self._max:  # the half of them in a handshake at most
                self._emit("weights.reader_refused", peer=peer[0], reason=self._full)
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection, peer[0]), daemon=True)
            with self._lock:
                self._open[connection] = thread
            thread.start()

    @property
    def _full(self) -> str:
        return f"the server has {self._max} readers, as many as it may have"

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            for option, value in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._welcome(connection, peer):
                while (request := self._next(connection, peer)) is not None:
                    self._answer(connection, request)
        except (OSError, DeadlineError) as error:
            if not self._closed:
                self._emit("weights.reader_lost", peer=peer, error=str(error))
        finally:
            with self._lock:
                del self._open[connection]
                self._readers.discard(connection)
            connection.close()

    def _welcome(self, connection: socket.socket, peer: str) -> bool:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.settimeout(HANDSHAKE_S)
        connection.sendall(nonce)
        ends_at = time.monotonic() + HANDSHAKE_S
        proof = read_bytes(connection, PROOF_BYTES, peer=peer, ends_at=ends_at)
        refused = None
        if not is_proof(self._token, nonce, proof):
            refused = "the token is not that of this run"
        with self._lock:
            if refused is None and len(self._readers) >= self._max:
                refused = self._full
            if refused is None:
                self._readers.add(connection)
        if refused is not None:
            self._emit("weights.reader_refused", peer=peer, reason=refused)
            connection.sendall(pack_answer(PartAnswer(code=REFUSED, message=refused)))
            return False
        connection.sendall(pack_answer(PartAnswer(code=OK)))
        return True

    def _next(self, connection: socket.socket, peer: str) -> PartRequest | None:
        """Wait for the next request, as long as the reader is there: it reads when its engine is
        ready. None when it hung up."""
        connection.settimeout(None)
        first = connection.recv(1)
        if not first:
            return None
        ends_at = time.monotonic() + HANDSHAKE_S
        return unpack_request(
            first + read_bytes(connection, REQUEST_BYTES - 1, peer=peer, ends_at=ends_at)
        )

    def _answer(self, connection: socket.socket, request: PartRequest) -> None:
        connection.settimeout(self._deadline_s)
        try:
            with closing(self._find(request)) as file:
                header = file.find(
                    epoch=request.epoch, version=request.version, size_bytes=request.part_bytes
                )
                if request.start + request.size_bytes > request.part_bytes:
                    raise InputError(f"{request.name} has no such bytes")
                whole = PartAnswer(code=OK, sequence=header.sequence)
                connection.sendall(pack_answer(whole))
                if request.size_bytes:
                    with open(file.handle, "rb", buffering=0, closefd=False) as pages:
                        connection.sendfile(pages, HEADER_BYTES + request.start, request.size_bytes)
                file.check(header)
        except GyreError as error:
            code = NOT_THERE if isinstance(error, InputError) else TORN
            whole = PartAnswer(code=code, message=error.message)
        connection.sendall(pack_answer(whole))

    def _find(self, request: PartRequest) -> SlotFile:
        named = name_parts(request.name)
        if named is None or named[0] != self._run_id:
            raise InputError(f"{request.name!r} is no slot of this run")
        return SlotFile(self._folder, request.name)
