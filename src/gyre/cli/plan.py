"""gyre plan. In: a config. Out: sizes, batch numbers and the memory plan, with nothing started. Caller: cli.main."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_plan(config: Path, overrides: list[str], *, quiet: bool) -> Mapping[str, Any]:
    from gyre.wire.commands import plan

    result = plan(config, overrides)
    text = result.pop("text")
    if not quiet:
        print(text)
    return result
