"""What tests read back from the logs of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre.observability.jsonl import read_rows
from gyre.observability.lineage import Lineage
from gyre.observability.metric_catalog import MEASURED, matches


def is_measured(metric: str) -> bool:
    """Whether a metric is one of MEASURED."""
    return any(matches(pattern, metric) for pattern in MEASURED)


def read_samples(path: Path, lineage: Lineage) -> Iterator[dict[str, Any]]:
    """The live samples in order. `lineage` is that of the run's events."""
    for _, row in read_rows(path):
        if row is not None and lineage.is_live(row):
            yield row
