"""Display of `gyre bench serve`. In: progress, a result. Out: a bar or lines on stderr; tables on
stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gyre.benchmark.records import LevelProgress as Step
from gyre.benchmark.records import LevelSummary, OnProgress, Percentiles
from gyre.benchmark.summary import ITL_DEFINITION
from gyre.benchmark.sweep import SweepResult

LINE_EVERY_S = 10.0  # where stderr is no terminal


@contextmanager
def showing_progress() -> Iterator[OnProgress]:
    """Yield what to call with progress."""
    if not sys.stderr.isatty():
        yield _Lines().show
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield _Bar(bars).show


class _Bar:
    """A bar for the level that runs."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def show(self, step: Step) -> None:
        if self._task is None:
            self._task = self._bars.add_task("")
        level = step.level
        total = level.requests or level.seconds
        done = step.ok + step.failed if level.requests else min(step.elapsed_s, level.seconds)
        self._bars.update(self._task, description=_line(step), total=total, completed=done)


class _Lines:
    """A line at each level's beginning and end, and every few seconds between."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def show(self, step: Step) -> None:
        is_first = step.ok + step.failed == 0 and not step.is_over
        if is_first or step.is_over or step.elapsed_s >= self._next_s:
            self._next_s = step.elapsed_s + LINE_EVERY_S
            print(_line(step), file=sys.stderr, flush=True)


def _line(step: Step) -> str:
    level = step.level
    of = f" of {level.requests}" if level.requests else f", {step.elapsed_s:.0f} s"
    failed = f", {step.failed} failed" if step.failed else ""
    return f"level {step.number}/{step.num_levels}, {level.name}: {step.ok} answered{of}{failed}"


def print_levels(result: SweepResult) -> None:
    """Print a column for each level, and what the numbers mean."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)
    if result.is_interrupted:
        console.print("stopped by Ctrl-C" + ("" if result.levels else ", before any level"))
    if not result.levels:
        return
    table = Table(title=Text(_printable(result.model)), title_justify="left")
    table.add_column("")
    for level in result.levels:
        table.add_column(level.name, justify="right")
    for name, *values in _rows(result.levels):
        table.add_row(name, *values)
    console.print(table)
    for level in result.levels:
        for failure, count in level.failures.items():
            detail = level.failure_details.get(failure, "")
            said = f"{level.name}: {count} failed: {failure}{detail and f' ({detail})'}"
            console.print(_printable(said))
        if level.failed_warm_up:
            console.print(f"{level.name}: {level.failed_warm_up} requests of the warm-up failed")
        if level.unfinished:
            console.print(f"{level.name}: {level.unfinished} unfinished, not counted")
        if level.without_usage:
            console.print(
                f"{level.name}: {level.without_usage} answers without usage: their tokens are "
                "not counted"
            )
    console.print(f"ITL: {ITL_DEFINITION}.")
    if result.client_max_chunks_per_s:
        console.print(
            f"This client reads at most {result.client_max_chunks_per_s:,.0f} chunks/s on one core."
        )


def _rows(levels: Sequence[LevelSummary]) -> Iterator[tuple[str, ...]]:
    """Yield a name and a text for each level."""
    yield "ok", *(str(level.ok) for level in levels)
    yield "failed", *(str(level.failed) for level in levels)
    yield "requests/s", *(f"{level.requests_per_s:.2f}" for level in levels)
    yield "output tokens/s", *(f"{level.output_tokens_per_s:,.1f}" for level in levels)
    yield "total tokens/s", *(f"{level.total_tokens_per_s:,.1f}" for level in levels)
    yield "prompt tokens", *(_mean(level.prompt_tokens, level) for level in levels)
    yield "answer tokens", *(_mean(level.completion_tokens, level) for level in levels)
    yield "tokens per chunk", *(_per_chunk(level) for level in levels)
    for name, found in (
        ("TTFT", [level.ttft for level in levels]),
        ("ITL", [level.itl for level in levels]),
        ("TPOT", [level.tpot for level in levels]),
        ("E2E", [level.e2e for level in levels]),
    ):
        yield f"{name} p50/p90/p99 ms", *map(_percentiles, found)
    yield "send delay p99 ms", *(f"{level.send_delay.p99_ms:.2f}" for level in levels)
    yield "client, of a core", *(f"{level.client_cpu_share:.0%}" for level in levels)


def _mean(tokens: int, level: LevelSummary) -> str:
    counted = level.ok - level.without_usage
    return f"{tokens / counted:.1f}" if counted else "-"


def _per_chunk(level: LevelSummary) -> str:
    return f"{level.completion_tokens / level.chunks:.2f}" if level.chunks else "-"


def _percentiles(found: Percentiles) -> str:
    if not found.count:
        return "-"
    return " / ".join(f"{value:.1f}" for value in (found.p50_ms, found.p90_ms, found.p99_ms))


def _printable(text: str) -> str:
    """Return a server's words without what moves a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
