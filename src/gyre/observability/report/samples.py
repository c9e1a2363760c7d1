"""Samples of the report. In: samples.jsonl, which may be far larger than a page. Out: a bounded
choice of whole groups, ready for JSON, and a note of the omissions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.observability.jsonl import as_number, decode_row, read_rows
from gyre.observability.lineage import Lineage
from gyre.observability.report.story import Story, spread

MAX_TOKENS = 240_000  # shown on the page in all; about 10 bytes each
MAX_TOKENS_PER_SAMPLE = 4_000
MAX_STEPS = 60
MAX_PROMPT_CHARS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRef:
    """File offsets of the rollouts of one prompt at one step."""

    stage: str
    step: float
    group_id: str
    offsets: tuple[int, ...]  # bytes
    num_tokens: int


def samples(path: Path, lineage: Lineage, story: Story) -> dict[str, Any] | None:
    """Return the rollouts to browse. None for a run without samples."""
    groups = index_groups(path, lineage)
    if not groups:
        return None
    chosen = choose_groups(groups)
    pieces: dict[tuple[int, str], int] = {}
    steps: dict[tuple[str, float], list[dict[str, Any]]] = {}
    with path.open("rb") as file:
        for group in chosen:
            rows = []
            for offset in group.offsets:
                file.seek(offset)
                rows.append(decode_row(file.readline()) or {})
            steps.setdefault((group.stage, group.step), []).append(_group_json(group, rows, pieces))
    num_all, num_shown = sum(len(g.offsets) for g in groups), sum(len(g.offsets) for g in chosen)
    notes = []
    if num_shown < num_all:
        num_steps = len({(group.stage, group.step) for group in groups})
        notes.append(
            f"{num_shown:,} of {num_all:,} recorded rollouts are on this page, from "
            f"{len(steps):,} of {num_steps:,} "
            "steps, evenly spread; samples.jsonl has all."
        )
    return {
        "pieces": [list(piece) for piece in pieces],
        "steps": [
            {"stage": stage, "step": step, "x": story.x(stage, step), "groups": members}
            for (stage, step), members in steps.items()
        ],
        "notes": notes,
    }


def index_groups(path: Path, lineage: Lineage) -> list[GroupRef]:
    """Read the file once and return its live groups in order of time, without their text."""
    found: dict[tuple[str, float, str], tuple[list[int], list[int]]] = {}
    for offset, row in read_rows(path):
        if row is not None and lineage.is_live(row):
            step = as_number(row.get("step")) or 0.0
            key = (str(row.get("stage", "")), step, str(row.get("group_id", row["seq"])))
            offsets, sizes = found.setdefault(key, ([], []))
            offsets.append(offset)
            sizes.append(min(MAX_TOKENS_PER_SAMPLE, len(row.get("tokens") or ())))
    return [
        GroupRef(
            stage=stage, step=step, group_id=group_id, offsets=tuple(offsets), num_tokens=sum(sizes)
        )
        for (stage, step, group_id), (offsets, sizes) in found.items()
    ]


def choose_groups(
    groups: Sequence[GroupRef], *, max_tokens: int = MAX_TOKENS, max_steps: int = MAX_STEPS
) -> list[GroupRef]:
    """Choose evenly spread steps, first and last included, then whole groups within each step's
    token budget.

    Every chosen step keeps at least one group.
    """
    by_step: dict[tuple[str, float], list[GroupRef]] = {}
    for group in groups:
        by_step.setdefault((group.stage, group.step), []).append(group)
    steps = list(by_step)
    count = min(max_steps, len(steps))
    smallest = sorted(min(group.num_tokens for group in members) for members in by_step.values())
    while count > 2 and count * smallest[len(smallest) // 2] > max_tokens:
        count = max(2, count * 3 // 4)
    share = max_tokens / max(1, count)
    chosen: list[GroupRef] = []
    for step in spread(steps, count):
        left = share
        for position, group in enumerate(by_step[step]):
            if position == 0 or group.num_tokens <= left:
                chosen.append(group)
                left -= group.num_tokens
    return chosen


def _group_json(
    group: GroupRef, rows: Sequence[dict[str, Any]], pieces: dict[tuple[int, str], int]
) -> dict[str, Any]:
    prompt = str(rows[0].get("prompt", ""))
    cut = len(prompt) - MAX_PROMPT_CHARS
    return {
        "id": group.group_id,
        "prompt": prompt[:MAX_PROMPT_CHARS],
        "promptCut": max(0, cut),
        "rollouts": [_rollout_json(row, pieces) for row in rows],
    }


def _rollout_json(row: dict[str, Any], pieces: dict[tuple[int, str], int]) -> dict[str, Any]:
    tokens, texts, logprobs = (
        row.get("tokens") or [],
        row.get("pieces") or [],
        row.get("logprobs") or [],
    )
    known = min(len(tokens), len(texts))
    shown = min(known, MAX_TOKENS_PER_SAMPLE)
    pairs = [(int(tokens[at]), str(texts[at])) for at in range(shown)]
    return {
        "id": str(row.get("rollout_id", "")),
        "score": _number(row.get("score")),
        "finish": str(row.get("finish", "")),
        "parts": [_part_json(part) for part in row.get("parts") or []],
        "tokens": [pieces.setdefault(pair, len(pieces)) for pair in pairs],
        "logprobs": [_number(logprobs[at]) if at < len(logprobs) else None for at in range(shown)],
        "numTokens": len(tokens),
        # Rows without pieces still have their text.
        "text": None if known else str(row.get("completion", ""))[:MAX_PROMPT_CHARS],
    }


def _part_json(part: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(part.get("name", "")),
        "value": _number(part.get("value")),
        "weight": _number(part.get("weight")),
        "reason": str(part.get("reason", ""))[:2000],
        "outcome": str(part.get("outcome", "ok")),
    }


def _number(value: Any) -> float | None:
    number = as_number(value)
    return None if number is None or not math.isfinite(number) else round(number, 4)
