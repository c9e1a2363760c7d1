"""Trackers: curves for TensorBoard and W&B. In: event rows. Out: TensorBoard files, W&B runs.

Both show `step.done` as METRIC and `eval.done` as eval/NAME/METRIC. They show the seconds of a
phase as phase_seconds/PHASE and device memory by owner as memory_bytes/PHASE/OWNER. Stages are
separate; of a run's workers only the first is shown. Neither package is imported unless it is
configured.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from gyre.core.errors import ConfigError
from gyre.core.events import Emit
from gyre.observability.config import ObserveConfig
from gyre.observability.events import RESERVED, StageTracker
from gyre.observability.jsonl import as_number
from gyre.observability.tracing.otlp_sender import read_endpoint

FIRST_WORKER = "worker-0"  # all workers of a run do the same


class Tracker(Protocol):
    """Where the rows of a run are shown as they come."""

    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def refuse_trackers(config: ObserveConfig) -> None:
    """Raise ConfigError for a tracker that cannot work here. Called before a run allocates
    anything."""
    if config.otlp_endpoint:
        read_endpoint(config.otlp_endpoint, "observe.otlp_endpoint")
    for package, is_asked, asked_by in (
        ("tensorboard", config.tensorboard, "observe.tensorboard = true"),
        ("wandb", config.wandb != "off", f'observe.wandb = "{config.wandb}"'),
    ):
        if is_asked and importlib.util.find_spec(package) is None:
            raise missing_package(package, asked_by)
    if config.wandb == "online" and config.wandb_without_login == "error" and not is_logged_in():
        raise ConfigError(
            'observe.wandb = "online": nobody is logged in to W&B on this machine',
            hint='run `wandb login` or set WANDB_API_KEY; or set observe.wandb = "offline" and '
            "sync later, or "
            'observe.wandb_without_login = "offline" to fall back to that',
        )


def is_logged_in() -> bool:
    """Return whether W&B has credentials in the environment, its settings or netrc. Never prompts,
    and contacts no server."""
    import wandb

    return bool(wandb.login(prompt=False, verify=False))


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one row by name, without its stage; empty for a row without a curve."""
    if row["kind"] == "step.done":
        numbers = {name: as_number(value) for name, value in (row.get("metrics") or {}).items()}
    elif row["kind"] == "eval.done":
        detail = row.get("detail")
        fields = {**(detail if isinstance(detail, Mapping) else {}), **row}
        own = {
            name: value
            for name, value in fields.items()
            if name not in RESERVED | {"step", "name", "stage"}
        }
        numbers = {
            f"eval/{row.get('name', 'eval')}/{name}": as_number(value)
            for name, value in own.items()
        }
    elif row["kind"] == "phase.ended" and row.get("depth") == 0 and "step" in row:
        numbers = {f"phase_seconds/{row.get('phase')}": as_number(row.get("seconds"))}
    elif row["kind"] == "memory" and row.get("worker", FIRST_WORKER) == FIRST_WORKER:
        held = {owner: tiers.get("device") for owner, tiers in (row.get("owners") or {}).items()}
        numbers = {
            f"memory_bytes/{row.get('phase')}/{owner}": as_number(size)
            for owner, size in held.items()
        }
        numbers[f"memory_bytes/{row.get('left')}/peak"] = as_number(row.get("device_peak_bytes"))
    else:
        return {}
    return {name: value for name, value in numbers.items() if value is not None}


class TensorBoardSink:
    """Writes event files with tensorboard's own writer, so that torch is not needed. Each stage has
    its own folder: steps restart per stage, and a resume makes TensorBoard discard all later steps
    of a folder."""

    def __init__(self, folder: Path | str):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise missing_package("tensorboard", "observe.tensorboard = true") from error
        self._events: Any = event_pb2  # its classes are made at run time
        self._summaries: Any = summary_pb2
        self._open = EventFileWriter
        self._folder = Path(folder)
        self._writers: dict[str, Any] = {}
        self._stages = StageTracker()

    def write(self, row: Mapping[str, Any]) -> None:
        stage = self._stages.stage(row)
        if (
            row["kind"] == "attempt.started"
            and row.get("stage")
            and isinstance(row.get("step"), int)
        ):
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer(stage).add_event(
                self._events.Event(wall_time=row["t"], step=row["step"] + 1, session_log=start)
            )
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in scalars(row).items()
        ]
        if values:
            summary = self._summaries.Summary(value=values)
            step = int(row.get("step") or 0)
            self._writer(stage).add_event(
                self._events.Event(wall_time=row["t"], step=step, summary=summary)
            )

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _writer(self, stage: str) -> Any:
        if stage not in self._writers:
            self._writers[stage] = self._open(str(self._folder / stage))
        return self._writers[stage]


class WandbSink:
    """One W&B run per attempt, grouped by run. Offline runs stay in FOLDER/wandb until `wandb
    sync`. An online run without a login does too, and an event reports it.

    W&B's own process writes the files, possibly shortly after `close` returned.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        project: str,
        name: str,
        mode: Literal["offline", "online"] = "offline",
        config: Mapping[str, Any] | None = None,
        attempt: int = 1,
        emit: Emit | None = None,
    ):
        try:
            import wandb
            from wandb.errors import Error as WandbError
        except ImportError as error:
            raise missing_package("wandb", f'observe.wandb = "{mode}"') from error
        Path(folder).mkdir(parents=True, exist_ok=True)
        # asked now, since W&B would ask at the terminal
        if mode == "online" and not is_logged_in():
            mode = "offline"
            if emit is not None:
                emit("fallback.wandb_offline", reason="nobody is logged in to W&B", folder="wandb")
        try:
            self._run = wandb.init(
                project=project,
                name=name if attempt == 1 else f"{name} (attempt {attempt})",
                group=name,
                dir=str(folder),
                mode=mode,
                config=dict(config or {}),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except WandbError as error:
            raise ConfigError(
                f'observe.wandb = "{mode}": W&B cannot begin a run: {error}',
                hint='check the network and `wandb login`, or set observe.wandb = "offline" and '
                "sync later",
            ) from error
        self._stages = StageTracker()
        self._defined: set[str] = set()

    def write(self, row: Mapping[str, Any]) -> None:
        stage = self._stages.stage(row)
        values = {
            f"{stage}/{name}": value for name, value in scalars(row).items() if math.isfinite(value)
        }
        if not values or self._run is None:
            return
        if stage not in self._defined:
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
            self._defined.add(stage)
        self._run.log({**values, f"{stage}/step": int(row.get("step") or 0)})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def missing_package(package: str, asked_by: str) -> ConfigError:
    return ConfigError(
        f"{asked_by} needs the package {package}, which is not installed",
        hint="install the extra with: pip install 'gyre-rl[track]'   (or switch the setting off)",
    )
