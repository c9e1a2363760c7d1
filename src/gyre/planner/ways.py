"""Ways: what could be asked instead of what does not fit, each change alone, and words of those
that do fit. Pure.

In: changes by kind, how one is judged. Out: words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Found = TypeVar("Found")

# Settings by what their change costs: work done again, smaller passes, traffic, copies over the
# host link, switches.
CHEAPEST_FIRST = (
    "checkpointing",
    "tokens_per_chunk",
    "zero",
    "tensor_ranks",
    "engine_tensor_ranks",
    "offload_optimizer",
    "offload_gradients",
    "residency",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way(Generic[Asked, Found]):
    """One change."""

    asked: Asked  # all of it, with the change
    words: Callable[[Found], str]  # of what was found to fit with it


def ways_out(
    kinds: Iterable[Iterable[Way[Asked, Found]]], judge: Callable[[Asked], Found | None]
) -> Iterator[str]:
    """Yield the first change of each kind that fits. A kind has its smallest change first."""
    for kind in kinds:
        for way in kind:
            if (found := judge(way.asked)) is not None:
                yield way.words(found)
                break


def join_ways(ways: Iterable[str]) -> str:
    return "what fits: " + "; or ".join(ways)
