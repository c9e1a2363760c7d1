"""gyre serve. In: a run or model folder, where to listen. Out: a server, until it is stopped; with
--dry-run, what it would take."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.cli.answer import loading
from gyre.launch.run_folder.run_folder import find_model
from gyre.runconfig import RunConfig

# columns of the text: no cell is folded below the first; the second where there is no terminal
FOLDED, UNFOLDED = 72, 120


def run_serve(
    target: Path,
    config_path: Path | None,
    overrides: list[str],
    *,
    as_json: bool,
    dry_run: bool = False,
    **given: Any,
) -> Mapping[str, Any]:
    model, config = find_model(target, config_path, overrides)  # refused before torch is loaded
    if dry_run:
        return run_dry(target, model, config, as_json=as_json, **given)
    with loading():
        from gyre.launch.serving.server import ServeArgs, serve

    name = given.pop("name") or target.resolve().name
    args = ServeArgs(folder=model, config=config, name=name, **given)
    return serve(args, as_json=as_json)


def run_dry(
    target: Path, model: Path, config: RunConfig, *, as_json: bool, **given: Any
) -> Mapping[str, Any]:
    """Say what serving the model takes and bears. Nothing is started."""
    with loading():
        from gyre.launch.serving.plan import plan_serve

    columns = max(FOLDED, shutil.get_terminal_size((UNFOLDED, 24)).columns)
    name = given["name"] or target.resolve().name
    result = plan_serve(model, config, name=name, replicas=given["replicas"], columns=columns)
    text = result.pop("text")
    if not as_json:
        print(text, end="")
    return result
