"""Report: a run folder as one self-contained page. In: RUN/events.jsonl and its neighboring files.
Out: RUN/report.html.

The page embeds its data as JSON, its style and its script. It loads nothing, and its content
security policy forbids it to. The page states which data were thinned to bound its size.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from gyre.core.errors import InputError
from gyre.core.files import write_text
from gyre.observability.events import LiveRows, count_events, is_counted, read_events, weight_of
from gyre.observability.jsonl import as_number
from gyre.observability.mismatch import find_mismatch
from gyre.observability.progress.state import CONTRADICTION, failure_of
from gyre.observability.progress.terminal import (
    contradiction_line,
    event_detail,
    over,
    show_measure,
    show_seconds,
    trace_lines,
)
from gyre.observability.report.curves import curve_panels, outcomes
from gyre.observability.report.phases import memory, overlap, roles, timeline
from gyre.observability.report.pod import pod_timeline
from gyre.observability.report.samples import samples
from gyre.observability.report.story import Story, tell

FORMAT = 1  # of the embedded data
SCRIPTS = (
    "base.js",
    "charts.js",
    "overview.js",
    "curves.js",
    "stacks.js",
    "timeline.js",
    "rollouts.js",
    "tables.js",
    "main.js",
)
MAX_FILE_CHARS = 300_000
MAX_EXAMPLES = 5  # rows shown per kind of counted event
MAX_FAILURES = 20  # kinds of failure of rewards


def write_report(run_folder: Path | str, data: Mapping[str, Any] | None = None) -> Path:
    """Write RUN/report.html and return its path. The run may be active, killed or finished. `data`
    are its own, where they have been gathered."""
    folder = Path(run_folder)
    if not (folder / "events.jsonl").is_file():
        raise InputError(
            f"{folder} has no events.jsonl, so it is not a run folder",
            hint="name a folder that `gyre train` made, such as runs/NAME",
        )
    page = render_page(gather(folder) if data is None else data)
    target = folder / "report.html"
    try:
        # a name may hold half of a character
        write_text(target, page, durable=False, errors="replace")
    except OSError as error:
        raise InputError(
            f"cannot write {target}: {error.strerror or error}; the page takes about "
            f"{len(page):,} bytes",
            hint="free space there, or make the folder writable, then: "
            f"gyre report {folder}; an older report.html is as it was",
        ) from error
    return target


def gather(folder: Path) -> dict[str, Any]:
    """Read a run folder into the data of the page: JSON-able, bounded in size."""
    rows = read_events(folder / "events.jsonl")
    story = tell(rows)
    panels, constants, curve_notes = curve_panels(story)
    return {
        "format": FORMAT,
        "run": describe_run(folder, rows, story),
        "outcomes": outcomes(story),
        "mismatches": mismatches(story),
        "contradiction": contradiction(story),
        "panels": panels,
        "constants": constants,
        "curveNotes": curve_notes,
        "timeline": timeline(story),
        "memory": memory(story),
        "overlap": overlap(story),
        "roles": roles(story),
        "pod": pod_timeline(story),
        "samples": samples(folder / "samples.jsonl", rows.lineage, story),
        "counted": counted_events(story),
        "kinds": _count_kinds(rows),
        "files": run_files(folder, story),
    }


def describe_run(folder: Path, rows: LiveRows, story: Story) -> dict[str, Any]:
    """Return the facts of the header."""
    started = _last_row(story, "run.started")
    done = _last_row(story, "run.done")
    config = read_config(folder)
    return {
        "name": str(started.get("name") or folder.resolve().name),
        "folder": folder.resolve().name,
        "objective": str(
            started.get("objective") or (config.get("objective") or {}).get("kind") or ""
        ),
        "model": describe_model(started.get("model") or config.get("model")),
        "seed": started.get("seed", config.get("seed")),
        "device": " · ".join(str(started[key]) for key in ("device", "dtype") if started.get(key)),
        "gyre": str(started.get("gyre") or gyre_version()),
        "startedAt": None
        if story.started_t is None
        else datetime.fromtimestamp(story.started_t, UTC).isoformat(),
        "seconds": round(story.seconds, 2),
        "finished": bool(done),
        "attempts": rows.lineage.num_attempts,
        "gaps": [round(gap, 1) for gap in story.gaps_s],
        "deadRows": rows.num_dead,
        "tornRows": rows.num_torn,
        "numEvents": len(rows),
        "numCounted": sum(count_events(rows).values()),
        "stages": [
            {
                "name": stage.name,
                "offset": stage.offset,
                "firstX": stage.first_x,
                "lastX": stage.last_x,
                "start": stage.start_s,
                "end": stage.end_s,
                "steps": stage.num_steps,
                "planned": stage.planned_steps,
            }
            for stage in story.stages
        ],
    }


def describe_model(model: Any) -> str:
    """Return a short description of a model given as text or as a mapping."""
    if not isinstance(model, Mapping):
        return str(model or "")
    if model.get("name"):
        return str(model["name"])
    if model.get("path"):
        return Path(str(model["path"])).name
    shape = model.get("shape") if isinstance(model.get("shape"), Mapping) else model
    assert isinstance(shape, Mapping)
    size = shape.get("num_parameters") or shape.get("parameters")
    words = [
        str(shape.get("family", "")),
        f"{size / 1e6:.1f} M parameters" if isinstance(size, int | float) else "",
    ]
    if not words[1] and shape.get("num_layers"):
        words[1] = f"{shape['num_layers']} layers, hidden {shape.get('hidden_size')}"
    return " · ".join(word for word in words if word)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.toml parsed, or {} where it is missing or malformed. Its text is shown either
    way."""
    try:
        return tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def gyre_version() -> str:
    try:
        return metadata.version("gyre-rl")
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return ""


def counted_events(story: Story) -> list[dict[str, Any]]:
    """Return each kind of fallback, drop, retry and warning with its count and a few examples.
    Similar failures of rewards are merged, with their count."""
    by_kind: dict[str, dict[str, Any]] = {}
    for told in story.told:
        if not is_counted(told.row):
            continue
        kind = told.row["kind"]
        entry = by_kind.setdefault(
            kind,
            {
                "kind": kind,
                "count": 0,
                "rows": 0,
                "first": told.time_s,
                "last": 0.0,
                "examples": [],
            },
        )
        entry["count"] += weight_of(told.row)
        entry["rows"] += 1
        entry["last"] = told.time_s
        failure = failure_of(told.row)
        alike = next(
            (e for e in entry["examples"] if failure is not None and e["failure"] == failure), None
        )
        if alike is not None:
            alike["count"] += weight_of(told.row)
        elif len(entry["examples"]) < (MAX_EXAMPLES if failure is None else MAX_FAILURES):
            detail, times = _detail(told.row), weight_of(told.row)
            example = {
                "t": told.time_s,
                "stage": told.stage,
                "detail": detail,
                "count": times,
                "failure": failure,
            }
            entry["examples"].append(example)
    for entry in by_kind.values():
        for example in entry["examples"]:
            if example.pop("failure") is not None:
                example["detail"] = f"{example['count']} ×  {example['detail']}"
            del example["count"]
    return sorted(by_kind.values(), key=lambda entry: -entry["count"])


def mismatches(story: Story) -> list[str]:
    """Return one line per stage whose engine and trainer disagree by more than rounding."""
    dtype = str(_last_row(story, "run.started").get("dtype") or "")
    steps: dict[str, list[dict[str, float]]] = {}
    for told in story.of_kind("step.done"):
        numbers = {
            name: as_number(value) for name, value in (told.row.get("metrics") or {}).items()
        }
        known = {name: value for name, value in numbers.items() if value is not None}
        steps.setdefault(told.stage, []).append(known)
    found = {stage: find_mismatch(metrics, dtype) for stage, metrics in steps.items()}
    several = len(steps) > 1
    return [
        f"Stage {stage}: {one.line}" if several else one.line
        for stage, one in found.items()
        if one is not None
    ]


def contradiction(story: Story) -> str | None:
    """Return the newest contradiction of training and held-out figures."""
    row = _last_row(story, CONTRADICTION)
    return contradiction_line(row) if row else None


def _detail(row: Mapping[str, Any]) -> str:
    if failure_of(row) is None or not row.get("reason"):
        return event_detail(row)[:1000]
    return f"{row.get('what')}: {row['reason']}"[:1000]


def run_files(folder: Path, story: Story) -> list[dict[str, Any]]:
    """Return the texts of the run's config, plan and hardware files."""
    names = [
        "config.toml",
        "overrides.json",
        *sorted(path.name for path in folder.glob("plan*.json")),
    ]
    texts = [(name, _read_text(folder / name)) for name in names]
    for told in story.of_kind("trace.written"):
        opened = "Open the file with Perfetto (ui.perfetto.dev) or chrome://tracing."
        texts.append((str(told.row.get("file")), "\n".join((opened, "", *trace_lines(told.row)))))
    started = _last_row(story, "run.started")
    if started.get("hardware"):
        machine = {
            key: started[key]
            for key in ("device", "dtype", "threads", "hardware")
            if key in started
        }
        texts.append(("machine", json.dumps(machine, indent=2, ensure_ascii=False)))
    return [
        {"name": name, "text": text[:MAX_FILE_CHARS], "cut": max(0, len(text) - MAX_FILE_CHARS)}
        for name, text in texts
        if text
    ]


def render_page(data: Mapping[str, Any]) -> str:
    """Fill the template. No data can close its script element or be taken for a placeholder."""
    style = _asset("report.css")
    script = "".join(_asset(name) for name in SCRIPTS)
    script = f'"use strict";(() => {{\n{script}\n}})();'
    assert "</script" not in script.lower(), "the page's own script must not end its element"
    run = data["run"]
    places = {
        "title": html.escape(f"{run['name']} · Gyre report"),
        "name": html.escape(run["name"]),
        "summary": html.escape(summarize(data)),
        "style": style,
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "data": embed_json(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: places[match[1]], _asset("report.html"))


def embed_json(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element: no "<", ">" or "&", no JavaScript line
    separators."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    # A lone surrogate, as from a token cut inside a character, is no UTF-8.
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def summarize(data: Mapping[str, Any]) -> str:
    """Return the run in one sentence, for readers without scripts and for previews."""
    run, results = data["run"], data["outcomes"]
    spent = f"{'in' if run['finished'] else 'so far, after'} {show_seconds(run['seconds'])}"
    if not results:
        steps = sum(stage["steps"] for stage in run["stages"])
        return f"{steps:,} steps {spent}."
    first = results[0]
    measure, newest = first["measure"], first["after"]
    after = show_measure(measure, newest["value"])
    title, n = first["title"].capitalize(), over({measure: newest["value"], **newest})
    meaning = (
        f" {measure.replace('_', ' ').capitalize()}: {first['meaning']}."
        if first["meaning"]
        else ""
    )
    if len(first["path"]) == 1:
        return f"{title} {after}{n}.{meaning}"
    return (
        f"{title} {show_measure(measure, first['before']['value'])} → {after}{n} {spent}.{meaning}"
    )


def _asset(name: str) -> str:
    return (files("gyre.observability.report") / "page" / name).read_text(encoding="utf-8")


def _last_row(story: Story, kind: str) -> Mapping[str, Any]:
    rows = story.of_kind(kind)
    return rows[-1].row if rows else {}


def _count_kinds(rows: Sequence[Mapping[str, Any]] | LiveRows) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["kind"]] = counts.get(row["kind"], 0) + 1
    return dict(sorted(counts.items()))


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # a run that was killed before it planned has none: its tab is left out
        return None
