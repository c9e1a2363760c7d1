"""Rounding: whole numbers divided and rounded up. In: ints, or arrays of them. Out: the same kind.
Torch-free.
"""

from __future__ import annotations

from typing import Any, TypeVar

Count = TypeVar("Count", bound=Any)


def ceil_div(count: Count, size: Any) -> Count:
    """Return how many pieces of `size` hold `count`."""
    return -(-count // size)


def round_up(count: Count, unit: Any) -> Count:
    """Return the smallest multiple of `unit` that is at least `count`."""
    return -(-count // unit) * unit
