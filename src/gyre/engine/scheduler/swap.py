"""Swap: what becomes of the KV of a preempted sequence. In: its size, what the host pool has free,
rates. Out: a Preemption: kept in host memory or computed again, whichever is predicted to be
cheaper. Pure. Also who holds which slot of the host pool.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Pairs = tuple[np.ndarray, np.ndarray] | None  # from, to; None when there is nothing to copy


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRates:
    """What the prediction goes by: planned numbers, never measured ones, so that runs repeat."""

    page_bytes: int  # of all layers
    swap_bytes_per_s: float  # between device and host, one way at a time
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """How one sequence is preempted, and what either way would cost."""

    way: Literal["swap", "recompute"]
    swap_s: float  # predicted, out and back
    recompute_s: float  # predicted
    size_bytes: int  # of its KV, one way
    lost_tokens: int  # to be computed again
    why: str  # this way


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped:
    """KV of a sequence in host memory, page by page, and what its row knew."""

    slots: np.ndarray  # int64, of the host pool
    pages: np.ndarray  # int32, where each was on the device
    # int64, of those pages: an equal stamp means that the page was not handed out since
    stamps: np.ndarray
    computed: int  # tokens
    first: int  # pages before the first kept one, out of every window
    decoding: bool
    kv_version: int  # -1 when mixed


# Of an engine without a host pool: nothing is predicted.
NO_SWAP = SwapRates(page_bytes=0, swap_bytes_per_s=1.0, prefill_tokens_per_s=float("inf"))


class PageMoves:
    """Copies that the next step must make before it computes: first all out, then all in."""

    def __init__(self) -> None:
        self._out: list[tuple[np.ndarray, np.ndarray]] = []
        self._in: list[tuple[np.ndarray, np.ndarray]] = []

    def take_out(self, pages: np.ndarray, slots: np.ndarray) -> None:
        assert not self._in, "within a step copies in come last"
        self._out.append((pages, slots))

    def bring_in(self, slots: np.ndarray, pages: np.ndarray) -> None:
        self._in.append((slots, pages))

    def collect(self) -> tuple[Pairs, Pairs]:
        """Return (pages, slots) to copy out and (slots, pages) to copy in, and forget them."""
        out, back = _join(self._out), _join(self._in)
        self._out, self._in = [], []
        return out, back


def _join(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Pairs:
    if not pairs:
        return None
    return np.concatenate([first for first, _ in pairs]), np.concatenate(
        [second for _, second in pairs]
    )


class HostSlots:
    """Allocator over the host pool's slots 0 … num_slots - 1. Low slots leave first, so that runs
    stay together."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> np.ndarray:
        assert count <= len(self._free), (count, len(self._free))
        return np.asarray([self._free.pop() for _ in range(count)], dtype=np.int64)

    def give(self, slots: np.ndarray) -> None:
        self._free += slots[::-1].tolist()
        assert len(self._free) <= self.num_slots, "a slot was given back twice"

    def check(self, owned: Iterable[np.ndarray]) -> None:
        """Assert that every slot is accounted for once, given the slots of all swapped
        sequences."""
        held = [slot for slots in owned for slot in slots.tolist()]
        assert sorted(held + self._free) == list(range(self.num_slots)), (
            "a slot leaked or is held twice"
        )


def choose_preemption(
    *, computed_tokens: int, num_pages: int, slots: HostSlots, rates: SwapRates
) -> Preemption:
    """Bytes there and back over the link's rate, against tokens over the prefill rate."""
    size_bytes = num_pages * rates.page_bytes
    swap_s = 2 * size_bytes / rates.swap_bytes_per_s
    recompute_s = computed_tokens / rates.prefill_tokens_per_s
    swap = False
    if slots.num_slots == 0:
        why = "there is no host pool (engine.kv_host_bytes)"
    elif recompute_s <= swap_s:
        why = "computing again is cheaper"
    elif num_pages > slots.num_free:
        why = (
            f"the host pool is full: {num_pages} pages to keep, {slots.num_free} of "
            f"{slots.num_slots} slots free"
        )
    else:
        swap, why = True, "swapping is cheaper"
    return Preemption(
        way="swap" if swap else "recompute",
        swap_s=swap_s,
        recompute_s=recompute_s,
        size_bytes=size_bytes,
        lost_tokens=0 if swap else computed_tokens,
        why=why,
    )
