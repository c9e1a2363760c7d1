"""gyre train. In: a config or a run folder to go on with. Out: what the run came to. Caller: cli.main."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.cli.loading import loading
from gyre.core.errors import ConfigError
from gyre.wire.names import refuse_missing_names
from gyre.wire.order import read_order

STAGES = ("all", "cold_start", "main")


def run_train(
    config: Path | None,
    overrides: list[str],
    *,
    resume: Path | None,
    stage: str,
    check_goal: bool,
    plain: bool,
    quiet: bool,
) -> Mapping[str, Any]:
    if stage not in STAGES:
        raise ConfigError(f"--stage {stage}: accepted are {', '.join(STAGES)}", hint="leave it out to run them all")
    if (config is None) == (resume is None):
        raise ConfigError(
            "gyre train needs a config, or --resume RUN, and not both",
            hint="gyre init writes one: gyre train my_run.toml",
        )
    if resume is not None and (overrides or stage != "all"):
        raise ConfigError(
            "--resume goes on with the run as it was",
            hint="leave out --set and --stage; to change keys, begin a new run with them: "
            f"gyre train {resume / 'config.toml'} --set KEY=VALUE (with model.path={resume / 'export'}, once it is "
            "there, from the weights that this one came to)",
        )
    order = read_order(config, overrides, resume=resume, stage=stage, check_goal=check_goal)
    refuse_missing_names(order.config)  # before torch is loaded
    with loading():
        from gyre.wire.commands import train

    result = train(config, overrides, resume=resume, stage=stage, plain=plain)
    goal = result.get("goal")
    if goal is not None and not quiet:
        print(goal["verdict"], file=sys.stderr)
    missed = check_goal and (goal is None or not goal["reached"])  # what nobody judges was refused above
    return {**result, "goal_missed": True} if missed else result
