"""gyre plan. In: a config, or a shape and GPUs by name. Out: sizes, batch numbers and the memory
plan, without starting a run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.cli.answer import loading
from gyre.core.errors import ConfigError
from gyre.launch.names import refuse_missing_names
from gyre.runconfig.run_config import load_run_config

SHAPE_ONLY = ("sequence_tokens", "update_tokens")  # a config says these itself
# columns: no text is folded below the first; the second where there is no terminal
FOLDED, UNFOLDED = 72, 120


def run_plan(
    config: Path | None, overrides: list[str], *, options: Mapping[str, Any], quiet: bool
) -> dict[str, Any]:
    """Plan from `options`, the given command-line options by the names of
    launch.plan_command.Request."""
    settings = load_run_config(config, overrides) if config is not None else None
    check_options(config, overrides, options)
    if settings is not None:
        refuse_missing_names(settings)  # before torch is loaded
    with loading():
        from gyre.launch.commands import plan, plan_for_gpus
        from gyre.launch.plan_command import PlanRequest

    columns = max(FOLDED, shutil.get_terminal_size((UNFOLDED, 24)).columns)
    if options:
        result = plan_for_gpus(settings, PlanRequest(**{"gpus": 1, "columns": columns, **options}))
    else:
        assert settings is not None
        result = plan(settings, columns=columns)
    text = result.pop("text")
    if not quiet:
        print(text)
    return result


def check_options(config: Path | None, overrides: list[str], options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options without effect: none is silently ignored."""
    if not options and config is None:
        raise ConfigError(
            "gyre plan needs RUN.toml, or --shape with --gpu",
            hint="gyre plan --shape qwen3-8b --gpu h200",
        )
    if options and "gpu" not in options:
        raise ConfigError(
            f"--{next(iter(options)).replace('_', '-')} is about GPUs that are named: --gpu is "
            "missing",
            hint="for example --gpus 8 --gpu h200; without these the plan is for this machine",
        )
    if config is None and overrides:
        raise ConfigError(
            f"--set {overrides[0]} changes a key of RUN.toml, and none is given",
            hint="give RUN.toml beside --shape, which takes the place of its model",
        )
    given = [name for name in SHAPE_ONLY if name in options]
    if config is not None and given:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is for a shape without RUN.toml: {config} says how "
            "long sequences and "
            "updates are",
            hint="leave it out, or leave RUN.toml out",
        )
