"""The training loop. In: parts that satisfy the contracts. Out: a policy that was rolled out,
scored, trained and published to the engine.

    source.take ─▶ Collector ─Request─▶ engine         rollout:   engine on the device
        ▲             │  ◀─TokenChunk──┘   ▲                      (rule rewards run from the first
        │             │                    │                      on; uninformative groups are
        │             │                    │                      replaced)
        │          Pipeline                │
        │             ▼                    │
        │        Scoring ◀─ rollouts       │           score:     forward passes of the models
        │             │                    │
        │             ▼                Handover        handover:  weights to the engine
        │        assemble ─TrainBatch─▶ trainer.step   train:     actor, optimizer, critic
        │                                  │
        └──────── snapshot ◀───────────────┘           between steps: evaluation, snapshot

The rollouts are the collector's task, all else is the learner's; credits join them. With
rollout.max_staleness = 0 they take turns: each phase waits for the one before it, and no rollout is
stale. With more, collections run while the learner scores, trains and hands over. Waits:

    Pipeline.take   the step's rollouts        from the collector      rollout.deadline_s.
    Scoring.finish  the scorer's last answer   from reward workers     rollout.reward_deadline_s.
    trainer.step    the compute thread         from that thread        none.

A stop ends the step in flight, or interrupts it at `run.stop_deadline_s`; `loop.schedule` then
saves the state. A failure leaves no task and no request behind; the run resumes from its newest
snapshot.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np

from gyre.core.contracts import CommitPolicy
from gyre.core.records import Group, Phase, StepReport
from gyre.core.scores import AccuracyMetric
from gyre.loop.assemble import (
    Assembled,
    Passes,
    add_part,
    assemble,
    bare_batch,
    num_unscored,
    refill_metrics,
    reward_error,
    reward_metrics,
)
from gyre.loop.asynchronous.collection import Collection
from gyre.loop.asynchronous.credits import Credits
from gyre.loop.asynchronous.pipeline import Pipeline
from gyre.loop.asynchronous.staleness import StalenessBound
from gyre.loop.collect import Collector, InFlightGroup, RequestRules, Window, as_group, keep_scores
from gyre.loop.config import EvalConfig, RolloutConfig
from gyre.loop.evaluate import Rollouts
from gyre.loop.failures import find_failures, lower_failed, refuse_failures
from gyre.loop.handover import Handover
from gyre.loop.ports import Parts, StageSpec
from gyre.loop.refill import (
    PromptFeed,
    StepRollouts,
    drops_equal,
    filter_metric,
    why_filtered_by_score,
)
from gyre.loop.resume import StageProgress, note_outcome
from gyre.loop.schedule import Rhythm, Turn, export_if_due, run_steps, step_done
from gyre.loop.scoring import Scoring
from gyre.loop.stopping import StepUnfinished
from gyre.objectives.config import (
    corrects_importance,
    needs_critic,
    needs_policy_logprobs,
    needs_reference,
)
from gyre.observability.overlap import roles_account
from gyre.observability.samples import sample_row


@dataclass(frozen=True, slots=True, kw_only=True)
class RingConfig:
    """Options of the training loop."""

    rollout: RolloutConfig
    evaluation: EvalConfig
    snapshot_every_steps: int
    export_every_steps: int = 0
    # what counts as right; None where no part compares with a right answer
    accuracy: AccuracyMetric | None
    max_failed_share: float  # of a reward part's checks in a step; past it the run stops
    reward_model: tuple[str, float] | None = None  # (part name, weight) of a learned reward
    restart_engine: bool = False
    window: Window | None = None  # what the engine takes at once; None: everything


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredCollection:
    """Results of the rollout and score phases."""

    groups: list[Group]  # to be trained on
    sampled: list[Group]  # these and those that were replaced
    num_carried: int  # groups that go on in the next step
    rollouts: StepRollouts
    passes: Passes  # over `groups`
    windows: Mapping[str, float]  # the overlap account


class Ring:
    """Runs one online stage: GRPO and related objectives, PPO, online DPO."""

    def __init__(self, stage: StageSpec, parts: Parts, config: RingConfig) -> None:
        assert parts.engine is not None and parts.lifecycle is not None and parts.scorer is not None
        self._stage = stage
        self._parts = parts
        self._config = config
        self._engine = parts.engine
        self._scorer = parts.scorer
        self._emit = parts.observers.events.emit
        self._phase = parts.observers.spans.phase
        self._overlaps = config.rollout.max_staleness > 0
        self._staleness = StalenessBound(config.rollout.max_staleness, emit=self._emit)
        self._pipeline = self._make_pipeline(StageProgress(stage=stage.name))
        self._reported_s = time.monotonic()  # when the newest step was reported
        self.train_s = 0.0  # that the newest update took: it is not started when a stop leaves less
        self._handover = Handover(
            parts.trainer,
            parts.lifecycle,
            emit=self._emit,
            epoch=parts.observers.events.attempt,
            restart_engine=config.restart_engine,
            versions=parts.versions,
        )
        self._evaluator = Rollouts(
            self._engine,
            self._scorer,
            parts.text,
            config.rollout,
            config.evaluation,
            accuracy=config.accuracy,
            seed=stage.seed,
            emit=self._emit,
            window=config.window,
        )
        self._feed = PromptFeed(parts.source, config.rollout, seed=stage.seed)
        self._metric = filter_metric(stage.objective, config.accuracy)

    async def run(self, progress: StageProgress) -> StageProgress:
        """Resume from `progress` and run to the end of the stage, or until a stop request ends
        it."""
        if progress.source is not None:
            self._parts.source.restore(progress.source)
        if reason := why_filtered_by_score(self._stage.objective, self._config.accuracy):
            self._emit("fallback.filter_by_score", stage=self._stage.name, reason=reason)
        if self._overlaps and not corrects_importance(self._stage.objective):
            self._emit(
                "warn.staleness_uncorrected",
                stage=self._stage.name,
                reason="rollout.max_staleness without a correction: objective.correction = 'none'",
            )
        self._staleness.published = tuple(progress.published)
        await self.publish(progress.step)
        turn = Turn(
            step=self.run_step,
            evaluate=self._evaluate,
            so_far=self._so_far,
            halt=self._halt,
        )
        rhythm = Rhythm(
            steps=self._stage.steps,
            eval_every_steps=self._config.evaluation.every_steps,
            snapshot_every_steps=self._config.snapshot_every_steps,
        )
        async with self.collecting(progress):
            return await run_steps(progress, turn, rhythm, self._parts)

    @asynccontextmanager
    async def collecting(self, progress: StageProgress) -> AsyncIterator[None]:
        """Run a collector's task, resumed from `progress`, during the block."""
        self._pipeline = self._make_pipeline(progress)
        self._pipeline.restore(progress.collected, progress.in_flight)
        self._pipeline.start()
        self._reported_s = time.monotonic()
        try:
            yield
        finally:
            await self._pipeline.close()

    @property
    def in_flight(self) -> list[InFlightGroup]:
        """Groups of the newest collection that is not trained on."""
        return self._pipeline.in_flight

    def _make_pipeline(self, progress: StageProgress) -> Pipeline:
        rollout, collected = self._config.rollout, progress.step + len(progress.collected)
        return Pipeline(
            self._roll_out,
            open_scoring=lambda: Scoring(self._scorer, deadline_s=rollout.reward_deadline_s),
            drop_stale=self._staleness.drop_stale,
            credits=Credits(
                lead=rollout.lead,
                last=self._stage.steps,
                collected=collected,
                # nothing begins before the learner asks for its first step
                wanted=progress.step - rollout.lead,
            ),
            size=rollout.completions_per_prompt,
            stop=self._parts.stop,
            emit=self._emit,
        )

    async def run_step(self, progress: StageProgress) -> StageProgress:
        """Train on the next step's rollouts and publish what comes of it."""
        step, started_s = progress.step + 1, time.monotonic()
        collection = await self._parts.stop.within(self._pipeline.take(step))
        scored = await self._score(collection)
        if self._parts.stop.remaining_s() < self.train_s:
            raise StepUnfinished
        self._look_at_failures(scored.sampled, step)
        assembled = assemble(
            self._stage.objective,
            scored.groups,
            scored.passes,
            step=step,
            accuracy=self._config.accuracy,
        )
        self._count(assembled, scored, step)
        staleness = self._staleness.measure(scored.groups, step)
        self._pipeline.trained(step)  # an update cannot be broken off
        await self._enter("train", step)
        train_from_s = time.monotonic()
        with self._phase("train", step=step):
            report = await self._parts.trainer.step(assembled.batch)
        self.train_s = time.monotonic() - train_from_s
        await self.publish(step)
        await export_if_due(step, self._config.export_every_steps, self._parts)
        self._report(step, report, scored, assembled, staleness, time.monotonic() - started_s)
        self._keep_samples(step, scored.sampled)
        return self._so_far(replace(progress, step=step))

    async def _roll_out(self, collection: Collection) -> StepRollouts:
        """Run the rollout phase: the collector's part."""
        step = collection.step
        if not self._overlaps:
            await self._enter("rollout", step)
        with self._phase("rollout", step=step):
            return await self._feed.roll_out(
                collection.groups,
                self._collector(collection.scoring),
                collection.scoring,
                step=step,
                max_refills=self._max_refills(),
                metric=self._metric,
            )

    async def _score(self, collection: Collection) -> ScoredCollection:
        """Run the score phase. Rewards that are late are waited for here."""
        step, scoring, rollouts = collection.step, collection.scoring, collection.rollouts
        assert rollouts is not None
        whole, dropped = collection.whole, rollouts.dropped
        async with scoring:
            rollout_to_s = time.monotonic()
            await self._handover.leave_rollout(step=step)
            await self._enter("score", step)
            with self._phase("score", step=step):
                kept = [group for group in whole if group.group_id not in dropped]
                passes, learned = await self._passes(kept, whole, step)
                score_to_s = time.monotonic()
                keep_scores(rollouts.groups, await self._parts.stop.within(scoring.finish()))
            account = scoring.account(
                rollout=rollouts.windows, reference=(rollout_to_s, score_to_s)
            )
        done = [as_group(group) for group in whole]
        if learned is not None and self._config.reward_model is not None:
            done = add_part(done, *self._config.reward_model, learned)
        done = lower_failed(done)
        return ScoredCollection(
            groups=[group for group in done if group.group_id not in dropped],
            sampled=done,
            num_carried=collection.num_carried,
            rollouts=rollouts,
            passes=passes,
            windows=account,
        )

    def _so_far(self, progress: StageProgress) -> StageProgress:
        """Return the progress with what the collector has now."""
        collected, in_flight = self._pipeline.state()
        return replace(
            progress,
            source=self._parts.source.state(),
            collected=collected,
            in_flight=in_flight,
            published=self._staleness.published,
        )

    async def _halt(self, progress: StageProgress) -> StageProgress:
        """Break off what is under way, and keep the tokens that there are. Before rollouts began,
        or in an evaluation, there are no new ones."""
        await self._pipeline.halt()
        if self._pipeline.is_empty:
            return progress
        unfinished = self._so_far(progress)
        partials = [p for group in unfinished.in_flight for p in group.partials.values()]
        self._emit(
            "step.broken_off",
            step=progress.step + 1,
            groups=unfinished.num_unfinished_groups,
            partial_tokens=sum(len(partial.tokens) for partial in partials),
        )
        return unfinished

    def _max_refills(self) -> int:
        """Return the allowed refills: 0 with a learned reward. It is computed after the rollouts,
        so a filter by score comes too late to replace groups."""
        waits = self._metric is None and self._config.reward_model is not None
        return (
            self._config.rollout.max_refills
            if drops_equal(self._stage.objective) and not waits
            else 0
        )

    def _collector(self, scoring: Scoring) -> Collector:
        config = self._config.rollout
        return Collector(
            self._engine,
            scoring,
            self._parts.text,
            RequestRules(
                sampling=config.sampling(),
                cap_tokens=config.max_tokens_per_iteration,
                repetition=config.repetition,
            ),
            deadline_s=config.deadline_s,
            emit=self._emit,
            window=self._config.window,
        )

    async def _passes(
        self, kept: Sequence[InFlightGroup], whole: Sequence[InFlightGroup], step: int
    ) -> tuple[Passes, np.ndarray | None]:
        """Run the policy, reference and critic passes over the groups to train on. The reward model
        scores all complete groups. Rule rewards run meanwhile."""
        bare = bare_batch([as_group(group, scored=False) for group in kept], step=step)
        trainer, objective = self._parts.trainer, self._stage.objective
        policy = reference = critic = learned = None
        if needs_policy_logprobs(objective) and kept:
            with self._phase("policy", step=step):
                policy = await trainer.evaluate(bare, "policy")
        if needs_reference(objective) and kept:
            with self._phase("reference", step=step):
                reference = await trainer.evaluate(bare, "reference")
        if self._config.reward_model is not None and whole:
            every = bare_batch([as_group(group, scored=False) for group in whole], step=step)
            with self._phase("reward", step=step):
                learned = (await trainer.evaluate(every, "reward")).per_sequence
        if needs_critic(objective) and kept:
            with self._phase("critic", step=step):
                critic = await trainer.evaluate(bare, "critic")
        return Passes(policy=policy, reference=reference, critic=critic), learned

    async def publish(self, step: int) -> None:
        """Hand the trainer's version over. Under "drain" rollouts under way end first; under
        "continue" they go on with the new weights, and their tokens carry both versions."""
        if self._overlaps and self._config.rollout.weight_update == "continue":
            await self._hand_over(step, "continue")
            return
        async with self._pipeline.at_rest():
            await self._hand_over(step, "drain")

    async def _hand_over(self, step: int, policy: CommitPolicy) -> None:
        await self._enter("handover", step)
        with self._phase("handover", step=step):
            version = await self._handover.publish(step=step, policy=policy)
        self._staleness.note_published(version, step=step)

    async def _evaluate(self, progress: StageProgress, when: str) -> StageProgress:
        if not self._parts.eval_prompts:
            return progress
        async with self._pipeline.at_rest():
            if not self._overlaps:
                await self._enter("evaluate", progress.step)
            with self._phase("evaluate", step=progress.step):
                outcome = await self._parts.stop.within(
                    self._evaluator.run(self._parts.eval_prompts)
                )
        return note_outcome(progress, outcome, when, self._emit)

    async def _enter(self, phase: Phase, step: int) -> None:
        await self._parts.gate.enter(phase, step=step)

    def _look_at_failures(self, groups: Sequence[Group], step: int) -> None:
        """Report failed rewards with their causes. Raises RewardError before training when more
        than the allowed share failed."""
        failures = find_failures(groups)
        for failure in failures:
            self._emit("warn.reward_failed", step=step, **failure.fields())
        refuse_failures(failures, most_share=self._config.max_failed_share, step=step)

    def _count(self, assembled: Assembled, scored: ScoredCollection, step: int) -> None:
        """Emit events for all data left out of training."""
        rollouts = scored.rollouts
        if equal := assembled.num_dropped_groups + len(rollouts.dropped):
            self._emit("drop.equal_groups", step=step, count=equal)
        if assembled.num_groups_without_pair:
            self._emit(
                "drop.groups_without_pair", step=step, count=assembled.num_groups_without_pair
            )
        if unscored := num_unscored(scored.sampled):
            self._emit("drop.unscored", step=step, count=unscored)
        if assembled.num_truncated:
            self._emit("drop.truncated", step=step, count=assembled.num_truncated)
        if rollouts.refills:
            self._emit(
                "rollouts.refilled",
                step=step,
                rounds=rollouts.refills,
                prompts=rollouts.num_refilled,
            )
        if rollouts.num_missing:
            self._emit(
                "rollouts.refills_exhausted",
                step=step,
                rounds=rollouts.refills,
                missing=rollouts.num_missing,
            )
        finishes = [r.finish for group in scored.sampled for r in group.rollouts]
        if repeating := finishes.count("repetition"):
            self._emit("rollouts.repetition_stopped", step=step, count=repeating)
        if scored.num_carried:
            self._emit("rollouts.carried", step=step, groups=scored.num_carried)
        self._emit("reward.window", step=step, **scored.windows)

    def _report(
        self,
        step: int,
        report: StepReport,
        scored: ScoredCollection,
        assembled: Assembled,
        staleness: Mapping[str, float],
        seconds: float,
    ) -> None:
        groups = scored.sampled
        sampled = sum(int(r.sampled.sum()) for group in groups for r in group.rollouts)
        metrics = {
            **reward_metrics(groups, self._config.accuracy),
            **assembled.metrics,
            **refill_metrics(self._stage.objective, scored.rollouts, assembled, len(groups)),
            **staleness,
            "sampled_tokens": float(sampled),
        }
        done = step_done(
            self._stage,
            step,
            report,
            seconds,
            metrics,
            num_prompts=len(groups),
            reward_standard_error=reward_error(groups),
        )
        self._report_roles(step)
        self._emit("step.done", **done)

    def _report_roles(self, step: int) -> None:
        """Report who waited how long since the step before."""
        now_s = time.monotonic()
        window_s, self._reported_s = now_s - self._reported_s, now_s
        idle = self._pipeline.take_idle()
        if self._overlaps:
            self._emit("step.roles", step=step, **roles_account(seconds=window_s, **idle))

    def _keep_samples(self, step: int, groups: Sequence[Group]) -> None:
        """Write a few groups to the sample log."""
        observers = self._parts.observers
        for group in groups[: observers.sample_groups_per_step]:
            for rollout, score in zip(group.rollouts, group.scores, strict=True):
                chosen = rollout.tokens[len(rollout.prompt.tokens) :]
                pieces = [self._parts.text.decode([token]) for token in chosen]
                observers.samples.write(
                    sample_row(rollout, score, step=step, stage=self._stage.name, pieces=pieces)
                )
