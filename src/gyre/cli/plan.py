"""gyre plan. In: a config, or a shape and GPUs by name. Out: sizes, batch numbers and the memory plan, with nothing
started. Caller: cli.main."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.cli.loading import loading
from gyre.core.errors import ConfigError
from gyre.runconfig import load_run_config


def run_plan(config: Path | None, overrides: list[str], *, options: Mapping[str, Any], quiet: bool) -> dict[str, Any]:
    """`options` are those of the command that were given, by the names of wire.clusters.Request."""
    settings = load_run_config(config, overrides) if config is not None else None  # refused before torch is loaded
    if not options and settings is None:
        raise ConfigError(
            "gyre plan needs RUN.toml, or --shape with --gpu", hint="gyre plan --shape qwen3-8b --gpu h200"
        )
    if options and "gpu" not in options:
        raise ConfigError(
            f"--{next(iter(options)).replace('_', '-')} is about GPUs that are named: --gpu is missing",
            hint="for example --gpus 8 --gpu h200; without these the plan is for this machine",
        )
    with loading():
        from gyre.wire.clusters import Request
        from gyre.wire.commands import plan, plan_for_gpus

    if options:
        result = plan_for_gpus(settings, Request(**{"gpus": 1, **options}))
    else:
        assert settings is not None
        result = plan(settings)
    text = result.pop("text")
    if not quiet:
        print(text)
    return result
