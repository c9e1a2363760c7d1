"""Intervals: how far a measured figure may lie from the true one. In: a share or a mean, and what
it was taken from. Out: standard errors and 95 % intervals. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.96  # standard errors on each side


def share_error(share: float, n: int) -> float | None:
    """Standard error of a share seen in n trials; None without trials."""
    return math.sqrt(max(0.0, share * (1.0 - share)) / n) if n > 0 else None


def mean_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean of independent values; None for fewer than two."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def ratio_error(totals: Sequence[float], sizes: Sequence[float]) -> float | None:
    """Standard error of sum(totals) / sum(sizes) over independent members; None for fewer than two.

    The linearised variance of a ratio estimator (Cochran 1977, "Sampling Techniques", 6.4)."""
    n, size = len(totals), math.fsum(sizes)
    if n < 2 or size <= 0.0:
        return None
    ratio = math.fsum(totals) / size
    squares = math.fsum(
        (total - ratio * own) ** 2 for total, own in zip(totals, sizes, strict=True)
    )
    return math.sqrt(n / (n - 1) * squares) / size


def normal_interval(mean: float, error: float | None) -> tuple[float, float] | None:
    """The 95 % interval of a mean by its standard error; None where that is not known."""
    return None if error is None else (mean - Z95 * error, mean + Z95 * error)


def wilson_interval(share: float | None, n: int, z: float = Z95) -> tuple[float, float] | None:
    """The 95 % interval of a share seen in n trials (Wilson 1927). None without trials."""
    if share is None or n <= 0 or not 0.0 <= share <= 1.0:
        return None
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (max(0.0, middle - half), min(1.0, middle + half))
