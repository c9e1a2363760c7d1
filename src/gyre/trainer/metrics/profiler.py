"""Profiler: a trace of one training step, by operator and kernel, on request (trainer.trace_steps).
In: the step. Out: a Chrome trace in the run folder, and an event with the longest operations.

If a trace cannot be recorded or written, a `trace.failed` event is emitted and the step continues.
A step that raises is traced too.
"""

from __future__ import annotations

import contextlib
import gzip
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gyre.core.events import Emit
from gyre.core.files import replacing
from gyre.observability.overlap import Interval, intersect, length, union

COMMUNICATION = ("nccl", "gloo:", "c10d::")  # how names of kernels, gloo's work and its calls begin
NUM_ROWS = 15
BLOCK_BYTES = 16 << 20  # that are compressed at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One kernel, or on a CPU one operator."""

    name: str
    start_s: float
    end_s: float

    @property
    def communicates(self) -> bool:
        return self.name.lower().startswith(COMMUNICATION)


@dataclass(frozen=True, slots=True)
class Tracer:
    """Traces the selected loop steps of one rank."""

    folder: Path | None  # None disables it
    steps: Collection[int]
    _: KW_ONLY
    device: torch.device
    emit: Emit
    # called between the stages of processing a trace: each may take long
    progress: Callable[[], None] = lambda: None

    def traces(self, step: int) -> bool:
        return self.folder is not None and step in self.steps

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        profiler = self._start(step) if self.traces(step) else None
        if profiler is None:
            yield
            return
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._finish(profiler, step, time.perf_counter() - started_s)

    def _start(self, step: int) -> Any:
        kinds = [ProfilerActivity.CPU] + (
            [ProfilerActivity.CUDA] if self.device.type == "cuda" else []
        )
        profiler = profile(activities=kinds)
        try:
            profiler.start()
        except RuntimeError as error:  # another profiler has the device
            self._fail(step, error)
            return None
        return profiler

    def _finish(self, profiler: Any, step: int, wall_s: float) -> None:
        assert self.folder is not None
        name = f"step-{step}.trace.json.gz"
        try:
            profiler.stop()
            self.progress()
            size_bytes = write_trace(
                profiler.export_chrome_trace, self.folder / name, self.progress
            )
            on_cuda = self.device.type == "cuda"
            summary = summarize(works_of(profiler.events(), on_cuda=on_cuda), wall_s=wall_s)
            self.progress()
            top = longest(profiler.key_averages(), on_cuda=on_cuda)
        except (OSError, RuntimeError, ValueError) as error:
            self._fail(step, error)
            return
        where = f"{self.folder.name}/{name}"
        self.emit("trace.written", step=step, file=where, size_bytes=size_bytes, **summary, top=top)

    def _fail(self, step: int, error: Exception) -> None:
        self.emit(
            "trace.failed",
            step=step,
            folder=str(self.folder),
            error=f"{type(error).__name__}: {error}"[:500],
        )


def write_trace(
    export: Callable[[str], Any], path: Path, progress: Callable[[], None] = lambda: None
) -> int:
    """Have `export` write JSON and compress it to `path`, atomically; returns the size. Raises
    OSError when the disk refuses. Raises ValueError for a truncated export, which the exporter does
    not report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_suffix(".plain")
    try:
        export(str(plain))
        check_whole(plain)
        with (
            replacing(path, durable=False) as packed,
            plain.open("rb") as source,
            gzip.open(packed, "wb", compresslevel=5) as target,
        ):
            while block := source.read(BLOCK_BYTES):
                progress()
                target.write(block)
        return path.stat().st_size
    finally:
        plain.unlink(missing_ok=True)


def check_whole(path: Path) -> None:
    """Raise ValueError unless the file ends with the end of a JSON object."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 64))
        if not file.read().rstrip().endswith(b"}"):
            raise ValueError(
                "the exported trace ends in the middle: is there room on the disk of "
                f"{path.parent}?"
            )


def works_of(events: Sequence[Any], *, on_cuda: bool) -> list[Work]:
    """Return the work of the device: kernels of a GPU, or operators and communication threads on a
    CPU."""
    wanted = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    return [
        Work(
            name=event.name, start_s=event.time_range.start / 1e6, end_s=event.time_range.end / 1e6
        )
        for event in events
        if event.device_type == wanted and not event.is_user_annotation
    ]


def summarize(works: Sequence[Work], *, wall_s: float) -> dict[str, float]:
    """Return seconds of a traced step: computing, communicating, exposed communication (without
    computation), and idle. Pure."""
    spans: dict[bool, list[Interval]] = {True: [], False: []}
    for work in works:
        spans[work.communicates].append((work.start_s, work.end_s))
    talk, compute = union(spans[True]), union(spans[False])
    hidden_s = length(intersect(talk, compute))
    busy_s = length(talk) + length(compute) - hidden_s
    return {
        "seconds": wall_s,
        "compute_s": length(compute),
        "communication_s": length(talk),
        "exposed_s": length(talk) - hidden_s,
        "idle_s": max(0.0, wall_s - busy_s),
    }


def longest(averages: Sequence[Any], *, on_cuda: bool) -> list[dict[str, Any]]:
    """Return the rows with the largest self time: name, calls, seconds."""
    key = "self_device_time_total" if on_cuda else "self_cpu_time_total"
    rows = sorted(averages, key=lambda row: -getattr(row, key))[:NUM_ROWS]
    return [
        {"name": row.key[:100], "calls": row.count, "seconds": round(getattr(row, key) / 1e6, 6)}
        for row in rows
        if getattr(row, key) > 0
    ]
