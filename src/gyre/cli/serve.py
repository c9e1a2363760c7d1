"""gyre serve. In: a run folder, a model folder or a hub name; where to listen. Out: a server, until
it is stopped; with --dry-run, what it would take."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.cli.answer import loading
from gyre.core.errors import ConfigError
from gyre.launch.run_folder.run_folder import find_model, is_model_name
from gyre.runconfig.run_config import RunConfig

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
    revision = given.pop("revision")
    if given["follow"] is not None and is_model_name(target):
        raise ConfigError(
            f"--follow with {target}: only a folder here is looked at",
            hint="leave it out, or give a run folder or a model folder",
        )
    given["name"] = given["name"] or name_of(target)
    # refused before torch is loaded
    model, config = find_model(target, config_path, overrides, revision=revision, served=True)
    if dry_run:
        return run_dry(model, config, as_json=as_json, **given)
    with loading():
        from gyre.launch.serving.server import ServeArgs, serve

    return serve(ServeArgs(folder=model, config=config, **given), as_json=as_json)


def name_of(target: Path) -> str:
    """Return its name for clients by default: a hub name, or a folder's own name."""
    return str(target) if is_model_name(target) else target.resolve().name


def run_dry(model: Path, config: RunConfig, *, as_json: bool, **given: Any) -> Mapping[str, Any]:
    """Say what serving the model takes and bears. Nothing is started."""
    with loading():
        from gyre.launch.serving.plan import plan_serve

    columns = max(FOLDED, shutil.get_terminal_size((UNFOLDED, 24)).columns)
    name = given["name"]
    result = plan_serve(model, config, name=name, replicas=given["replicas"], columns=columns)
    text = result.pop("text")
    if not as_json:
        print(text, end="")
    return result
