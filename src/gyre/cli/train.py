"""gyre train. In: a config, or a run folder to resume. Out: the result of the run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gyre.cli.answer import loading, say_stopped
from gyre.cluster.driver_guard import guard_driver
from gyre.core.errors import ConfigError
from gyre.launch.names import refuse_missing_names
from gyre.launch.train_args import STAGES, read_train_args


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
        raise ConfigError(
            f"--stage {stage}: accepted are {', '.join(STAGES)}",
            hint="leave it out to run them all",
        )
    if (config is None) == (resume is None):
        raise ConfigError(
            "gyre train needs a config, or --resume RUN, and not both",
            hint="gyre init writes one: gyre train my_run.toml",
        )
    if resume is not None and stage != "all":
        raise ConfigError(
            f"--stage {stage}: --resume goes on with the stages that the run was begun with",
            hint="leave out --stage",
        )
    args = read_train_args(config, overrides, resume=resume, stage=stage, check_goal=check_goal)
    refuse_missing_names(args.config)  # before torch is loaded
    guarded = None
    if args.config.cluster.kind == "ray":
        guarded = guard_driver(args.config.cluster.max_restarts)
        # Ray ended a driver that had made the folder or noted its changes there: read them anew
        if guarded.folder is not None:
            given = overrides if resume is not None else []
            args = read_train_args(None, given, resume=guarded.folder, stage="all")
    try:
        with loading():
            from gyre.launch.commands import train

        say = partial(say_stopped, as_json=quiet)
        result = train(args, plain=plain, say_stopped=say, guarded=guarded)
    finally:
        if guarded is not None:
            guarded.tell_end()
    goal = result.get("goal")
    if goal is not None and not quiet:
        print(goal["verdict"], file=sys.stderr)
    # a check of a run without a goal was refused above
    missed = check_goal and (goal is None or not goal["reached"])
    return {**result, "goal_missed": True} if missed else result
