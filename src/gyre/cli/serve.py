"""gyre serve. In: a run or model folder, where to listen. Out: a server, until it is stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.cli.answer import loading
from gyre.launch.run_folder.run_folder import find_model


def run_serve(
    target: Path, config_path: Path | None, overrides: list[str], *, as_json: bool, **given: Any
) -> Mapping[str, Any]:
    model, config = find_model(target, config_path, overrides)  # refused before torch is loaded
    with loading():
        from gyre.launch.serve import ServeArgs, serve

    name = given.pop("name") or target.resolve().name
    args = ServeArgs(folder=model, config=config, name=name, **given)
    return serve(args, as_json=as_json)
