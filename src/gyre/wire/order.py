"""Order: what a train command asks for, read and checked whole before torch is loaded. In: paths, overrides, a stage.
Out: an Order, or the refusal at once. Callers: cli, wire.commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gyre.cluster.ray_cluster import refuse_missing_ray
from gyre.core.errors import ConfigError
from gyre.observe.sinks import refuse_trackers
from gyre.runconfig import RunConfig, load_run_config
from gyre.wire.folders import read_overrides
from gyre.wire.goal import why_unjudged

MAIN, COLD_START = "main", "cold_start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One attempt at a run, before anything is made for it."""

    config: RunConfig
    overrides: tuple[str, ...]
    stage: str  # "all", COLD_START or MAIN
    resume: Path | None  # the folder of a run to go on with


def read_order(
    config_path: Path | None, overrides: list[str], *, resume: Path | None, stage: str, check_goal: bool = False
) -> Order:
    """Read the config and refuse what can be refused by it alone. A resumed run keeps its own overrides and stage."""
    if resume is not None:
        config_path, overrides = resume / "config.toml", read_overrides(resume)
        stage = (resume / "stage.txt").read_text(encoding="utf-8").strip()
    assert config_path is not None
    config = load_run_config(config_path, overrides)
    if config.cluster.kind == "ray":
        refuse_missing_ray()
    refuse_trackers(config.observe)
    if stage == COLD_START and config.cold_start is None:
        raise ConfigError("--stage cold_start: the config has no [cold_start]", hint="add the table, or run all stages")
    if check_goal and (reason := why_unjudged(config, stage)):
        raise ConfigError(f"--check-goal has nothing to check: {reason}", hint="leave it out, or give what is missing")
    return Order(config=config, overrides=tuple(overrides), stage=stage, resume=resume)
