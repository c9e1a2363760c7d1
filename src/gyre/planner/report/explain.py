"""Explain: a plan as plain text tables — each number and what forced it, and memory by phase and
owner. Pure.

In: Plan. Out: text of so many columns where words allow.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from gyre.memory.errors import words
from gyre.planner.plan import Plan

WHERE = {"device": "", "host": " (host)", "disk": " (disk)"}
COLUMNS = 120
NARROWEST = 20  # columns that a folded cell has at least
GAP = "  "
NOTHING = "–"


def explain(plan: Plan, columns: int = COLUMNS) -> str:
    """Return the whole plan for people."""
    parts = [
        ("What runs", table(("name", "value", "why"), _machine_rows(plan), columns)),
        ("Sizes", table(("name", "value", "unit", "why"), _size_rows(plan), columns)),
        ("Memory by phase", wide_table(_phase_head(plan), _phase_rows(plan), columns)),
        (
            "Components",
            table(("name", "bytes", "leaves to", "where from"), _component_rows(plan), columns),
        ),
    ]
    text = "\n\n".join(f"{title}\n{table}" for title, table in parts)
    if plan.notes:
        text += "\n\nNotes\n" + "\n".join(f"- {note}" for note in plan.notes)
    return text + "\n"


def _machine_rows(plan: Plan) -> list[tuple[str, ...]]:
    values = {
        "objective": plan.objective,
        "device": plan.device,
        "dtype": plan.dtype,
        "threads": str(plan.threads),
        "residency": plan.residency,
        "device_budget_bytes": words(plan.device_budget_bytes),
        "host_budget_bytes": words(plan.host_budget_bytes),
        "disk_budget_bytes": words(plan.disk_budget_bytes),
    }
    return [(name, value, plan.reasons[name]) for name, value in values.items()]


def _size_rows(plan: Plan) -> list[tuple[str, ...]]:
    sizes, derived = plan.sizes, plan.derived
    product = f"{sizes.prompts_per_step} × {sizes.completions_per_prompt}"
    rows: list[tuple[str, int, str, str]] = [
        ("prompts_per_step", sizes.prompts_per_step, "prompts", ""),
        ("completions_per_prompt", sizes.completions_per_prompt, "completions", ""),
        ("sequences_per_update", sizes.sequences_per_update, "sequences", ""),
        ("tokens_per_chunk", sizes.tokens_per_chunk, "tokens", ""),
        ("sequences_per_step", derived.sequences_per_step, "sequences", product),
        (
            "updates_per_step",
            derived.updates_per_step,
            "updates",
            "sequences / sequences_per_update, times epochs",
        ),
        (
            "longest_sequence",
            derived.longest_sequence_tokens,
            "tokens",
            "longest prompt + longest completion",
        ),
        (
            "tokens_per_step, expected",
            derived.expected_tokens_per_step,
            "tokens",
            "completions half as long as allowed",
        ),
        (
            "tokens_per_step, most",
            derived.most_tokens_per_step,
            "tokens",
            "all sequences of full length",
        ),
        (
            "chunks_per_update, most",
            derived.chunks_per_update,
            "chunks",
            "whole sequences of full length per chunk",
        ),
    ]
    if plan.kv_pages:
        rows += [
            ("max_running", plan.max_running, "completions", ""),
            ("page_tokens", plan.page_tokens, "tokens", ""),
            ("kv_pages", plan.kv_pages, "pages", ""),
            ("queue, longest", derived.longest_queue, "completions", _queue_reason(plan)),
        ]
        if derived.most_sampled_per_step > derived.sequences_per_step:
            why = "1 + rollout.max_refills times the sequences of a step"
            rows.append(
                ("sampled_per_step, most", derived.most_sampled_per_step, "completions", why)
            )
    return [
        (name, f"{value:,}", unit, why or plan.reasons[name]) for name, value, unit, why in rows
    ]


def _queue_reason(plan: Plan) -> str:
    parts = plan.derived.submissions
    if parts == 1:
        return "a step's completions that wait while max_running run"
    return (
        f"the engine's queue bounds it: a step's requests are submitted in {parts:,} parts, "
        "one after the other"
    )


def _phase_head(plan: Plan) -> tuple[str, ...]:
    return ("owner", "start", *(phase.phase for phase in plan.phases))


def _phase_rows(plan: Plan) -> list[tuple[str, ...]]:
    rows, phases = [], (plan.start, *plan.phases)
    for component in plan.components:
        cells = []
        for phase in phases:
            held = {"device": phase.device, "host": phase.host, "disk": phase.disk}
            places = [tier for tier, owners in held.items() if component.name in owners]
            cells.append(words(component.size_bytes) + WHERE[places[0]] if places else NOTHING)
        rows.append((component.name, *cells))
    totals = (
        ("working memory", [phase.working_bytes for phase in phases]),
        ("device, peak", [phase.peak_device_bytes for phase in phases]),
        ("host, peak", [phase.peak_host_bytes for phase in phases]),
        ("copied on entering", [phase.moved_bytes for phase in phases]),
    )
    return rows + [(name, *(words(value) for value in values)) for name, values in totals]


def _component_rows(plan: Plan) -> list[tuple[str, ...]]:
    return [
        (
            c.name,
            words(c.size_bytes),
            " or ".join("destroyed" if t == "none" else t for t in c.leave) or NOTHING,
            c.formula,
        )
        for c in plan.components
    ]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], columns: int = COLUMNS) -> str:
    """Aligned columns under a rule. What is too wide for `columns` has its last cells folded."""
    widths = _widths(head, rows)
    room = columns - sum(len(GAP) + width for width in widths[:-1]) - len(GAP)
    widths[-1] = min(widths[-1], max(room, NARROWEST))

    def line(row: Sequence[str]) -> str:
        folded = textwrap.wrap(row[-1], widths[-1]) or [""]
        lines = [(*row[:-1], folded[0]), *((*[""] * (len(row) - 1), more) for more in folded[1:])]
        return "\n".join(
            (
                GAP + GAP.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            ).rstrip()
            for cells in lines
        )

    rule = GAP + GAP.join("─" * width for width in widths)
    return "\n".join([line(head), rule, *(line(row) for row in rows)])


def wide_table(head: Sequence[str], rows: Sequence[Sequence[str]], columns: int = COLUMNS) -> str:
    """Return a table of sizes, cut into several below each other where it is wider than `columns`.
    Each begins with the first column and leaves out rows in which it has nothing."""
    name, *widths = _widths(head, rows)
    cuts, used = [1], len(GAP) + name
    for place, width in enumerate(widths, 1):
        if used + len(GAP) + width > columns and place > cuts[-1]:
            cuts.append(place)
            used = len(GAP) + name
        used += len(GAP) + width
    if len(cuts) == 1:
        return table(head, rows, columns)
    tables = []
    for start, stop in zip(cuts, [*cuts[1:], len(head)], strict=True):
        held = [(row[0], *row[start:stop]) for row in rows if {*row[start:stop]} != {NOTHING}]
        tables.append(table((head[0], *head[start:stop]), held, columns))
    return "\n\n".join(tables)


def _widths(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
