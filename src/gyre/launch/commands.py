"""Commands: what each command of the command line does, as a function. In: configs, paths. Out: a
JSON-able result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre.cluster.driver_guard import RAY_ENDED, Guarded
from gyre.core.errors import ConfigError, InputError, RankError, RunStopped
from gyre.core.events import Emit
from gyre.launch.factories import (
    check_invariant,
    dtype_name,
    load_policy,
    make_engine,
    make_judge,
    make_machine,
    make_scorer,
)
from gyre.launch.placement.pod_workers import PodWorkers
from gyre.launch.placement.ray_workers import RayWorkers
from gyre.launch.placement.worker_placement import Fleet
from gyre.launch.plan_command import PlanRequest, plan_shape, plan_stages_for, read_stages
from gyre.launch.run import Run
from gyre.launch.run_folder.run_folder import make_run_folder, refuse_unusable
from gyre.launch.signals import StopSignals
from gyre.launch.stage_plan import expected_ranks, plan_run
from gyre.launch.stages import check_answers_fit, load_problems, take_held_out
from gyre.launch.train_args import TrainArgs
from gyre.loop.evaluate import Outcome
from gyre.loop.stopping import StopRequest
from gyre.models.hub.folders import refuse_reward_model
from gyre.observability.events import count_events
from gyre.planner.report.explain import explain
from gyre.runconfig.run_config import RunConfig


def train(
    args: TrainArgs,
    *,
    plain: bool,
    say_stopped: Callable[[RunStopped], None],
    guarded: Guarded | None = None,
) -> dict[str, Any]:
    """Make a run folder (or resume one), run the stages, export, report. When a rank fails, again
    from the newest snapshot, as often as `cluster.max_restarts` says. RunStopped when a signal
    ended it; `say_stopped` prints that where the process ends at once. `guarded`: the guard of a
    driver on Ray."""
    signals = StopSignals(StopRequest(deadline_s=args.config.run.stop_deadline_s), say=say_stopped)
    signals.install()
    fleet, folder = None, args.resume
    try:
        fleet = _make_fleet(args.config)
        signals.install()  # Ray has put a handler in place
        if folder is None:
            folder = _make_folder(args)
        signals.hint = f"go on with: gyre train --resume {folder}"
        ended = None
        if guarded is not None:
            guarded.tell_folder(folder)
            ended = RankError(RAY_ENDED) if guarded.number else None
        for number in range(args.config.cluster.max_restarts + 1):
            run = Run(args, folder, plain=plain, fleet=fleet, signals=signals)
            try:
                if ended is not None:
                    run.note_restart(ended, max(1, number))
                return asyncio.run(run.go())
            except RankError as error:
                if signals.signum:
                    raise signals.stopped(f"while a rank was lost: {error.message}") from error
                ended = error
            finally:
                run.close()
        assert ended is not None
        raise ended
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise signals.stopped() from None
    except OSError as error:
        refuse_unusable(error, folder)
        raise
    finally:
        if fleet is not None:
            asyncio.run(fleet.close())
        signals.uninstall()


def _make_fleet(config: RunConfig) -> Fleet | None:
    """Return where the workers of a run are, or None for one that has none."""
    match config.cluster.kind:
        case "inline":
            return None
        case "ray":
            return RayWorkers(config)
        case "pod":
            return PodWorkers(config)


def _make_folder(args: TrainArgs) -> Path:
    try:
        return make_run_folder(args.config, args.config_path, list(args.overrides), args.stage)
    except OSError as error:
        raise InputError(
            f"no run folder can be made under {args.config.run.folder}: {error.strerror or error}",
            hint="free space there, or set run.folder to a folder that can be written",
        ) from error


def evaluate(model: Path, config: RunConfig, *, num_problems: int) -> dict[str, Any]:
    """Accuracy or mean reward of a model folder on held-out problems; "counted": what fell back or
    was dropped."""
    refuse_reward_model(model)
    if all(part.kind == "model" for part in config.rewards.parts):
        raise ConfigError(
            "gyre eval scores generated answers, and the config has no rule reward to score them "
            "by",
            hint='add one: [[rewards.parts]] kind = "answer"',
        )
    machine = make_machine(config)
    events: list[dict[str, Any]] = []
    emit: Emit = lambda kind, **fields: events.append({"kind": kind, **fields})  # noqa: E731
    policy = load_policy(model, machine, end_token=config.tokenizer.end_token)
    found = load_problems(config, policy.tokenizer, policy.spec.context_tokens, emit)
    key = "--problems" if num_problems else "eval.num_problems"
    num = num_problems or config.eval.num_problems or max(1, len(found.held_out))
    prompts = take_held_out(found.held_out, num, found.source, key)
    check_answers_fit(config, prompts, policy.spec.context_tokens)

    async def go() -> Outcome:
        engine = make_engine(config.engine, policy, machine, emit)
        scorer = make_scorer(config, emit)
        try:
            await engine.start(dummy=False)
            judge = make_judge(config, engine, scorer, policy.tokenizer, emit)
            return await judge.run(prompts)
        finally:
            await scorer.close()
            await engine.terminate()

    outcome = asyncio.run(go())
    machine.compute.shutdown()
    return {
        "metric": outcome.metric,
        "value": outcome.value,
        "n": outcome.n,
        "standard_error": outcome.standard_error,
        "interval": None if outcome.interval is None else list(outcome.interval),
        "meaning": outcome.meaning,
        "detail": outcome.detail,
        "source": found.source,
        "counted": count_events(events),
    }


def plan(config: RunConfig, *, columns: int) -> dict[str, Any]:
    """Sizes, batch numbers and memory of each stage, as text of so many columns and as JSON. Starts
    nothing; reads data and tokenizer."""
    machine = make_machine(config)
    machine.compute.shutdown()
    spec, stages = read_stages(config)
    plans = {}
    for stage, data in stages:
        made = plan_run(
            config,
            stage,
            spec,
            data,
            dtype=dtype_name(machine),
            folder=Path(config.run.folder) / config.run.name,
            ranks=expected_ranks(config),
        )
        check_invariant(config, stage, spec, machine, made.page_tokens)
        plans[stage.name] = made
    return {
        "text": "\n".join(
            f"== {name} ==\n\n{explain(made, columns)}" for name, made in plans.items()
        ),
        "stages": {name: json.loads(made.to_json()) for name, made in plans.items()},
        "model": {"family": spec.family, "num_parameters": spec.num_parameters},
    }


def plan_for_gpus(config: RunConfig | None, request: PlanRequest) -> dict[str, Any]:
    """Lay each stage out on GPUs that need not be here, with the checklists. Starts nothing."""
    if config is None:
        return plan_shape(request)
    spec, stages = read_stages(config)
    return plan_stages_for(config, spec, stages, request)
