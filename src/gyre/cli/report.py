"""gyre report. In: a run folder. Out: the path of its page; of a run in a pod also the timeline of
its processes."""

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
    from gyre.observability.report.build import gather, write_report
    from gyre.observability.report.pod_text import pod_lines

    data = gather(run)
    path, pod = write_report(run, data), data["pod"]
    if not quiet:
        if pod is not None:
            print("\n".join([*pod_lines(pod), ""]))
        print(path)
    return {"report": str(path)} | ({} if pod is None else {"pod": pod})
