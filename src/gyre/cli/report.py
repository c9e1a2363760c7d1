"""gyre report. In: a run folder. Out: the path of its page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.core.errors import InputError
from gyre.launch.run_folder.run_folder import why_missing


def run_report(run: Path, *, quiet: bool) -> Mapping[str, Any]:
    if not (run / "events.jsonl").is_file():
        raise InputError(
            f"{run} is not a run folder{why_missing(run) or ': it has no events.jsonl'}",
            hint="give a folder under runs/",
        )
    from gyre.observability.report.build import write_report

    path = write_report(run)
    if not quiet:
        print(path)
    return {"report": str(path)}
