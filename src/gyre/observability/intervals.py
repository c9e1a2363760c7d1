"""Intervals: the uncertainty of a measured figure. In: a share or a mean, and its sample. Out:
standard errors and 95 % intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.96  # standard errors on each side


def share_error(share: float, n: int) -> float | None:
    """Return the standard error of a share over n trials, or None without trials."""
    return math.sqrt(max(0.0, share * (1.0 - share)) / n) if n > 0 else None


def mean_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean of independent values, or None for fewer than two."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def ratio_error(totals: Sequence[float], sizes: Sequence[float]) -> float | None:
    """Return the standard error of sum(totals) / sum(sizes) over independent members.

    Uses the linearized variance of a ratio estimator (Cochran 1977, "Sampling Techniques", 6.4).
    Returns None for fewer than two members.
    """
    n, size = len(totals), math.fsum(sizes)
    if n < 2 or size <= 0.0:
        return None
    ratio = math.fsum(totals) / size
    squares = math.fsum(
        (total - ratio * own) ** 2 for total, own in zip(totals, sizes, strict=True)
    )
    return math.sqrt(n / (n - 1) * squares) / size


def normal_interval(mean: float, error: float | None) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean from its standard error, or None where that is unknown."""
    return None if error is None else (mean - Z95 * error, mean + Z95 * error)


def wilson_interval(share: float | None, n: int) -> tuple[float, float] | None:
    """Return the 95 % interval of a share over n trials (Wilson 1927), or None without trials."""
    if share is None or n <= 0 or not 0.0 <= share <= 1.0:
        return None
    z = Z95
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (max(0.0, middle - half), min(1.0, middle + half))
