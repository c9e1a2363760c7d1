"""Train arguments: what a train command asks for, read and checked whole before torch is loaded.
In: paths, overrides, a stage. Out: TrainArgs, or the refusal at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre.cluster.ray_cluster import refuse_missing_ray
from gyre.core.errors import ConfigError
from gyre.launch.goal import why_unjudged
from gyre.launch.run_folder.attempts import find_changes, read_changes, refuse_edited
from gyre.launch.run_folder.run_folder import read_overrides, read_stage
from gyre.observability.trackers import refuse_trackers
from gyre.runconfig.run_config import RunConfig, load_run_config

MAIN, COLD_START = "main", "cold_start"
STAGES = ("all", COLD_START, MAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainArgs:
    """One attempt at a run, before anything is made for it."""

    config: RunConfig
    config_path: Path  # where it was read; of a resumed run, in its folder
    overrides: tuple[str, ...]
    stage: str  # "all", COLD_START or MAIN
    resume: Path | None  # the folder of a run to go on with
    given: tuple[str, ...] = ()  # of the overrides, those that this attempt adds
    before: RunConfig | None = None  # the config of the attempt before this one
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # key: (before, now)


def read_train_args(
    config_path: Path | None,
    overrides: list[str],
    *,
    resume: Path | None,
    stage: str,
    check_goal: bool = False,
) -> TrainArgs:
    """Read the config and refuse what can be refused by it alone. A resumed run keeps its own
    overrides and stage, and `overrides` come on top, of keys that it may change; what was not
    changed is not read again."""
    given, before, changed = tuple(overrides), None, {}
    if resume is not None:
        config_path, own = resume / "config.toml", read_overrides(resume)
        stage = read_stage(resume, STAGES)
        begun = load_run_config(config_path, own)
        refuse_edited(resume, begun)
        changes = read_changes(resume)
        before = load_run_config(config_path, [*own, *changes]) if changes else begun
        overrides = [*own, *changes, *given]
    assert config_path is not None
    config = load_run_config(config_path, overrides) if given or before is None else before
    if resume is not None and before is not None:
        changed = find_changes(before, config, resume)
    if config.cluster.kind == "ray":
        refuse_missing_ray()
    refuse_trackers(config.observe)
    if stage == COLD_START and config.cold_start is None:
        raise ConfigError(
            "--stage cold_start: the config has no [cold_start]",
            hint="add the table, or run all stages",
        )
    if check_goal and (reason := why_unjudged(config, stage)):
        raise ConfigError(
            f"--check-goal has nothing to check: {reason}",
            hint="leave it out, or give what is missing",
        )
    return TrainArgs(
        config=config,
        config_path=config_path,
        overrides=tuple(overrides),
        stage=stage,
        resume=resume,
        given=given if resume is not None else (),
        before=before,
        changed=changed,
    )
