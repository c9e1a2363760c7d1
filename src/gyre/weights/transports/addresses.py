"""Addresses: where a part is, and which of its addresses a receiver opens. In: the addresses of a
RegisteredPart, and the receiver's host. Out: one of them, or InputError. Pure, but for `host_id`.

    shm://HOST/NAME         A file in the shared memory of one host, or of one container.
    tcp://HOST:PORT/NAME    The same bytes, from a server.
    nccl://HOST/NAME        The same bytes, broadcast from the publisher's GPU to others.
    gloo://HOST/NAME        The same, from a publisher on a CPU.
    cuda-ipc://HOST/NAME    The same bytes, through memory of the publisher's GPU that both open.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre.core.errors import InputError

SHM, TCP, NCCL, GLOO, CUDA_IPC = "shm", "tcp", "nccl", "gloo", "cuda-ipc"
# served while the publisher's tensors are of the version
GROUP_SCHEMES = (NCCL, GLOO)
LIVE_SCHEMES = (*GROUP_SCHEMES, CUDA_IPC)
SHARED_MEMORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ADDRESS = re.compile(r"(?P<scheme>[a-z-]+)://(?P<place>[^/\s]+)/(?P<name>[A-Za-z0-9-]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAddress:
    """A part's address, taken apart."""

    scheme: str
    place: str  # host id, or host:port
    name: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}/{self.name}"


def host_id(folder: Path = SHARED_MEMORY) -> str:
    """Return a name of this host's shared memory: alike in all processes that see the same folder
    since the same boot. OSError where there is none."""
    found = folder.stat()
    known = f"{BOOT_ID.read_text().strip()}:{found.st_dev}:{found.st_ino}"
    return hashlib.blake2b(known.encode(), digest_size=8).hexdigest()


def parse(address: str) -> PartAddress:
    """Take an address apart; InputError for one that is none."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise InputError(
            f"{address!r} is no address of a part (shm://HOST/NAME or tcp://HOST:PORT/NAME)",
            hint="register the version again; publisher and receiver must be of one Gyre",
        )
    return PartAddress(**found.groupdict())


def choose_address(
    addresses: Sequence[str], *, host: str, preference: Sequence[str] = (SHM, TCP)
) -> PartAddress:
    """Return the address to open: the first scheme of `preference` that is offered, all but TCP
    only of the same host. InputError names what was offered."""
    offered = [parse(address) for address in addresses]
    for scheme in preference:
        for address in offered:
            if address.scheme == scheme and (scheme == TCP or address.place == host):
                return address
    raise InputError(
        f"a part of the version is at {', '.join(addresses) or 'no address'}, and none can be "
        f"opened from host {host} by {' or '.join(preference)}",
        hint="give the publisher an address that this host reaches (TCP), or run the receiver in "
        "the pod whose /dev/shm the publisher has",
    )
