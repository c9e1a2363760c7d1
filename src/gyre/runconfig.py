"""Run config: the tree of all rooms' config models. In: a TOML file and --set overrides. Out: a frozen RunConfig, or a
ConfigError that names the key, what it got and what it accepts. Imports no torch. Callers: cli, wire, planner.
"""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from gyre.core.config import Section
from gyre.core.errors import ConfigError
from gyre.data.config import DataConfig
from gyre.engine.config import EngineConfig
from gyre.loop.config import ColdStartConfig, EvalConfig, GoalConfig, RolloutConfig, RunSection
from gyre.models.config import ModelConfig
from gyre.objectives.config import GrpoConfig, ObjectiveConfig, is_pairwise, needs_rollouts
from gyre.observe.config import ObserveConfig
from gyre.rewards.config import RewardsConfig
from gyre.text.config import TokenizerConfig
from gyre.trainer.config import SnapshotConfig, TrainerConfig
from gyre.vram.config import MemoryConfig


class RunConfig(Section):
    """A whole run. Each table belongs to one room, which documents its keys."""

    run: RunSection = Field(default_factory=RunSection)
    """Name, folder, seed, device, dtype."""
    model: ModelConfig
    """Where the policy comes from."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """Where the tokenizer comes from."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Problems, examples or pairs of the main stage."""
    objective: ObjectiveConfig = Field(default_factory=GrpoConfig)
    """What the main stage optimises."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """How the main stage updates."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Completions per step."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """The native engine."""
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    """What completions are scored by."""
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    """Budgets and tiers."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Held-out evaluation."""
    goal: GoalConfig | None = None
    """The mark that the run must reach."""
    cold_start: ColdStartConfig | None = None
    """A supervised stage before the main one."""
    cold_start_data: DataConfig | None = None
    """Examples of the cold start; without it, the worked traces of `data`."""
    snapshot: SnapshotConfig = Field(default_factory=SnapshotConfig)
    """Resumable state."""
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
    """Report and trackers."""

    @model_validator(mode="after")
    def check_together(self) -> RunConfig:
        if needs_rollouts(self.objective) and not self.rewards.parts:
            raise ValueError(
                f"objective.kind = '{self.objective.kind}' learns from rewards: name at least one [[rewards.parts]]"
            )
        if is_pairwise(self.objective) and self.trainer.sequences_per_update % 2:
            raise ValueError(
                f"trainer.sequences_per_update = {self.trainer.sequences_per_update}: pairs stay together, give an even number"
            )
        return self


def load_run_config(path: Path, overrides: list[str]) -> RunConfig:
    """Read `path`, apply overrides "a.b=c" in order, check everything."""
    return parse_run_config(apply_overrides(read_toml(path), overrides), where=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="give the path of a run's TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}", hint="see configs/ for examples") from error


def apply_overrides(tree: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Return the tree with each "a.b=c" set; c is read as TOML, or as a plain text where that fails."""
    tree = copy.deepcopy(tree)
    for override in overrides:
        key, equals, text = override.partition("=")
        path = key.strip().split(".")
        if not equals or not all(path):
            raise ConfigError(f"--set {override}: need KEY=VALUE", hint="for example --set trainer.steps=10")
        table = tree
        for name in path[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {override}: '{name}' is a value, not a table", hint="check the key's path")
        table[path[-1]] = _read_value(text.strip())
    return tree


def parse_run_config(tree: dict[str, Any], *, where: str) -> RunConfig:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        faults = [_describe(fault) for fault in error.errors()]
        raise ConfigError(
            f"{where}: " + "; ".join(faults), hint="`gyre plan` checks a config without running it"
        ) from error


def _describe(fault: Any) -> str:
    """One fault as "key = value: what is accepted"."""
    key = ".".join(str(part) for part in fault["loc"] if part not in ("sft", "rm", "dpo", "grpo", "ppo"))
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error" or isinstance(fault.get("input"), dict):
        return f"{key}: {message}" if key else message
    return f"{key} = {fault.get('input')!r}: {message}"


def _read_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
