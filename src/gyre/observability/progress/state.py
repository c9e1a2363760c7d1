"""Live state: what the terminal shows of a run. In: event rows, one by one. Out: a LiveState. Pure:
times are those of the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gyre.observability.events import is_counted, weight_of
from gyre.observability.jsonl import as_number
from gyre.observability.metric_catalog import pick

HISTORY_STEPS = 64  # steps that the sparklines and the estimate of time left look back on
PACE_STEPS = 16
ROLES = ("seconds", "collector_idle_s", "learner_idle_s", "synchronous_s")
CONTRADICTION = "warn.figures_contradict"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """The state of a run so far."""

    name: str = ""
    # unix time of the first row; later by what passed between attempts
    started_t: float | None = None
    now_t: float = 0.0  # unix time of the newest row
    stages: tuple[tuple[str, int], ...] = ()  # (name, steps), in order; steps 0 where unknown
    stage: str = ""
    step: int = 0  # newest finished step of the stage
    steps: int = 0  # of the stage; 0 where unknown
    phase: str = ""
    phase_started_t: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the newest step
    step_ends: tuple[tuple[int, float], ...] = ()  # (step, unix time) of the stage's newest steps
    rewards: tuple[float, ...] = ()
    # by name, in order
    evals: Mapping[str, tuple[dict[str, Any], ...]] = field(default_factory=dict)
    # fallbacks, drops, retries and warnings by kind
    counted: Mapping[str, int] = field(default_factory=dict)
    last_counted: str = ""
    # of rewards: how often each kind was met, by what it is
    failures: Mapping[str, int] = field(default_factory=dict)
    # seconds by field of step.roles, over the whole run
    roles: Mapping[str, float] = field(default_factory=dict)
    contradiction: Mapping[str, Any] | None = None  # the newest warn.figures_contradict row
    done: Mapping[str, Any] | None = None  # the run.done row

    @property
    def num_counted(self) -> int:
        return sum(self.counted.values())

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds per step over the newest steps of this stage."""
        recent = self.step_ends[-PACE_STEPS:]
        if len(recent) < 2 or recent[-1][0] <= recent[0][0]:
            return None
        return (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds to the end of this stage. None without a pace."""
        pace = self.seconds_per_step
        return pace * max(0, self.steps - self.step) if pace is not None and self.steps else None

    @property
    def position(self) -> tuple[int, int]:
        """(number of this stage from 1, number of stages)."""
        names = [name for name, _ in self.stages]
        return (names.index(self.stage) + 1 if self.stage in names else 1, max(1, len(names)))


def advance(state: LiveState, row: Mapping[str, Any]) -> LiveState:
    """Return the state after one more row."""
    kind = row["kind"]
    if state.started_t is None:
        state = replace(state, started_t=row["t"])
    elif kind == "attempt.started":
        away_s = max(0.0, row["t"] - state.now_t)
        state = replace(
            state, started_t=(state.started_t or 0.0) + away_s, step_ends=(), phase="", done=None
        )
    state = replace(state, now_t=row["t"])
    if is_counted(row):
        counted = {**state.counted, kind: state.counted.get(kind, 0) + weight_of(row)}
        state = replace(state, counted=counted, last_counted=kind)
    if (failure := failure_of(row)) is not None:
        times = state.failures.get(failure, 0) + weight_of(row)
        state = replace(state, failures={**state.failures, failure: times})
    if kind == CONTRADICTION:
        return replace(state, contradiction=dict(row))
    if kind == "step.roles":
        seconds = {name: as_number(row.get(name)) or 0.0 for name in ROLES}
        roles = {name: state.roles.get(name, 0.0) + value for name, value in seconds.items()}
        return replace(state, roles=roles)
    if kind == "run.started":
        return replace(state, name=str(row.get("name", "")), stages=read_stages(row.get("stages")))
    if kind == "stage.started":
        return _start_stage(state, row)
    if kind == "phase.started" and row.get("depth", 0) == 0:
        return replace(state, phase=str(row.get("phase", "")), phase_started_t=row["t"])
    if kind == "phase.ended" and row.get("depth", 0) == 0 and row.get("phase") == state.phase:
        return replace(state, phase="")
    if kind == "step.done":
        return _finish_step(state, row)
    if kind == "eval.done":
        name = str(row.get("name", "eval"))
        return replace(state, evals={**state.evals, name: (*state.evals.get(name, ()), dict(row))})
    if kind == "run.done":
        return replace(state, done=dict(row), phase="")
    return state


def failure_of(row: Mapping[str, Any]) -> str | None:
    """Return the kind of reward failure that a row reports, equal for all failures of one kind.
    None for other rows."""
    if row["kind"] != "warn.reward_failed":
        return None
    return f"{row.get('what')}: {row['failure']}" if row.get("failure") else str(row.get("what"))


def read_stages(value: Any) -> tuple[tuple[str, int], ...]:
    """Read the `stages` of run.started: names, or mappings with name and steps."""
    stages = []
    for item in value or ():
        if isinstance(item, Mapping):
            stages.append((str(item.get("name", "")), int(item.get("steps") or 0)))
        else:
            stages.append((str(item), 0))
    return tuple(stages)


def _start_stage(state: LiveState, row: Mapping[str, Any]) -> LiveState:
    stage = str(row.get("stage", ""))
    stages = (
        state.stages
        if any(name == stage for name, _ in state.stages)
        else (*state.stages, (stage, 0))
    )
    return replace(
        state,
        stage=stage,
        stages=stages,
        step=int(row.get("step") or 0),
        steps=int(row.get("steps") or dict(stages)[stage]),
        step_ends=(),
        rewards=(),
        metrics={},
    )


def _finish_step(state: LiveState, row: Mapping[str, Any]) -> LiveState:
    stage = str(row.get("stage", state.stage))
    if stage != state.stage:
        state = _start_stage(state, {"stage": stage, "t": row["t"]})
    numbers = {name: as_number(value) for name, value in (row.get("metrics") or {}).items()}
    metrics = {name: value for name, value in numbers.items() if value is not None}
    reward = pick(metrics, "reward")
    step = int(row.get("step") or 0)
    return replace(
        state,
        step=step,
        metrics=metrics,
        step_ends=(*state.step_ends, (step, row["t"]))[-HISTORY_STEPS:],
        rewards=state.rewards if reward is None else (*state.rewards, reward)[-HISTORY_STEPS:],
    )
