"""TCP reader: bytes of a part from its server, over several connections. In: an address, the run's
token. Out: a PartReader.

A read is shared by the connections. Each asks for pieces, so that a slow peer is found at the
deadline of a piece, and not of the whole.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from gyre.core.errors import InputError, SnapshotError
from gyre.core.rounding import ceil_div, round_up
from gyre.weights.transports.addresses import PartAddress
from gyre.weights.transports.contracts import LendsNothing
from gyre.weights.transports.part_range import ALIGN_BYTES, PartRange, bucket_size, cut_stretches
from gyre.weights.transports.tcp_wire import (
    AGAIN,
    ANSWER_BYTES,
    NONCE_BYTES,
    PartRequest,
    pack_request,
    prove,
    read_bytes,
    read_exactly,
    unpack_answer,
)

PIECE_BYTES = 16 << 20  # of one request


class TcpPart(LendsNothing):
    """A PartReader. Its connections stay open until it is closed."""

    def __init__(
        self,
        address: PartAddress,
        *,
        epoch: int,
        version: int,
        size_bytes: int,
        token: bytes,
        num_connections: int,
        deadline_s: float,
    ) -> None:
        """Connect, and ask whether the version is there. InputError, SnapshotError or
        DeadlineError."""
        if not token:
            raise InputError(
                f"{address} needs the run's token, and this receiver has none",
                hint="give the receiver the token of the run that publishes",
            )
        self._address = address
        self._token = token
        self._deadline_s = deadline_s
        self._nothing = PartRequest(
            name=address.name,
            epoch=epoch,
            version=version,
            part_bytes=size_bytes,
            start=0,
            size_bytes=0,
        )
        self._sequence: int | None = None
        self._connections: list[socket.socket] = []
        try:
            for _ in range(num_connections):
                self._connections.append(self._connect())
            self.check()
        except BaseException:
            self._hang_up()
            raise
        self._threads = ThreadPoolExecutor(num_connections, thread_name_prefix="read-tcp")

    def view(self, start: int, stop: int) -> None:
        return None

    def read(
        self,
        stretches: Sequence[PartRange],
        out_N: Tensor,
        *,
        next_stretches: Sequence[PartRange] = (),
    ) -> None:
        out = memoryview(cast(Any, out_N.numpy()))
        share = ceil_div(bucket_size(stretches), len(self._connections))
        cuts = cut_stretches(stretches, max(ALIGN_BYTES, round_up(share, ALIGN_BYTES)))
        calls = [
            self._threads.submit(self._read_share, connection, cut, out[base:])
            for connection, (base, cut) in zip(self._connections, cuts, strict=False)
        ]
        errors = [error for call in calls if (error := call.exception()) is not None]
        if errors:
            raise errors[0]

    def check(self) -> None:
        self._request(self._connections[0], 0, memoryview(b""))

    def close(self) -> None:
        self._hang_up()
        self._threads.shutdown()

    def _hang_up(self) -> None:
        for connection in self._connections:
            connection.close()

    def _connect(self) -> socket.socket:
        peer = str(self._address)
        host, _, port = self._address.place.rpartition(":")
        ends_at = time.monotonic() + self._deadline_s
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), self._deadline_s)
        except (OSError, ValueError) as error:
            raise InputError(
                f"{peer} cannot be reached: {error}",
                hint="its publisher has ended, or a network policy is between: register again",
            ) from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = read_bytes(connection, NONCE_BYTES, peer=peer, ends_at=ends_at)
            connection.sendall(prove(self._token, nonce))
            unpack_answer(read_bytes(connection, ANSWER_BYTES, peer=peer, ends_at=ends_at), peer)
        except OSError as error:
            connection.close()
            raise self._lost(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _read_share(
        self, connection: socket.socket, stretches: Sequence[PartRange], out: memoryview
    ) -> None:
        for one in (row for stretch in stretches for row in stretch.rows()):
            for start in range(one.start, one.stop, PIECE_BYTES):
                at, count = one.at + start - one.start, min(PIECE_BYTES, one.stop - start)
                self._request(connection, start, out[at : at + count])

    def _request(self, connection: socket.socket, start: int, out: memoryview) -> None:
        """Fill `out` with bytes that were the version's from the first to the last. After an error
        the connection is closed: what it would say next is not known."""
        try:
            self._ask(connection, start, out)
        except BaseException:
            connection.close()
            raise

    def _ask(self, connection: socket.socket, start: int, out: memoryview) -> None:
        peer, ends_at = str(self._address), time.monotonic() + self._deadline_s
        request = replace(self._nothing, start=start, size_bytes=len(out))
        try:
            connection.settimeout(self._deadline_s)
            connection.sendall(pack_request(request))
            for body in (out, memoryview(b"")):
                data = read_bytes(connection, ANSWER_BYTES, peer=peer, ends_at=ends_at)
                sequence = unpack_answer(data, peer).sequence
                if self._sequence not in (None, sequence):
                    raise InputError("its slot was written again")
                self._sequence = sequence
                read_exactly(connection, body, peer=peer, ends_at=ends_at)
        except OSError as error:
            raise self._lost(error) from error
        except InputError as error:
            if self._sequence is None:
                raise
            raise self._lost(error) from error  # it was there before

    def _lost(self, error: Exception) -> SnapshotError:
        return SnapshotError(
            f"{self._address} was lost or overwritten while version {self._nothing.version} was "
            f"read: {error}",
            hint=AGAIN,
        )
