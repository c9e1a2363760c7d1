"""Run: one attempt at a run, from its folder to its report. In: a RunConfig and a folder. Out: what
the run came to.

tokenizer, model ─▶ each stage: plan, trainer, memory manager, loop ─▶ export, verified ─▶ report
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gyre.core import VERSION
from gyre.core.errors import (
    ConfigError,
    DivergedError,
    GyreError,
    InputError,
    RewardError,
    SnapshotError,
)
from gyre.core.events import Emit
from gyre.core.files import write_text
from gyre.launch.factories import (
    Facts,
    Policy,
    check_invariant,
    dtype_name,
    find_reward_model,
    make_machine,
    make_sinks,
    make_tokenizer,
    tell_ignored_keys,
    try_rewards,
)
from gyre.launch.goal import accuracy_metric, judge_goal
from gyre.launch.loop import StageInputs
from gyre.launch.placement.inline import Inline, Placement
from gyre.launch.placement.snapshots import stage_store
from gyre.launch.placement.worker_placement import Fleet, WorkerPlacement
from gyre.launch.run_folder.attempts import write_changes
from gyre.launch.run_folder.run_folder import hold, read_all_overrides, refuse_damaged
from gyre.launch.signals import StopSignals
from gyre.launch.stage_plan import plan_run, rate_remarks
from gyre.launch.stages import Stage, StageData, plan_stages, read_stage_data
from gyre.launch.train_args import MAIN, TrainArgs
from gyre.loop.ports import Observers
from gyre.loop.resume import StageProgress, from_snapshot
from gyre.observability.contradictions import ContradictionWatch
from gyre.observability.events import EventLog, count_steps, has_row, next_attempt, read_events
from gyre.observability.hardware import describe_hardware
from gyre.observability.progress.terminal import make_progress, show_measure
from gyre.observability.report.build import write_report
from gyre.observability.samples import SampleLog
from gyre.observability.spans import Spans
from gyre.planner.plan import Plan
from gyre.text.tokenizer import is_misread
from gyre.trainer.checkpoint.store import Fault, Snapshot, load
from gyre.trainer.optim.schedule import learning_rate_factor

MISREAD = (
    "transformers reads tokenizer files beside a model of this family by its own rules, so the "
    "export's would give "
    "other ids there; gyre reads them right. Leave tokenizer.path out, or take a tokenizer of "
    "this family."
)

REWARDS_LOG = "rewards.log"  # what rewards print


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyStage:
    """A stage with everything that could be refused about it behind it."""

    stage: Stage
    data: StageData
    plan: Plan


class Run:
    """One attempt at a run: its folder, log, model and scorer, and the stages that it goes
    through."""

    def __init__(
        self,
        args: TrainArgs,
        folder: Path,
        *,
        plain: bool,
        signals: StopSignals,
        fleet: Fleet | None = None,
    ) -> None:
        """Make the run. With a `fleet` the trainer and the engines are its workers."""
        config = args.config
        self._args = args
        self._config = config
        self._folder = folder
        self._stage = args.stage
        self._signals = signals
        refuse_damaged(folder)
        self._lock = hold(folder)
        self._events = EventLog(
            folder / "events.jsonl", attempt=next_attempt(folder / "events.jsonl")
        )
        has_samples = (folder / "samples.jsonl").exists()
        self._samples = SampleLog(folder / "samples.jsonl", self._events)
        self._emit = self._events.emit
        self._progress = make_progress(plain=plain, history=read_events(folder / "events.jsonl"))
        self._events.subscribe(self._progress)
        signals.close_display = self._progress.close
        self._sinks = make_sinks(config, folder, self._events)
        self._events.subscribe(
            ContradictionWatch(
                self._emit,
                temperatures=(config.rollout.temperature, config.eval.temperature),
                show=show_measure,
                history=read_events(folder / "events.jsonl"),
            )
        )
        self._spans = Spans(self._emit)
        if self._events.attempt > 1 and not has_samples:
            self._emit(
                "warn.samples_gone",
                reason="samples.jsonl was not there; those of earlier attempts are missing",
            )
        if self._lock is None:
            self._emit("warn.run_not_locked", reason="the file system knows no locks")
        self._machine = make_machine(config)
        self._placement: Placement = (
            Inline(config, folder, self._machine, self._emit)
            if fleet is None
            else WorkerPlacement(config, folder, self._machine, self._emit, fleet)
        )

    async def go(self) -> dict[str, Any]:
        """Run all stages, export and report. RunStopped when a signal asked for it and the run has
        been saved."""
        try:
            with self._signals.task():
                stages = plan_stages(self._config, self._stage)
                tokenizer = make_tokenizer(self._config, self._folder / "tokenizer", self._emit)
                policy = await self._placement.open(tokenizer)
                at, progress, found = await self._find_progress(stages)
                self._announce(stages, policy, at)
                if is_misread(tokenizer, policy.spec.family):
                    self._emit("warn.tokenizer_misread", family=policy.spec.family, reason=MISREAD)
                tell_ignored_keys(self._config, self._emit)
                version, result = 0, progress
                for ready in [await self._prepare(stage, policy) for stage in stages[at:]]:
                    last = ready.stage is stages[-1]
                    result, version = await self._run_stage(
                        ready, policy, result, found, version, last
                    )
                    found = None
                export = await self._export()
                report = self._finish(stages[-1], result, version)
                return self._result(result, version, export, report)
        except (RewardError, DivergedError):
            if self._config.observe.report:
                self._report_failure()
            raise
        finally:
            await self._placement.close()

    def _report_failure(self) -> None:
        """Write the report, which shows what failed and how often. What ended the run is the error
        to be raised."""
        try:
            write_report(self._folder)
        except InputError as error:
            self._emit("warn.report_not_written", error=error.message)

    def note_restart(self, error: GyreError, number: int) -> None:
        """Say that this attempt is there because another one ended so."""
        self._emit("retry.run_restarted", number=number, error=error.message)

    def close(self) -> None:
        self._progress.close()
        for sink in self._sinks:
            sink.close()
        self._samples.close()
        self._events.close()
        self._machine.compute.shutdown(wait=True)
        if self._lock is not None:
            os.close(self._lock)

    async def _find_progress(
        self, stages: list[Stage]
    ) -> tuple[int, StageProgress, Snapshot | None]:
        """(index of the stage to go on with, where it stands, what its trainer is restored from).
        SnapshotError if there are snapshots and none is whole."""
        faults: list[Fault] = []
        for at in range(len(stages) - 1, -1, -1):
            store = stage_store(self._config, self._folder, stages[at].name, self._emit)
            store.remove_leftovers()
            for path in reversed(store.paths()):
                if found := await self._placement.look_through(path):
                    store.skip(path, found)
                    faults.append(found[0])
                    continue
                snapshot = load(path)
                progress = from_snapshot(snapshot.state["loop"], snapshot.blobs)
                self._go_on(stages[at], progress, snapshot.state["loop"]["events"])
                return at, progress, snapshot
        if faults:
            raise SnapshotError(
                f"none of the {len(faults)} snapshots of {self._folder} is whole; the newest one: "
                f"{faults[0]}",
                hint="put the damaged files back (events.jsonl names them: snapshot.skipped), or "
                "remove "
                f"{self._folder / 'snapshots'} to begin the run anew",
            )
        progress = StageProgress(stage=stages[0].name)
        if self._events.attempt > 1:
            self._go_on(stages[0], progress, None)
        return 0, progress, None

    def _go_on(
        self, stage: Stage, progress: StageProgress, position: Mapping[str, int] | None
    ) -> None:
        """Begin another attempt, and report what it repeats and what it changes. `position` is the
        row of the log that it resumes from; None if nothing was saved."""
        args, log = self._args, self._folder / "events.jsonl"
        if progress.step > stage.trainer.steps:
            raise ConfigError(
                f"trainer.steps = {stage.trainer.steps}: the run has done {progress.step} steps "
                f"of stage {stage.name}",
                hint=f"give {progress.step} or more",
            )
        done = count_steps(read_events(log))
        if position is None:
            self._events.fence(None)
        else:
            if not has_row(log, position["attempt"], position["seq"]):
                raise SnapshotError(
                    f"{log} ends before the snapshot of step {progress.step} of stage "
                    f"{progress.stage} was taken",
                    hint=f"put the whole file back, or remove {self._folder / 'snapshots'} to "
                    "begin the run anew",
                )
            self._events.fence(
                position["attempt"], position["seq"], step=progress.step, stage=progress.stage
            )
        lost = done - count_steps(read_events(log))
        changed = {key: list(pair) for key, pair in args.changed.items()}
        self._emit(
            "run.resumed",
            stage=progress.stage,
            step=progress.step,
            lost_steps=lost,
            changed=changed,
        )
        if lost:
            self._emit(
                "warn.steps_lost", count=lost, stage=progress.stage, resumed_step=progress.step
            )
        if changed and tuple(read_all_overrides(self._folder)) != args.overrides:
            write_changes(self._folder, self._events.attempt, args.given, changed, args.config)
        if args.before is not None and stage.name == MAIN:
            before = learning_rate_factor(args.before.trainer, progress.step)
            after = learning_rate_factor(stage.trainer, progress.step)
            if before != after:
                peak = stage.trainer.learning_rate
                self._emit(
                    "warn.learning_rate_moved",
                    step=progress.step + 1,
                    before=peak * before,
                    after=peak * after,
                )

    def _announce(self, stages: list[Stage], policy: Facts | Policy, at: int) -> None:
        config = self._config
        self._emit(
            "run.started",
            name=self._folder.name,
            stages=[{"name": stage.name, "steps": stage.trainer.steps} for stage in stages],
            objective=config.objective.kind,
            model={
                "path": config.model.path,
                "family": policy.spec.family,
                "num_parameters": policy.spec.num_parameters,
            },
            seed=config.run.seed,
            gyre=VERSION,
            hardware=describe_hardware(),
            device=str(self._machine.device),
            dtype=dtype_name(self._machine),
            threads=torch.get_num_threads(),
            stage_index=at,
        )

    async def _prepare(self, stage: Stage, policy: Facts | Policy) -> ReadyStage:
        """Read, plan and try what a stage needs. Done for all stages before the first one
        trains."""
        data = await read_stage_data(
            self._config, stage, policy.tokenizer, policy.spec.context_tokens, self._emit
        )
        plan = self._plan(stage, policy, data)
        if plan.kv_pages:
            accuracy_metric(self._config)
            try_rewards(
                self._config, data.sample_prompts, policy.tokenizer, log=self._folder / REWARDS_LOG
            )
        reward = self._config.rewards.model_part()
        if reward is not None and stage.name == MAIN:
            find_reward_model(reward.path, policy)
        return ReadyStage(stage=stage, data=data, plan=plan)

    async def _run_stage(
        self,
        ready: ReadyStage,
        policy: Facts | Policy,
        progress: StageProgress,
        found: Snapshot | None,
        version: int,
        last: bool,
    ) -> tuple[StageProgress, int]:
        stage, data, plan = ready.stage, ready.data, ready.plan
        if progress.stage != stage.name:
            progress = StageProgress(stage=stage.name)
        self._emit("stage.started", stage=stage.name, steps=stage.trainer.steps, step=progress.step)
        log = self._folder / REWARDS_LOG
        built = StageInputs(self._config, self._emit, rewards_log=log)
        done = False
        try:
            placed = await self._placement.begin(stage, plan, version=version, found=found)
            parts = built.parts(
                placed, policy.tokenizer, data, self._observers(), self._signals.stop
            )
            with self._signals.heeded():
                progress = await built.loop(stage, parts).run(progress)
            version, done = self._placement.version, True
        finally:
            await built.close()
            await end_stage(self._placement, self._emit, failed=not done, last=last)
        if self._signals.stop.is_asked:
            self._emit(
                "run.stopped",
                stage=stage.name,
                step=progress.step,
                in_flight_groups=progress.num_unfinished_groups,
            )
            raise self._signals.stopped(tell_place(progress))
        self._emit("stage.done", stage=stage.name, step=progress.step, version=version)
        return progress, version

    def _plan(self, stage: Stage, policy: Facts | Policy, data: StageData) -> Plan:
        """Decide, and write down what was decided. A resumed run keeps its number of KV pages,
        however much memory is free now: with fewer of them completions are preempted, which shows
        in the last bits of what they sample."""
        path = self._folder / ("plan.json" if stage.name == MAIN else f"plan.{stage.name}.json")
        config, resumed = self._config, path.exists() or path.is_symlink()
        if resumed:
            pages = _read_plan(path).kv_pages
            config = config.model_copy(
                update={"engine": config.engine.model_copy(update={"num_pages": pages})}
            )
        dtype = dtype_name(self._machine)
        plan = plan_run(
            config,
            stage,
            policy.spec,
            data,
            dtype=dtype,
            folder=self._folder,
            share=self._placement.share,
            ranks=self._placement.ranks,
        )
        if resumed and plan.kv_pages and not self._config.engine.num_pages:
            plan = replace(plan, reasons={**plan.reasons, "kv_pages": "as in the first attempt"})
        check_invariant(config, stage, policy.spec, self._machine, plan.page_tokens)
        write_text(path, plan.to_json(), durable=False)
        for reason in rate_remarks(stage):
            self._emit("warn.learning_rate_high", stage=stage.name, reason=reason)
        self._emit(
            "plan.made",
            stage=stage.name,
            residency=plan.residency,
            kv_pages=plan.kv_pages,
            notes=list(plan.notes),
        )
        return plan

    def _observers(self) -> Observers:
        return Observers(
            events=self._events,
            samples=self._samples,
            spans=self._spans,
            sample_groups_per_step=self._config.observe.sample_groups_per_step,
        )

    async def _export(self) -> Path:
        """Write the hub layout and read it back before saying so."""
        folder = self._folder / "export"
        with self._spans.phase("export"):
            await self._placement.export(folder, self._folder / "tokenizer")
        self._emit("export.verified", folder=folder.name)
        return folder

    def _finish(self, stage: Stage, progress: StageProgress, version: int) -> Path | None:
        self._emit(
            "run.done",
            step=progress.step,
            version=version,
            evals=dict(progress.evals),
            stage=stage.name,
        )
        self._samples.sync()
        report = write_report(self._folder) if self._config.observe.report else None
        self._progress.summary(self._folder, report=report)
        return report

    def _result(
        self, progress: StageProgress, version: int, export: Path, report: Path | None
    ) -> dict[str, Any]:
        evals = {name: dict(numbers) for name, numbers in progress.evals.items()}
        return {
            "run": str(self._folder),
            "step": progress.step,
            "version": version,
            "evals": evals,
            "seconds": {
                phase: round(seconds, 3) for phase, seconds in self._spans.seconds().items()
            },
            "export": str(export),
            "report": None if report is None else str(report),
            "goal": judge_goal(self._config, self._stage, evals),
        }


def _read_plan(path: Path) -> Plan:
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, SnapshotError) as error:
        reason = error.message if isinstance(error, SnapshotError) else str(error)
        raise SnapshotError(
            f"cannot read {path}: {reason}",
            hint="put the file back; without it the run is planned anew, and with another number "
            "of KV pages the last "
            "bits of what is sampled may differ",
        ) from error


def tell_place(progress: StageProgress) -> str:
    """Describe for a person where a stopped run stands."""
    begun = (
        f"; {progress.num_unfinished_groups} groups of rollouts in flight are saved"
        if progress.num_unfinished_groups
        else ""
    )
    return f"after step {progress.step} of stage {progress.stage}{begun}"


async def end_stage(placement: Placement, emit: Emit, *, failed: bool, last: bool) -> None:
    """End the stage. After a failure its error is raised; another one on the way out is logged."""
    try:
        await placement.end(failed=failed, last=last)
    except Exception as error:
        if not failed:
            raise
        emit("warn.stage_not_closed", error=f"{type(error).__name__}: {error}")
