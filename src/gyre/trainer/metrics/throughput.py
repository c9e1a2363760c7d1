"""Throughput: the trainer's speed in standard metrics. In: the work and the duration of passes and
steps. Out: machine-dependent metrics of a step, joined over the ranks.

MFU = required FLOPs of the models (models/flops.py; three forward passes' worth where there is a
backward pass, one where there is none) / (seconds × ranks × the device's data-sheet rate). Both are
counted over the step and over the evaluations since the previous step: in an RL loop the
reference's and the critic's passes are part of the work.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gyre.distributed.process_group import RankGroup
from gyre.models.flops import forward_flops
from gyre.models.spec import ModelSpec
from gyre.trainer.batching.microbatch import MicroBatch

SENT = "sent_bytes/"  # metric prefix, before the kind of collective


class ThroughputMeter:
    """Meter of one rank."""

    def __init__(self, group: RankGroup, *, tensor_ranks: int = 1) -> None:
        """Bind the ranks, of which `tensor_ranks` share the work of each micro-batch."""
        self._group = group
        self._tensor_ranks = tensor_ranks
        self._flops = self._seconds = 0.0
        self._wait_s = 0.0
        self._sent: dict[str, int] = {}

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Measure a step or an evaluation, including the device's remaining work. After a failure
        only the time counts: with a lost rank a collective may never end, so the device is not
        synchronized."""
        self._group.traffic.take()  # of a snapshot or a hand-over, which are no work of the models
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started_s
        sent = self._group.traffic.take()
        for kind, size in sent.bytes_by_kind.items():
            self._sent[kind] = self._sent.get(kind, 0) + size
        self._wait_s += sent.wait_s

    def count(
        self, spec: ModelSpec, chunks: Sequence[MicroBatch], *, scalar: bool, backward: bool
    ) -> None:
        """Count this rank's share of the passes of one model, whose whole spec it is, over the
        micro-batches. `scalar`: a value per target or a score per sequence."""
        for chunk in chunks:
            if chunk.members:  # a blank one only keeps step
                outputs = len(chunk.targets_N)
                flops = forward_flops(
                    spec,
                    chunk.layout.sequence_lengths,
                    num_outputs=outputs,
                    output_rows=1 if scalar else None,
                )
                self._flops += flops * (3 if backward else 1) / self._tensor_ranks

    def take(self, *, step_s: float) -> dict[str, Any]:
        """Return and reset this rank's measurements, for `join`; the step took `step_s`.
        JSON-able."""
        own = {
            "flops": self._flops,
            "s": self._seconds,
            "step_s": step_s,
            "wait_s": self._wait_s,
            "sent": self._sent,
        }
        self._flops, self._seconds, self._wait_s, self._sent = 0.0, 0.0, 0.0, {}
        return own


def join(
    ranks: Sequence[Mapping[str, Any]], *, num_tokens: int, peak_flops: float | None
) -> dict[str, float]:
    """Join the ranks' `take` results to metrics of a step that trained on `num_tokens`. Pure. Bytes
    and FLOPs are sums; seconds and waits are the slowest rank's. `peak_flops` of one device, per
    second in the compute dtype; None without a data sheet, which omits MFU."""
    step_s, seconds = (max(rank[key] for rank in ranks) for key in ("step_s", "s"))
    metrics = (
        {"train_tokens_per_second_per_device": num_tokens / step_s / len(ranks)}
        if step_s > 0.0
        else {}
    )
    if peak_flops and seconds > 0.0:
        metrics["mfu"] = math.fsum(rank["flops"] for rank in ranks) / (
            seconds * len(ranks) * peak_flops
        )
    if len(ranks) == 1:
        return metrics
    for kind in sorted({kind for rank in ranks for kind in rank["sent"]}):
        metrics[SENT + kind] = float(sum(rank["sent"].get(kind, 0) for rank in ranks))
    return metrics | {"communication_wait_seconds": max(rank["wait_s"] for rank in ranks)}
