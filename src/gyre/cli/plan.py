"""gyre plan. In: a config. Out: sizes, batch numbers and the memory plan, with nothing started. Caller: cli.main."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.cli.loading import loading
from gyre.runconfig import load_run_config


def run_plan(config: Path, overrides: list[str], *, quiet: bool) -> Mapping[str, Any]:
    settings = load_run_config(config, overrides)  # refused before torch is loaded
    with loading():
        from gyre.wire.commands import plan

    result = plan(settings)
    text = result.pop("text")
    if not quiet:
        print(text)
    return result
