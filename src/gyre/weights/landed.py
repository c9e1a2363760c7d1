"""Landed: runs of a version, summed as each reaches its tensor, and what the tensors were before.
In: pieces of buckets, the tensors that have them. Out: whether the sums are those of the manifest.
On a GPU tensors are kept, and runs summed, beside the copies of further buckets.
"""

# N numbers of a run

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gyre.core.records import Segment, TensorEntry
from gyre.core.rounding import round_up
from gyre.kernels.checksum import as_hex, checksums
from gyre.weights.boxes import views
from gyre.weights.manifest import segment_run
from gyre.weights.transports.mapped import huge_pages
from gyre.weights.transports.part_layout import ReadPiece
from gyre.weights.transports.part_range import ALIGN_BYTES

KEEP_AND_SUM = "keep and sum"  # purpose of a stream
KEPT_BYTES = 1 << 30  # of tensors kept at once: a copy waits for those of its tensors
Place = tuple[str, int, tuple[int, int] | None]  # tensor, first number, columns: of a segment


class LandedSums:
    """Sums of the numbers where they are now, by segment."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._sums: list[Tensor] = []  # one for each place, in groups
        self._totals: dict[Place, int] | None = None

    def add(self, pieces: tuple[ReadPiece, ...], tensors: Mapping[str, Tensor]) -> None:
        """Sum pieces that have landed, without waiting for their device."""
        assert self._totals is None, "the sums were asked for"
        runs = []
        for piece in pieces:
            entry, segment = piece.placed.entry, piece.placed.segment
            homes = [home.reshape(-1) for home in views(tensors[entry.name], piece.run)]
            flat_N = homes[0] if len(homes) == 1 else torch.cat(homes)
            runs.append(segment_run(entry, replace(segment, start=piece.run.start), flat_N))
            self._places.append(_place(entry, segment))
        self._sums.append(checksums(runs))

    def match(self, entry: TensorEntry, tensor: Tensor) -> bool:
        """Return whether all segments of a tensor have their checksums. Waits for the device."""
        if self._totals is None:
            self._totals = {}
            sums = torch.cat(self._sums).tolist() if self._sums else []
            for place, total in zip(self._places, sums, strict=True):
                self._totals[place] = self._totals.get(place, 0) + total
        return all(
            as_hex(self._totals.get(_place(entry, segment), 0)) == segment.checksum
            for segment in entry.segments
            if segment.checksum is not None
        )


def _place(entry: TensorEntry, segment: Segment) -> Place:
    return entry.name, segment.start, segment.columns


class Keeper:
    """A copy of an engine's tensors, in one piece of memory: a device needs longer for many
    allocations than for the copies."""

    def __init__(self, own: Mapping[str, Tensor], device: torch.device) -> None:
        """Take the room on a device."""
        size_bytes = sum(round_up(tensor.nbytes, ALIGN_BYTES) for tensor in own.values())
        if device.type == "cpu":
            room_N = huge_pages(size_bytes)
        else:
            room_N = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._pairs: list[tuple[str, Tensor, Tensor]] = []
        for name, tensor in own.items():
            placed_N = room_N[: tensor.nbytes]
            room_N = room_N[round_up(tensor.nbytes, ALIGN_BYTES) :]
            self._pairs.append((name, tensor, placed_N.view(tensor.dtype).view(tensor.shape)))
        self._num_kept = 0

    def keep(self) -> Iterator[list[str]]:
        """Copy tensors in their order. Yields the names of those that are being copied."""
        while self._num_kept < len(self._pairs):
            pairs, size_bytes = list[tuple[str, Tensor, Tensor]](), 0
            for pair in self._pairs[self._num_kept :]:
                pairs.append(pair)
                size_bytes += pair[1].nbytes
                if size_bytes >= KEPT_BYTES:
                    break
            _, own, kept = zip(*pairs, strict=True)
            torch._foreach_copy_(kept, own)
            self._num_kept += len(pairs)
            yield [name for name, _, _ in pairs]

    def put_back(self) -> None:
        """Overwrite the engine's tensors with what was kept of them."""
        pairs = self._pairs[: self._num_kept]
        if not pairs:
            return
        _, own, kept = zip(*pairs, strict=True)
        if (device := own[0].device).type == "cuda":
            torch.cuda.current_stream(device).wait_stream(stream_for(KEEP_AND_SUM, device))
        torch._foreach_copy_(own, kept)


class CopyOrder:
    """The order of what happens to buckets: kept, copied over, summed. On a GPU a stream of its own
    keeps and sums, while the caller's stream copies. A copy waits for the keeping of its tensors,
    and a bucket is summed with the copy of the next one."""

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[Any, Any] | None = None  # of the copies, and the other
        self._kept: dict[str, Any] = {}  # by tensor, event: it may be overwritten
        self._landed: tuple[Callable[[], None], Any] | None = None  # to be summed; its copy's event
        if device.type == "cuda":
            copying = torch.cuda.current_stream(device)
            beside = stream_for(KEEP_AND_SUM, device)
            beside.wait_stream(copying)
            self._streams = copying, beside

    def keep(self, keeper: Keeper) -> None:
        """Keep all tensors, before any copy that overwrites them."""
        if self._streams is None:
            for _ in keeper.keep():
                pass
            return
        _, beside = self._streams
        with torch.cuda.stream(beside):
            for names in keeper.keep():
                self._kept.update(dict.fromkeys(names, beside.record_event()))

    def copy(self, names: Iterable[str], homes: list[Tensor], values: list[Tensor]) -> None:
        """Copy values over the engine's numbers, which are of the tensors named."""
        if self._streams is not None:
            for event in {self._kept[name] for name in names if name in self._kept}:
                self._streams[0].wait_event(event)
        torch._foreach_copy_(homes, values, non_blocking=True)

    def sum_up(self, sum_up: Callable[[], None]) -> None:
        """Sum what was copied last, by the end of the next bucket or `finish`."""
        if self._streams is None:
            sum_up()
            return
        event = self._streams[0].record_event()
        self._sum_landed()
        self._landed = sum_up, event

    def finish(self) -> None:
        """Wait for all copies and sums."""
        if self._streams is not None:
            copying, beside = self._streams
            self._sum_landed()
            copying.wait_stream(beside)
            copying.synchronize()

    def _sum_landed(self) -> None:
        if self._streams is None or self._landed is None:
            return
        (_, beside), (sum_up, event) = self._streams, self._landed
        self._landed = None
        beside.wait_event(event)
        with torch.cuda.stream(beside):
            sum_up()


@functools.cache
def stream_for(purpose: str, device: torch.device) -> Any:
    """Return the stream of a purpose, one per device: each keeps freed memory of its own."""
    return torch.cuda.Stream(device)
