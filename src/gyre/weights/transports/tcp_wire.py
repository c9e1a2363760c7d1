"""TCP's wire: what a reader and a server of parts say to each other. In: a connected socket. Out:
records; an error that the other side has named.

    server  nonce                   32 random bytes.
    reader  proof                   HMAC-SHA256 of the nonce, keyed by the run's token.
    server  answer                  Refused, or welcome.
    reader  request                 Bytes of a part of a version; any number of times.
    server  answer, bytes, answer   The second says whether the version was there to the end.

The token is needed to read the weights. Bytes are neither encrypted nor authenticated, so the
network must be trusted. The checksums of the manifest detect its faults.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from dataclasses import dataclass

from gyre.core.errors import DeadlineError, GyreError, InputError, SnapshotError

NONCE_BYTES = 32
PROOF_BYTES = 32
_REQUEST = struct.Struct("<64sqqQQQ")
_ANSWER = struct.Struct("<BQ256s")
OK, REFUSED, NOT_THERE, TORN = range(4)
_ERRORS: dict[int, type[GyreError]] = {
    REFUSED: InputError,
    NOT_THERE: InputError,
    TORN: SnapshotError,
}
AGAIN = "prepare the version again; the server's own log says more"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequest:
    """Bytes of one part of one version."""

    name: str  # of the slot
    epoch: int
    version: int
    part_bytes: int
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAnswer:
    """What the server says. The sequence is the slot's: another one is another version."""

    code: int
    sequence: int = 0
    message: str = ""


def prove(token: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token, nonce, "sha256")


def is_proof(token: bytes, nonce: bytes, proof: bytes) -> bool:
    return hmac.compare_digest(prove(token, nonce), proof)


def pack_request(request: PartRequest) -> bytes:
    return _REQUEST.pack(
        request.name.encode("ascii"),
        request.epoch,
        request.version,
        request.part_bytes,
        request.start,
        request.size_bytes,
    )


def unpack_request(data: bytes) -> PartRequest:
    name, epoch, version, part_bytes, start, size_bytes = _REQUEST.unpack(data)
    return PartRequest(
        name=name.rstrip(b"\0").decode("ascii", "replace"),
        epoch=epoch,
        version=version,
        part_bytes=part_bytes,
        start=start,
        size_bytes=size_bytes,
    )


def pack_answer(answer: PartAnswer) -> bytes:
    text = answer.message.encode()[:256]
    return _ANSWER.pack(answer.code, answer.sequence, text)


def unpack_answer(data: bytes, peer: str) -> PartAnswer:
    """Return an answer; the error that it names, from the side that raised it."""
    code, sequence, text = _ANSWER.unpack(data)
    answer = PartAnswer(
        code=code, sequence=sequence, message=text.rstrip(b"\0").decode(errors="ignore")
    )
    if code != OK:
        raise _ERRORS.get(code, InputError)(f"{peer}: {answer.message}", hint=AGAIN)
    return answer


REQUEST_BYTES, ANSWER_BYTES = _REQUEST.size, _ANSWER.size


def read_exactly(source: socket.socket, out: memoryview, *, peer: str, ends_at: float) -> None:
    """Fill `out` by a moment of the monotonic clock. DeadlineError for a peer that is slower,
    ConnectionError for one that hung up."""
    while out:
        left_s = ends_at - time.monotonic()
        try:
            source.settimeout(max(left_s, 1e-3))
            found = source.recv_into(out)
        except TimeoutError:
            found = -1
        if found < 0 or left_s < 0:
            raise DeadlineError(
                f"{peer} has left {len(out)} bytes unsent at the deadline",
                hint="see whether its host and the network between work, or raise the deadline",
            )
        if not found:
            raise ConnectionResetError(f"{peer} hung up")
        out = out[found:]


def read_bytes(source: socket.socket, size_bytes: int, *, peer: str, ends_at: float) -> bytes:
    data = bytearray(size_bytes)
    read_exactly(source, memoryview(data), peer=peer, ends_at=ends_at)
    return bytes(data)
