"""Cases for registered parts: offers of shards and of whole tensors, and what ranks register of
them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gyre.core.offers import LocalShards, Offer
from gyre.core.records import Manifest
from gyre.distributed.process_group import RankGroup
from gyre.weights.gather import ShardSource
from gyre.weights.shards import ShardLayout, row_layout
from gyre.weights.transports.addresses import host_id
from gyre.weights.transports.device.live_server import LiveServer, live_name
from gyre.weights.transports.mapped import MappedFile
from gyre.weights.transports.opened import OpenTensors, PartOpener, Reading
from gyre.weights.transports.publish import join_parts, publish_part
from gyre.weights.transports.shared_memory import SharedMemoryStore
from layout_cases import held_by
from offers import offer_of

RUN = "0123abcd"
TOKEN = b"a token of the run's own"
SHAPES = {"embed": (13, 8), "norm": (8,), "empty": (0, 3), "big": (40, 8)}


def silent(kind: str, /, **fields) -> None: ...


def whole_tensors(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of the test's own in shared memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-parts-") as folder:
        yield Path(folder)


def filled(version: int) -> dict[str, Tensor]:
    """Large enough that writing it takes a while."""
    return {name: torch.full((250_000,), float(version)) for name in ("a", "b", "c")}


def shard_offer(
    layout: ShardLayout, whole: dict[str, Tensor], holder: int, *, version: int, epoch: int = 0
) -> Offer:
    """What one rank of a sharded trainer offers of its float32 tensors."""
    device = next(iter(whole.values())).device
    group = RankGroup(name="test", rank=holder, size=layout.num_holders, device=device)
    source = ShardSource(layout, held_by(layout, whole, holder), group=group, dtype=torch.bfloat16)
    manifest = Manifest(version=version, entries=(), shared=False, epoch=epoch)
    return Offer(manifest=manifest, source=LocalShards(shards=source))


@contextmanager
def stores_of(folder: Path, num_ranks: int, **settings) -> Iterator[list[SharedMemoryStore]]:
    with ExitStack() as stack:
        stores = []
        for owner in range(num_ranks):
            given = {"run_id": RUN, "emit": silent, "folder": folder, **settings}
            stores.append(SharedMemoryStore(owner=owner, **given))
            stack.callback(stores[-1].close)
        yield stores


class Memory:
    """In place of a GPU's memory that two processes open: anonymous memory of the host."""

    def __init__(self, device: torch.device, size_bytes: int, handle: bytes = b"") -> None:
        if handle:
            self._file = os.open(handle.rstrip(b"\0"), os.O_RDWR)
        else:
            self._file = os.memfd_create("staging")
            os.truncate(self._file, size_bytes)
        self._mapped = MappedFile(self._file, size_bytes, writable=True, pin=False)
        self.bytes_N = self._mapped.bytes_N

    @property
    def handle(self) -> bytes:
        return f"/proc/{os.getpid()}/fd/{self._file}".encode()

    def close(self) -> None:
        self._mapped.close()
        os.close(self._file)


@contextmanager
def live_servers(
    folder: Path, num_ranks: int, *schemes: str, **settings
) -> Iterator[list[LiveServer]]:
    """A server for each rank, of small buckets."""
    given = {"host": host_id(folder), "emit": silent, "bucket_bytes": 64}
    given |= {"device": torch.device("cpu"), "deadline_s": 20.0, "make_staging": Memory}
    given |= settings
    with ExitStack() as stack:
        servers = []
        for owner in range(num_ranks):
            servers.append(LiveServer(name=live_name(RUN, owner), schemes=schemes, **given))
            stack.callback(servers[-1].close)
        yield servers


def register(
    stores: Sequence[SharedMemoryStore],
    whole: dict[str, Tensor],
    *,
    version: int,
    epoch: int = 0,
    sharded: bool = False,
    lives: Sequence[LiveServer] = (),
) -> Offer:
    """Register a version as its ranks do: every rank its shards, or a cut of whole tensors. `lives`
    serve them from the tensors too, which may not change."""
    num_ranks = len(stores)
    if sharded:
        shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        layout = row_layout(shapes, num_ranks=num_ranks, replicated=frozenset(["norm"]))
        offers = [
            shard_offer(layout, whole, rank, version=version, epoch=epoch)
            for rank in range(num_ranks)
        ]
    else:
        offers = [offer_of(version, whole, epoch=epoch)] * num_ranks
    parts = [
        publish_part(
            offer,
            rank=rank,
            num_ranks=num_ranks,
            store=store,
            live=lives[rank] if lives else None,
        )
        for rank, (offer, store) in enumerate(zip(offers, stores, strict=True))
    ]
    return join_parts(version, epoch, parts)


@contextmanager
def open_shards(offer: Offer, reading: Reading) -> Iterator[OpenTensors]:
    """Give the version's whole tensors by name, valid within the block. At its end SnapshotError
    where a part was overwritten meanwhile."""
    opener = PartOpener(reading)
    try:
        with opener.open_parts(offer) as parts:
            yield OpenTensors(offer.manifest, parts)
            for part in parts:
                part.reader.check()
    finally:
        opener.close()


def with_wrong_checksum(offer: Offer, name: str) -> Offer:
    """The same bytes, of which a segment is said to have another sum."""
    entries = tuple(
        entry
        if entry.name != name
        else replace(
            entry,
            segments=(replace(entry.segments[0], checksum="0" * 16), *entry.segments[1:]),
        )
        for entry in offer.manifest.entries
    )
    return replace(offer, manifest=replace(offer.manifest, entries=entries))
