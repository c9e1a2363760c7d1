"""Traffic: what the collectives of this rank send, and how long they make it wait. In: each
collective, by its kind and tensors. Out: bytes by kind, seconds.

Bytes are those of the ring algorithms, by n ranks: a gather or a scatter of W bytes in all sends (n
- 1)/n · W, an all-reduce of W twice that, a broadcast W. The planner predicts the same
(`planner.search.speed.sent_bytes`).

On a CPU a collective makes the rank wait from the call to its end, the wait for ranks that come
later included. On a GPU the compute stream waits: between two events around the collective, or,
where that runs beside the computation, from the event at which it came to the wait to the one
behind the collective. Events are read when the device is idle anyway.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Since the last time that somebody asked."""

    bytes_by_kind: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    wait_s: float = 0.0


def ring_bytes(kind: Kind, whole_bytes: int, ranks: int) -> int:
    """Bytes that one rank sends. `whole_bytes`: of the tensor that is reduced or broadcast, of all
    slices together where it is gathered or scattered."""
    if ranks <= 1:
        return 0
    if kind == "broadcast":
        return whole_bytes
    once = whole_bytes * (ranks - 1) // ranks
    return 2 * once if kind == "all_reduce" else once


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
        """Around one whose result is waited for inside."""
        self.count(kind, whole_bytes, ranks)
        with self.waiting(device):
            yield

    @contextlib.contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Around the wait for one that was counted when it began."""
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
            return
        started_s = time.perf_counter()
        yield
        self._wait_s += time.perf_counter() - started_s

    def count(self, kind: Kind, whole_bytes: int, ranks: int) -> None:
        """Bytes alone."""
        self._bytes[kind] = self._bytes.get(kind, 0) + ring_bytes(kind, whole_bytes, ranks)

    def awaited(self, reached: Any, done: Any) -> None:
        """The computation came to a wait at the event `reached`, for what was done on another
        stream at `done`, which may have been before."""
        self._beside.append((reached, done))

    def take(self) -> Sent:
        """What came together since the last call. On a GPU the streams must have passed the last
        collective, or this waits for it."""
        wait_s = self._wait_s
        for begin, end in self._events + self._beside:
            end.synchronize()
            begin.synchronize()
            wait_s += max(0.0, begin.elapsed_time(end)) / 1e3
        sent = Sent(bytes_by_kind=MappingProxyType(self._bytes), wait_s=wait_s)
        self._bytes, self._wait_s, self._events, self._beside = {}, 0.0, [], []
        return sent
