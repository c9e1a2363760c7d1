"""The ring. In: parts that satisfy the contracts. Out: a policy that was rolled out, scored, trained and handed back.

    source.take ─▶ Collector ─Request─▶ engine            phase rollout   engine on the device
        ▲             │  ◀─TokenChunk──┘   ▲                              (rule rewards run from the first one on)
        │             ▼                    │
        │        Scoring ◀─ rollouts       │              phase score      reference, reward model, critic
        │             │                    │
        │             ▼                Handover           phase handover   weights to the engine
        │        assemble ─TrainBatch─▶ trainer.step      phase train      actor, optimiser, critic
        │                                  │
        └──────── snapshot ◀───────────────┘              between steps: evaluation, snapshot

One step runs at a time, and each phase waits for the one before it: nothing is stale. Who waits for what:
  Collector.run   waits for the engine's last chunk         woken by the engine's pump    rollout.deadline_s
  Scoring.finish  waits for the scorer's last answer        woken by reward workers       rollout.reward_deadline_s
  trainer.step    waits for the compute thread              woken by it                   none: it is our own work
Caller: wire.run_stage.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from gyre.core.records import Group, StepReport
from gyre.loop.assemble import (
    Assembled,
    Passes,
    add_part,
    assemble,
    bare_batch,
    failed_parts,
    reward_metrics,
)
from gyre.loop.collect import Collector, InFlight, as_group, open_groups, split_whole
from gyre.loop.config import EvalConfig, RolloutConfig
from gyre.loop.evaluate import Outcome, Rollouts
from gyre.loop.handover import Handover
from gyre.loop.ports import Parts, StageSpec
from gyre.loop.resume import Progress, to_snapshot
from gyre.loop.scoring import Scoring
from gyre.objectives.config import needs_critic, needs_reference
from gyre.observe.samples import sample_row


@dataclass(frozen=True, slots=True, kw_only=True)
class RingConfig:
    """What the ring itself decides by."""

    rollout: RolloutConfig
    evaluation: EvalConfig
    snapshot_every_steps: int
    accuracy_part: str  # reward part whose value 1 counts as right
    reward_model: tuple[str, float] | None = None  # (part name, weight) of a learnt reward
    restart_engine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What phases rollout and score left behind."""

    groups: list[Group]
    in_flight: list[InFlight]
    passes: Passes
    windows: Mapping[str, float]  # the overlap account


class Ring:
    """Turns one online stage: GRPO and kin, PPO, online DPO."""

    def __init__(self, stage: StageSpec, parts: Parts, config: RingConfig, *, compute: Executor) -> None:
        assert parts.engine is not None and parts.lifecycle is not None and parts.scorer is not None
        self._stage, self._parts, self._config = stage, parts, config
        self._engine, self._scorer = parts.engine, parts.scorer
        self._emit = parts.observers.events.emit
        self._phase = parts.observers.spans.phase
        self._handover = Handover(
            parts.trainer, parts.lifecycle, compute=compute, emit=self._emit, restart_engine=config.restart_engine
        )
        self._evaluator = Rollouts(
            self._engine,
            self._scorer,
            parts.text,
            config.rollout,
            config.evaluation.model_copy(update={"part": config.accuracy_part}),
            seed=stage.seed,
        )

    async def run(self, progress: Progress) -> Progress:
        """Go on from `progress` to the end of the stage."""
        if progress.source is not None:
            self._parts.source.restore(progress.source)
        await self._publish(progress.step)
        if not progress.evals:
            progress = await self._evaluate(progress, "before")
        while progress.step < self._stage.steps:
            progress = await self._step(progress)
            last = progress.step == self._stage.steps
            every = self._config.evaluation.every_steps
            if last or (every and progress.step % every == 0):
                progress = await self._evaluate(progress, "after")
            if last or (self._snapshot_every and progress.step % self._snapshot_every == 0):
                await self._snapshot(replace(progress, done=last))
        return replace(progress, done=True)

    @property
    def _snapshot_every(self) -> int:
        return self._config.snapshot_every_steps

    async def _step(self, progress: Progress) -> Progress:
        step, started_s = progress.step + 1, time.monotonic()
        collected = await self._collect(progress, step)
        assembled = assemble(self._stage.objective, collected.groups, collected.passes, step=step)
        self._count(assembled, collected, step)
        await self._handover.leave_rollout()
        await self._enter("train", step)
        with self._phase("train", step=step):
            report = await self._parts.trainer.step(assembled.batch)
        await self._publish(step)
        self._report(step, report, collected, time.monotonic() - started_s)
        return replace(progress, step=step, source=self._parts.source.state(), in_flight=collected.in_flight)

    async def _collect(self, progress: Progress, step: int) -> Collected:
        """Phases rollout and score. What was in flight goes on first; new prompts fill up the rest."""
        config, scoring = self._config.rollout, Scoring(self._scorer, deadline_s=self._config.rollout.reward_deadline_s)
        carried = list(progress.in_flight)
        fresh = max(0, config.prompts_per_step - len(carried))
        prompts = self._parts.source.take(fresh) if fresh else ()
        groups = carried + open_groups(prompts, run_seed=self._stage.seed, step=step)
        await self._enter("rollout", step)
        rollout_from_s = time.monotonic()
        with self._phase("rollout", step=step):
            collector = Collector(
                self._engine,
                scoring,
                self._parts.text,
                sampling=config.sampling(),
                cap=config.max_tokens_per_iteration,
                deadline_s=config.deadline_s,
            )
            groups = await collector.run(groups)
        rollout_to_s = time.monotonic()
        whole, in_flight = split_whole(groups, config.completions_per_prompt)
        await self._enter("score", step)
        with self._phase("score", step=step):
            passes, learnt = await self._passes(whole, step)
            score_to_s = time.monotonic()
            scores = await scoring.finish()
        for group in groups:
            group.scores |= {i: scores[r.rollout_id] for i, r in group.rollouts.items() if r.rollout_id in scores}
        done = [as_group(group) for group in whole]
        if learnt is not None and self._config.reward_model is not None:
            done = add_part(done, *self._config.reward_model, learnt)
        windows = scoring.account(rollout=(rollout_from_s, rollout_to_s), reference=(rollout_to_s, score_to_s))
        return Collected(groups=done, in_flight=in_flight, passes=passes, windows=windows)

    async def _passes(self, whole: Sequence[InFlight], step: int):
        """Reference, reward and critic passes over the whole groups, while rule rewards still run."""
        bare = bare_batch([_unscored(group) for group in whole], step=step)
        trainer, objective = self._parts.trainer, self._stage.objective
        reference = critic = learnt = None
        if not bare.sequences:
            return Passes(), None
        if needs_reference(objective):
            with self._phase("reference", step=step):
                reference = await trainer.evaluate(bare, "reference")
        if self._config.reward_model is not None:
            with self._phase("reward", step=step):
                learnt = (await trainer.evaluate(bare, "reward")).per_sequence
        if needs_critic(objective):
            with self._phase("critic", step=step):
                critic = await trainer.evaluate(bare, "critic")
        return Passes(reference=reference, critic=critic), learnt

    async def _publish(self, step: int) -> None:
        await self._enter("handover", step)
        with self._phase("handover", step=step):
            await self._handover.publish(step=step)

    async def _evaluate(self, progress: Progress, when: str) -> Progress:
        if not self._parts.eval_prompts:
            return progress
        await self._enter("evaluate", progress.step)
        with self._phase("evaluate", step=progress.step):
            outcome = await self._evaluator.run(self._parts.eval_prompts)
        return note_outcome(progress, outcome, when, self._emit)

    async def _snapshot(self, progress: Progress) -> None:
        with self._phase("snapshot", step=progress.step):
            state, blobs = to_snapshot(progress, events=self._parts.observers.events.position())
            await self._parts.snapshots.save(step=progress.step, state=state, blobs=blobs)

    async def _enter(self, phase, step: int) -> None:
        await self._parts.gate.enter(phase, step=step)

    def _count(self, assembled: Assembled, collected: Collected, step: int) -> None:
        """Nothing silent: what was left out of training, and which rewards failed."""
        if assembled.num_dropped_groups:
            self._emit("drop.equal_groups", step=step, count=assembled.num_dropped_groups)
        if assembled.num_groups_without_pair:
            self._emit("drop.groups_without_pair", step=step, count=assembled.num_groups_without_pair)
        for what, count in failed_parts(collected.groups).items():
            self._emit("warn.reward_failed", step=step, what=what, count=count)
        if collected.in_flight:
            self._emit("rollouts.carried", step=step, groups=len(collected.in_flight))
        self._emit("reward.window", step=step, **collected.windows)

    def _report(self, step: int, report: StepReport, collected: Collected, seconds: float) -> None:
        groups = collected.groups
        rewards = reward_metrics(groups, self._config.accuracy_part) if groups else {}
        sampled = sum(int(r.sampled.sum()) for group in groups for r in group.rollouts)
        metrics = {
            **rewards,
            **report.metrics,
            "tokens_per_second": report.num_tokens / seconds,
            "sampled_tokens": float(sampled),
        }
        self._emit(
            "step.done",
            stage=self._stage.name,
            step=step,
            version=report.version,
            metrics=metrics,
            num_tokens=report.num_tokens,
            num_updates=report.num_updates,
            seconds=round(seconds, 4),
        )
        observers = self._parts.observers
        for group in groups[: observers.sample_groups_per_step]:
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                chosen = rollout.tokens[len(rollout.prompt.tokens) :]
                pieces = [self._parts.text.decode([token]) for token in chosen]
                observers.samples.write(sample_row(rollout, score, step=step, stage=self._stage.name, pieces=pieces))


def _unscored(group: InFlight) -> Group:
    order = sorted(group.rollouts)
    return Group(group_id=group.group_id, rollouts=tuple(group.rollouts[i] for i in order), scores=())


def note_outcome(progress: Progress, outcome: Outcome, when: str, emit) -> Progress:
    """Keep the first value as "before" and the newest as "after"."""
    emit(
        "eval.done",
        stage=progress.stage,
        name=outcome.metric,
        **{"loss" if outcome.metric == "loss" else "accuracy": outcome.value},
        n=outcome.n,
        step=progress.step,
        when=when,
        detail=outcome.detail,
    )
    old = dict(progress.evals.get(outcome.metric, {}))
    numbers = {"before": outcome.value} | old | {"after": outcome.value, "n": outcome.n}
    return replace(progress, evals={**progress.evals, outcome.metric: numbers})
