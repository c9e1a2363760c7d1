"""gyre score. In: a config or run folder, and a JSONL file of completions. Out: the value, reason
and time of each reward on each completion."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gyre.core.errors import InputError
from gyre.core.records import Score, ScorePart

if TYPE_CHECKING:
    from gyre.launch.score import Scored

MOST_TEXT_CHARS = 300  # of a completion that is shown
COLORS = {"ok": "green", "timeout": "yellow", "error": "red", "invalid": "red"}


def run_score(
    target: Path, completions: Path, overrides: list[str], *, quiet: bool
) -> Mapping[str, Any]:
    if not completions.is_file():
        state = "is no file" if completions.exists() else "does not exist"
        raise InputError(
            f"{completions} {state}",
            hint='give a JSONL file of {"completion": …, "answer": …, …} rows',
        )
    from gyre.launch.score import read_score_order, score_file

    config, tokenizer = read_score_order(target, overrides)
    scored = score_file(config, completions, tokenizer=tokenizer)
    for note in scored.notes:
        print(note, file=sys.stderr)
    if not quiet:
        show(scored, Console())
    return {"rows": [{"total": score.value, "parts": _parts(score)} for score in scored.scores]}


def show(scored: Scored, console: Console) -> None:
    """Print one block per completion."""
    for where, completion, score in zip(
        scored.wheres, scored.completions, scored.scores, strict=True
    ):
        console.rule(
            Text(f"{where}  total {score.value:.4g}", style="bold"), align="left", characters="─"
        )
        text = (
            completion if len(completion) <= MOST_TEXT_CHARS else f"{completion[:MOST_TEXT_CHARS]}…"
        )
        console.print(Text(text or "(empty)", style="dim"))
        console.print(_table(score))
        console.print()
    mean = sum(score.value for score in scored.scores) / len(scored.scores)
    failed = sum(part.outcome != "ok" for score in scored.scores for part in score.parts)
    said = (
        f"{len(scored.scores)} completion{'s' if len(scored.scores) > 1 else ''}, mean total "
        f"{mean:.4g}"
    )
    console.print(
        Text(
            said + (f", {failed} check{'s' if failed > 1 else ''} failed" if failed else ""),
            style="bold",
        )
    )


def _table(score: Score) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=False)
    table.add_column("part", no_wrap=True, max_width=20)
    for name in ("value", "weight", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for part in score.parts:
        outcome = Text(part.outcome, style=COLORS[part.outcome])
        seconds = (
            f"{part.seconds:.2f} s" if part.seconds >= 1.0 else f"{part.seconds * 1000:.1f} ms"
        )
        numbers = f"{part.value:.4g}", f"{part.weight:.4g}", seconds
        table.add_row(Text(part.name), *numbers, outcome, Text(part.reason))
    return table


def _parts(score: Score) -> dict[str, Any]:
    return {part.name: _part(part) for part in score.parts}


def _part(part: ScorePart) -> dict[str, Any]:
    return {
        "value": part.value,
        "outcome": part.outcome,
        "reason": part.reason,
        "seconds": round(part.seconds, 6),
    }
