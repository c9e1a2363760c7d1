"""Landed: runs of a version, summed as each reaches its tensor. In: pieces of buckets, the tensors
that have them. Out: whether the sums are those of the manifest. On a GPU the sums run beside the
copies of the next buckets.
"""

# N numbers of a run

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gyre.core.records import Segment, TensorEntry
from gyre.kernels.checksum import as_hex
from gyre.weights.boxes import views
from gyre.weights.manifest import segment_sum
from gyre.weights.transports.part_layout import ReadPiece

Place = tuple[str, int, tuple[int, int] | None]  # tensor, first number, columns: of a segment


class LandedSums:
    """Sums of the numbers where they are now, by segment."""

    def __init__(self) -> None:
        self._runs: list[tuple[Place, Tensor]] = []
        self._totals: dict[Place, int] | None = None

    def add(self, pieces: tuple[ReadPiece, ...], tensors: Mapping[str, Tensor]) -> None:
        """Sum pieces that have landed, without waiting for their device."""
        assert self._totals is None, "the sums were asked for"
        for piece in pieces:
            entry, segment = piece.placed.entry, piece.placed.segment
            homes = [home.reshape(-1) for home in views(tensors[entry.name], piece.run)]
            flat_N = homes[0] if len(homes) == 1 else torch.cat(homes)
            run = replace(segment, start=piece.run.start)
            self._runs.append((_place(entry, segment), segment_sum(entry, run, flat_N)))

    def match(self, entry: TensorEntry, tensor: Tensor) -> bool:
        """Return whether all segments of a tensor have their checksums. Waits for the device."""
        if self._totals is None:
            self._totals = {}
            sums = torch.stack([total for _, total in self._runs]).tolist() if self._runs else []
            for (place, _), total in zip(self._runs, sums, strict=True):
                self._totals[place] = self._totals.get(place, 0) + total
        return all(
            as_hex(self._totals.get(_place(entry, segment), 0)) == segment.checksum
            for segment in entry.segments
            if segment.checksum is not None
        )


def _place(entry: TensorEntry, segment: Segment) -> Place:
    return entry.name, segment.start, segment.columns


class CopiesInTurn:
    """The order of what happens to buckets: kept, copied over, summed. On a GPU a stream of its own
    keeps and sums, while the caller's stream copies. A bucket is summed behind the keeping of the
    next one, which that one's copy waits for."""

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[Any, Any] | None = None  # of the copies, and the other
        self._landed: tuple[Callable[[], None], Any] | None = None  # to be summed; its copy's event
        if device.type == "cuda":
            copying, beside = torch.cuda.current_stream(device), stream_for("keep and sum", device)
            beside.wait_stream(copying)
            self._streams = copying, beside

    def next(
        self, *, keep: Callable[[], None], copy: Callable[[], None], sum_up: Callable[[], None]
    ) -> None:
        """Do the three to a bucket, the last of them by the end of the next bucket or `finish`."""
        if self._streams is None:
            keep()
            copy()
            sum_up()
            return
        copying, beside = self._streams
        with torch.cuda.stream(beside):
            keep()
        copying.wait_event(beside.record_event())
        copy()
        event = copying.record_event()
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
