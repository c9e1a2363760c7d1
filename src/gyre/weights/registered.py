"""Registered: the swap to a version that its publisher has registered. In: an Offer of
RegisteredShards, the engine's own tensors. Out: a Swap.

A bucket is copied over the engine's numbers while a thread reads the next one; what comes from
shared memory is copied from the publisher's own pages. The numbers are verified where they end up,
on the engine's device, segment by segment. What a bucket overwrites is kept until the swap is
settled: on the engine's device if it has the room, else in host memory. So `undo` needs no other
process, whatever became of the publisher.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor

from gyre.core.events import Emit
from gyre.core.offers import Offer
from gyre.weights.boxes import views
from gyre.weights.manifest import verify_manifest
from gyre.weights.transports.opened import OpenPart, Reading, open_parts, open_shards
from gyre.weights.transports.part_layout import ReadBucket, dtype_of, plan_reads

BUCKET_BYTES = 64 << 20
SPARE_BYTES = 1 << 30  # left free on a device for everything else


class ReadOver:
    """Parts are read over the engine's numbers, a bucket at a time."""

    moves_bytes = True

    def __init__(
        self,
        offer: Offer,
        own: Mapping[str, Tensor],
        *,
        reading: Reading,
        emit: Emit,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Open every part, and verify the bytes where they need not cross to a device. InputError
        or SnapshotError; nothing of `own` is written."""
        self._offer, self._own, self._emit = offer, own, emit
        self._device = next(iter(own.values())).device
        self._stack = ExitStack()
        self._homes: list[Tensor] = []
        self._kept: list[Tensor] = []
        with ExitStack() as stack:
            if self._device.type == "cpu":
                with open_shards(offer, reading) as tensors:
                    for _ in tensors.values():
                        pass
            self._parts = stack.enter_context(open_parts(offer, reading))
            self._buckets = plan_reads(
                offer.manifest.entries, num_owners=len(self._parts), bucket_bytes=bucket_bytes
            )
            self._stack = stack.pop_all()

    @torch.no_grad()
    def run(self) -> None:
        assert not self._homes, "this swap has run already"
        keep_on = self._where_to_keep()
        for bucket, bytes_N in self._read_ahead():
            homes, values = self._pairs(bucket, bytes_N)
            kept = [torch.empty_like(home, device=keep_on) for home in homes]
            torch._foreach_copy_(kept, homes)
            self._homes += homes
            self._kept += kept
            torch._foreach_copy_(homes, values, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        for part in self._parts:
            part.reader.check()
        verify_manifest(self._offer.manifest, self._own)
        size_bytes = sum(bucket.stop - bucket.start for bucket in self._buckets)
        self._emit(
            "weights.read",
            version=self._offer.version,
            size_bytes=size_bytes,
            buckets=len(self._buckets),
        )

    @torch.no_grad()
    def undo(self) -> None:
        if self._homes:
            torch._foreach_copy_(self._homes, self._kept)
        self._forget()

    def settle(self) -> None:
        self._forget()
        self._stack.close()

    def _forget(self) -> None:
        self._homes.clear()
        self._kept.clear()

    def _where_to_keep(self) -> torch.device:
        """Return the engine's device if a second set of its weights has room there."""
        if self._device.type != "cuda":
            return self._device
        size_bytes = sum(tensor.nbytes for tensor in self._own.values())
        free, _ = torch.cuda.mem_get_info(self._device)
        return self._device if free >= size_bytes + SPARE_BYTES else torch.device("cpu")

    def _pairs(self, bucket: ReadBucket, bytes_N: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the engine's numbers, and what belongs there, shaped alike."""
        homes, values = [], []
        for piece in bucket.pieces:
            entry = piece.placed.entry
            values_N = bytes_N[piece.start : piece.stop].view(dtype_of(entry))
            for home in views(self._own[entry.name], piece.run):
                homes.append(home)
                values.append(values_N[: home.numel()].view(home.shape))
                values_N = values_N[home.numel() :]
        return homes, values

    def _read_ahead(self) -> Iterator[tuple[ReadBucket, Tensor]]:
        """Yield each bucket with its bytes, valid until the next one is asked for."""
        longest = max((one.stop - one.start for one in self._buckets), default=0)
        if all(_is_mapped(part) for part in self._parts):
            for bucket in self._buckets:
                bytes_N = self._parts[bucket.owner].reader.view(bucket.start, bucket.stop)
                assert bytes_N is not None
                yield bucket, bytes_N
            return
        pin = self._device.type == "cuda"
        rooms = [torch.empty(longest, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]

        def read(number: int) -> Tensor:
            bucket = self._buckets[number]
            bytes_N = rooms[number % 2][: bucket.stop - bucket.start]
            self._parts[bucket.owner].reader.read(bucket.start, bytes_N)
            return bytes_N

        with ThreadPoolExecutor(1, thread_name_prefix="read-parts") as reading:
            ahead = reading.submit(read, 0) if self._buckets else None
            for number, bucket in enumerate(self._buckets):
                assert ahead is not None
                bytes_N = ahead.result()  # each read has a deadline
                if number + 1 < len(self._buckets):
                    ahead = reading.submit(read, number + 1)
                yield bucket, bytes_N
                if pin:  # the room is read into again two buckets later
                    torch.cuda.current_stream(self._device).synchronize()


def _is_mapped(part: OpenPart) -> bool:
    return part.reader.view(0, 0) is not None
