"""Advice: the reference's strategy matrix and decision tree as text, beside what the search chose
and, where they disagree, the cost that made the difference. Pure.

In: a SearchResult. Out: lines of so many columns, and JSON-able mappings.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from gyre.memory.errors import words
from gyre.planner.report.explain import COLUMNS
from gyre.planner.search.advice import MATRIX, TREE, Advice, Advised
from gyre.planner.search.candidates import Candidate
from gyre.planner.search.search import SearchResult
from gyre.planner.search.speed import StepTime

TABLES: dict[str, Sequence[Advice]] = {"strategy matrix": MATRIX, "decision tree": TREE}
HEADS = {"strategy matrix": ": model size, GPU count, strategy"}
HERE, INDENT = "▸", "    "
TERMS = {
    "compute_s": "computation",
    "again_s": "work that is done twice",
    "waited_s": "exchanges of tensor ranks that nothing hides",
    "exposed_s": "gathers and sums of data ranks that nothing hides",
    "memory_s": "optimizer and gradient sums",
    "host_s": "copies of offloaded state",
    "switch_s": "parking and waking",
    "rollout_s": "rollouts",
}


def advice_text(choice: SearchResult, columns: int = COLUMNS) -> str:
    """Return both tables, with a mark at the line that applies and what became of it below."""
    blocks = []
    for one in choice.advised:
        rows = TABLES[one.source]
        lines = [f"  {one.source}{HEADS.get(one.source, '')}"]
        lines += [f"  {HERE if row is one.advice else ' '} {_line(row)}" for row in rows]
        told = textwrap.fill(
            verdict(choice, one), columns, initial_indent=INDENT + "→ ",
            subsequent_indent=INDENT + "  ", break_on_hyphens=False,
        )  # fmt: skip
        blocks.append("\n".join([*lines, told]))
    return "\n".join(blocks)


def _line(row: Advice) -> str:
    """Return a line in the reference's words, and whether we have what it says."""
    tables = [other for table in TABLES.values() for other in table]
    case, gpus = (max(len(getattr(other, name)) for other in tables) for name in ("case", "gpus"))
    count = f"{row.gpus:<{gpus}}  " if row.gpus else ""
    return f"{row.case:<{case}}  {count}{row.says}{'' if row.built else ' (not built)'}"


def advice_mapping(choice: SearchResult) -> list[dict[str, Any]]:
    return [
        {
            "source": one.source,
            "case": one.advice.case,
            "gpus": one.advice.gpus,
            "says": one.advice.says,
            "followed": one.followed,
            "verdict": verdict(choice, one),
        }
        for one in choice.advised
    ]


def verdict(choice: SearchResult, one: Advised) -> str:
    """Return whether the best layout is what the reference says, and if not, why."""
    best, other = choice.best, one.candidate
    if one.followed:
        return f"chosen: {best.layout.words()}"
    if other is None:
        return f"not among the layouts of {_asked(choice)}"
    if not other.fits:
        return f"does not fit: {other.layout.words()}: {short_words(other)}"
    if other.time.seconds <= best.time.seconds:
        more = words(other.device_bytes - best.device_bytes)
        return f"as fast, with {more} more per GPU: {other.layout.words()}"
    name, there, here = largest_difference(other.time, best.time)
    more = other.time.seconds / best.time.seconds - 1
    return (
        f"{more:.1%} slower, {other.layout.words()}: {name} {there:.3f} s, in the chosen "
        f"{here:.3f} s"
    )


def largest_difference(other: StepTime, best: StepTime) -> tuple[str, float, float]:
    """Return the cost term by which one layout loses most, in words, and its seconds in both."""
    name = max(TERMS, key=lambda term: getattr(other, term) - getattr(best, term))
    return TERMS[name], getattr(other, name), getattr(best, name)


def _asked(choice: SearchResult) -> str:
    gpus = choice.cluster.gpus
    given = ", ".join(f"{name} = {value}" for name, value in choice.fixed.given().items())
    return f"{gpus} GPU{'s' if gpus > 1 else ''}" + (f" with {given}" if given else "")


def short_words(candidate: Candidate) -> str:
    """Return what a layout that does not fit lacks."""
    short = []
    if candidate.short_device_bytes:
        short.append(
            f"{words(candidate.short_device_bytes)} too little at moment '{candidate.peak.name}'"
        )
    if candidate.short_host_bytes:
        short.append(f"{words(candidate.short_host_bytes)} of host memory too little")
    return " and ".join(short)
