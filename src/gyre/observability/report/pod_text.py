"""Pod text: the timeline of a pod in plain text. In: rows of the table and one step, as `pod.py`
makes them. Out: lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 72  # cells of a lane
IDLE = "."
# letters of the drawing
CODES = {
    "dummy_start": "D",
    "train": "T",
    "offload": "F",
    "convert": "C",
    "register": "G",
    "update": "U",
    "start": "B",
    "rollout": "R",
    "wait_rollout": "w",
    "terminate": "X",
    "onload": "O",
    "score": "S",
    "wake": "K",
    "park": "P",
}


def pod_lines(data: Mapping[str, Any]) -> list[str]:
    """Return the table and the drawing, for a terminal."""
    return [*data["table"], "", *data["drawing"]] if data["drawing"] else list(data["table"])


def table_lines(
    rows: Sequence[Mapping[str, Any]], num_steps: int, idle_s: Mapping[str, float]
) -> list[str]:
    """Return the table by activity, and what it leaves out of a step: `idle_s` by lane."""
    head = (
        *("", "activity", "lane", "steps", "median", "worst", "bytes"),
        *("behind training", "outside of steps"),
    )
    table = [head, *(_cells(row) for row in rows)]
    told = [cells for cells in table if len(cells) == len(head)]
    widths = [max(len(cells[at]) for cells in told) for at in range(len(head))]
    lines = [f"The pod: {num_steps} steps; seconds of the slowest process, bytes of all together"]
    for cells in table:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
        lines.append("  ".join(padded).rstrip())
    idle = [f"{lane} {seconds_text(seconds)}" for lane, seconds in idle_s.items()]
    return [*lines, f"None of these, in a median step: {', '.join(idle)}"] if idle else lines


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = str(row["activity"]).replace("_", " ")
    begin = (CODES[row["activity"]], name, str(row["lane"]))
    outside = seconds_text(row["outside_s"]) if row["outside_s"] else ""
    if row["absent"]:
        return (*begin, f"-      {row['absent']}" + (f", {outside}" if outside else ""))
    hidden = "" if row["hidden_s"] is None else seconds_text(row["hidden_s"])
    return (
        *begin,
        str(row["steps"]),
        seconds_text(row["median_s"]),
        f"{seconds_text(row['worst_s'])} (step {row['worst_step']}, {row['worst_worker']})",
        "" if row["bytes"] is None else bytes_text(row["bytes"]),
        hidden,
        outside,
    )


def draw_step(step: Mapping[str, Any]) -> list[str]:
    """Return one step as two lanes, of the first trainer and the first engine, a letter for each
    activity."""
    lanes = [
        next((lane for lane in step["lanes"] if lane["role"] == role), None)
        for role in ("trainer", "engine")
    ]
    shown = [lane for lane in lanes if lane is not None]
    left = max((len(lane["worker"]) for lane in shown), default=0)
    seconds = step["seconds"]
    where = f"step {step['step']}" + (f" of {step['stage']}" if step["stage"] else "")
    more = len(step["lanes"]) - len(shown)
    others = f"; {more} more processes are not drawn" if more else ""
    lines = [f"A typical step: {where}, {seconds_text(seconds)}{others}"]
    lines += [
        f"{lane['worker']:<{left}}  {draw_lane(lane['pieces'], seconds, WIDTH)}" for lane in shown
    ]
    used = dict.fromkeys(piece[0] for lane in shown for piece in lane["pieces"])
    legend = [f"{CODES[name]} {name.replace('_', ' ')}" for name in used]
    return [*lines, f"{'':<{left}}  {', '.join([*legend, f'{IDLE} none of these'])}"]


def draw_lane(pieces: Sequence[Sequence[Any]], seconds: float, width: int) -> str:
    """Return `width` letters: each cell shows what took most of it. An activity too short for a
    cell takes one from another that has more, as long as there is one."""
    cell_s = seconds / width
    shares: list[dict[str, float]] = [{} for _ in range(width)]
    for name, start_s, end_s in pieces:
        for at in range(max(0, int(start_s / cell_s)), min(width, int(end_s / cell_s) + 1)):
            covered_s = min(end_s, (at + 1) * cell_s) - max(start_s, at * cell_s)
            if covered_s > 0:
                shares[at][name] = shares[at].get(name, 0.0) + covered_s
    letters = [_most(share, cell_s) for share in shares]
    for name, start_s, end_s in pieces:
        code = CODES[name]
        if code not in letters:
            at = min(width - 1, max(0, int((start_s + end_s) / 2 / cell_s)))
            near = sorted(range(width), key=lambda cell, at=at: abs(cell - at))
            free = [c for c in near if letters[c] == IDLE or letters.count(letters[c]) > 1]
            if free:
                letters[free[0]] = code
    return "".join(letters)


def _most(share: Mapping[str, float], cell_s: float) -> str:
    idle_s = cell_s - sum(share.values())
    name = max(share, key=lambda one: share[one], default=None)
    return IDLE if name is None or idle_s > share[name] else CODES[name]


def seconds_text(seconds: float) -> str:
    """Format a duration with three digits: 0.0123 → "12.3 ms"."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.4g} s"


def bytes_text(size_bytes: int) -> str:
    """Format bytes with three digits: 1536 → "1.5 KiB"."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 999.5:
            break
        size, unit = size / 1024, larger
    return f"{size:.3g} {unit}"
