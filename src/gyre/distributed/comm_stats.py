"""Communication statistics: what the collectives of this rank send, and how long it waits for them.
In: each collective, by kind and tensors. Out: bytes by kind, seconds.

Bytes are those of the ring algorithms over n ranks. A gather or scatter of W bytes in total sends
(n - 1)/n · W, an all-reduce of W twice that, a broadcast W. The planner predicts the same
(`planner.search.speed.sent_bytes`). An all-to-all and a send count what leaves this rank. A graph
sends at each replay what its capture recorded (`Captured`).

On a CPU a rank waits from the call to the collective's end, including the wait for later ranks. On
a GPU the compute stream waits between two events around the collective. If the collective overlaps
the computation, the wait is from the event before the wait to the event after the collective.
Events are read when the device is idle anyway.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send"]
MOST_EVENTS = 4096  # pairs that are kept for `take`


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Traffic since the last reset."""

    bytes_by_kind: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    wait_s: float = 0.0


def ring_bytes(kind: Kind, whole_bytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends. `whole_bytes`: of the reduced or broadcast tensor, of
    all gathered or scattered slices together, or of what this rank sends to others."""
    if ranks <= 1:
        return 0
    if kind in ("broadcast", "all_to_all", "send"):
        return whole_bytes
    once = whole_bytes * (ranks - 1) // ranks
    return 2 * once if kind == "all_reduce" else once


@dataclass(slots=True)
class Captured:
    """What the collectives inside one captured graph send at each replay."""

    bytes_by_kind: dict[str, int] = field(default_factory=dict)

    def count(self, kind: Kind, whole_bytes: int, ranks: int) -> None:
        sent = ring_bytes(kind, whole_bytes, ranks)
        self.bytes_by_kind[kind] = self.bytes_by_kind.get(kind, 0) + sent


class Traffic:
    """Counter of one rank, shared by all of its groups. For the thread that runs the
    collectives."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._wait_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._beside: list[tuple[Any, Any]] = []  # likewise, of two streams

    @contextlib.contextmanager
    def collective(
        self, kind: Kind, whole_bytes: int, ranks: int, device: torch.device
    ) -> Iterator[None]:
        """Measure a block that runs a collective and waits for its result."""
        self.count(kind, whole_bytes, ranks)
        with self.waiting(device):
            yield

    @contextlib.contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Measure the wait for a collective that was counted when it started."""
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
            if len(self._events) > MOST_EVENTS:  # they were not taken for long
                self._add_reached()
            return
        started_s = time.perf_counter()
        yield
        self._wait_s += time.perf_counter() - started_s

    def _add_reached(self) -> None:
        """Add up the waits that the device has passed already."""
        left = []
        for begin, end in self._events:
            if end.query():
                self._wait_s += max(0.0, begin.elapsed_time(end)) / 1e3
            else:
                left.append((begin, end))
        self._events = left

    def count(self, kind: Kind, whole_bytes: int, ranks: int) -> None:
        """Count bytes only."""
        self._bytes[kind] = self._bytes.get(kind, 0) + ring_bytes(kind, whole_bytes, ranks)

    def replayed(self, captured: Captured) -> None:
        """Count the collectives of a graph that was replayed. Its waits are inside the graph."""
        for kind, sent in captured.bytes_by_kind.items():
            self._bytes[kind] = self._bytes.get(kind, 0) + sent

    def awaited(self, reached: Any, done: Any) -> None:
        """Record a wait: computation reached it at the event `reached`, for work on another stream
        that ended at `done`, possibly earlier."""
        self._beside.append((reached, done))

    def take(self) -> Sent:
        """Return and reset the totals. On a GPU waits for the last collective unless the streams
        have passed it."""
        wait_s = self._wait_s
        for begin, end in self._events + self._beside:
            end.synchronize()
            begin.synchronize()
            wait_s += max(0.0, begin.elapsed_time(end)) / 1e3
        sent = Sent(bytes_by_kind=MappingProxyType(self._bytes), wait_s=wait_s)
        self._bytes, self._wait_s, self._events, self._beside = {}, 0.0, [], []
        return sent
