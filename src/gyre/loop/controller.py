"""The training loop. In: parts that satisfy the contracts. Out: a policy that was rolled out,
scored, trained and published to the engine.

    source.take ─▶ Collector ─Request─▶ engine         rollout    engine on the device
        ▲             │  ◀─TokenChunk──┘   ▲                      (rule rewards run from the first
        │             │                    │                      on; uninformative groups are
        │             │                    │                      replaced)
        │             ▼                    │
        │        Scoring ◀─ rollouts       │           score      the models: forward passes
        │             │                    │
        │             ▼                Handover        handover   weights to the engine
        │        assemble ─TrainBatch─▶ trainer.step   train      actor, optimizer, critic
        │                                  │
        └──────── snapshot ◀───────────────┘           between steps: evaluation, snapshot

One step runs at a time, and each phase waits for the one before it: no rollout is stale.
Waits:

    Collector.run   the engine's last chunk    from the engine's pump  rollout.deadline_s.
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
from gyre.loop.collect import (
    Collector,
    InFlightGroup,
    Window,
    as_group,
    carry_over,
    count_begun,
    keep_scores,
    split_whole,
)
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
from gyre.objectives.config import needs_critic, needs_policy_logprobs, needs_reference
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
class Collected:
    """Results of the rollout and score phases."""

    groups: list[Group]  # to be trained on
    sampled: list[Group]  # these and those that were replaced
    in_flight: list[InFlightGroup]
    rollouts: StepRollouts
    passes: Passes  # over `groups`
    windows: Mapping[str, float]  # the overlap account


class Ring:
    """Runs one online stage: GRPO and related objectives, PPO, online DPO."""

    def __init__(self, stage: StageSpec, parts: Parts, config: RingConfig) -> None:
        assert parts.engine is not None and parts.lifecycle is not None and parts.scorer is not None
        self._stage, self._parts, self._config = stage, parts, config
        self._engine, self._scorer = parts.engine, parts.scorer
        self._emit = parts.observers.events.emit
        self._phase = parts.observers.spans.phase
        # groups of the step in flight, until they are trained on
        self.in_flight: list[InFlightGroup] = []
        # of those carried over, tokens by sample when the step began
        self._begun_tokens: list[dict[int, int]] = []
        self.train_s = 0.0  # that the newest update took: it is not begun when a stop leaves less
        self._handover = Handover(
            parts.trainer,
            parts.lifecycle,
            emit=self._emit,
            epoch=parts.observers.events.attempt,
            restart_engine=config.restart_engine,
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
        await self.publish(progress.step)
        turn = Turn(
            step=self.run_step, evaluate=self._evaluate, keep_unfinished=self._keep_unfinished
        )
        rhythm = Rhythm(
            steps=self._stage.steps,
            eval_every_steps=self._config.evaluation.every_steps,
            snapshot_every_steps=self._config.snapshot_every_steps,
        )
        return await run_steps(progress, turn, rhythm, self._parts)

    async def run_step(self, progress: StageProgress) -> StageProgress:
        step, started_s = progress.step + 1, time.monotonic()
        collected = await self._collect(progress, step)
        if self._parts.stop.remaining_s() < self.train_s:
            raise StepUnfinished
        self._look_at_failures(collected.sampled, step)
        assembled = assemble(
            self._stage.objective,
            collected.groups,
            collected.passes,
            step=step,
            accuracy=self._config.accuracy,
        )
        self._count(assembled, collected, step)
        self.in_flight = []  # an update cannot be broken off
        await self._enter("train", step)
        train_from_s = time.monotonic()
        with self._phase("train", step=step):
            report = await self._parts.trainer.step(assembled.batch)
        self.train_s = time.monotonic() - train_from_s
        await self.publish(step)
        await export_if_due(step, self._config.export_every_steps, self._parts)
        self._report(step, report, collected, assembled, time.monotonic() - started_s)
        self._keep_samples(step, collected.sampled)
        for group in collected.in_flight:
            carry_over(group)
        return replace(
            progress, step=step, source=self._parts.source.state(), in_flight=collected.in_flight
        )

    async def _collect(self, progress: StageProgress, step: int) -> Collected:
        """Run the rollout and score phases."""
        config, stop = self._config.rollout, self._parts.stop
        groups = self.in_flight = list(progress.in_flight)
        self._begun_tokens = [count_begun(group, config.completions_per_prompt) for group in groups]
        async with (
            Scoring(self._scorer, deadline_s=config.reward_deadline_s) as scoring,
            self._keeping(groups, scoring),
        ):
            await self._enter("rollout", step)
            with self._phase("rollout", step=step):
                rollouts = await stop.within(
                    self._feed.roll_out(
                        groups,
                        self._collector(scoring),
                        scoring,
                        step=step,
                        max_refills=self._max_refills(),
                        metric=self._metric,
                    )
                )
            rollout_to_s = time.monotonic()
            whole, in_flight = split_whole(rollouts.groups, config.completions_per_prompt)
            await self._handover.leave_rollout(step=step)
            await self._enter("score", step)
            with self._phase("score", step=step):
                kept = [group for group in whole if group.group_id not in rollouts.dropped]
                passes, learnt = await self._passes(kept, whole, step)
                score_to_s = time.monotonic()
                keep_scores(groups, await stop.within(scoring.finish()))
            account = scoring.account(
                rollout=rollouts.windows, reference=(rollout_to_s, score_to_s)
            )
        done = [as_group(group) for group in whole]
        if learnt is not None and self._config.reward_model is not None:
            done = add_part(done, *self._config.reward_model, learnt)
        done = lower_failed(done)
        return Collected(
            groups=[group for group in done if group.group_id not in rollouts.dropped],
            sampled=done,
            in_flight=in_flight,
            rollouts=rollouts,
            passes=passes,
            windows=account,
        )

    @asynccontextmanager
    async def _keeping(
        self, groups: Sequence[InFlightGroup], scoring: Scoring
    ) -> AsyncIterator[None]:
        """Keep the groups and scores of an interrupted step."""
        try:
            yield
        except StepUnfinished:
            keep_scores(groups, scoring.so_far())
            raise

    def _keep_unfinished(self, progress: StageProgress) -> StageProgress:
        """Store the groups that the run resumes with. Before rollouts began, or in an evaluation,
        there are no new ones."""
        if not self.in_flight:
            return progress
        size = self._config.rollout.completions_per_prompt
        fresh = [dict.fromkeys(range(size), 0)] * (len(self.in_flight) - len(self._begun_tokens))
        for group, begun in zip(self.in_flight, [*self._begun_tokens, *fresh], strict=True):
            group.begun_tokens = dict(begun)
        tokens = sum(
            len(partial.tokens) for group in self.in_flight for partial in group.partials.values()
        )
        self._emit(
            "step.broken_off",
            step=progress.step + 1,
            groups=len(self.in_flight),
            partial_tokens=tokens,
        )
        return replace(progress, source=self._parts.source.state(), in_flight=self.in_flight)

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
            sampling=config.sampling(),
            cap=config.max_tokens_per_iteration,
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
        policy = reference = critic = learnt = None
        if needs_policy_logprobs(objective) and kept:
            with self._phase("policy", step=step):
                policy = await trainer.evaluate(bare, "policy")
        if needs_reference(objective) and kept:
            with self._phase("reference", step=step):
                reference = await trainer.evaluate(bare, "reference")
        if self._config.reward_model is not None and whole:
            every = bare_batch([as_group(group, scored=False) for group in whole], step=step)
            with self._phase("reward", step=step):
                learnt = (await trainer.evaluate(every, "reward")).per_sequence
        if needs_critic(objective) and kept:
            with self._phase("critic", step=step):
                critic = await trainer.evaluate(bare, "critic")
        return Passes(policy=policy, reference=reference, critic=critic), learnt

    async def publish(self, step: int) -> None:
        await self._enter("handover", step)
        with self._phase("handover", step=step):
            await self._handover.publish(step=step)

    async def _evaluate(self, progress: StageProgress, when: str) -> StageProgress:
        if not self._parts.eval_prompts:
            return progress
        await self._enter("evaluate", progress.step)
        with self._phase("evaluate", step=progress.step):
            outcome = await self._parts.stop.within(self._evaluator.run(self._parts.eval_prompts))
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

    def _count(self, assembled: Assembled, collected: Collected, step: int) -> None:
        """Emit events for all data left out of training."""
        rollouts = collected.rollouts
        if equal := assembled.num_dropped_groups + len(rollouts.dropped):
            self._emit("drop.equal_groups", step=step, count=equal)
        if assembled.num_groups_without_pair:
            self._emit(
                "drop.groups_without_pair", step=step, count=assembled.num_groups_without_pair
            )
        if unscored := num_unscored(collected.sampled):
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
        if collected.in_flight:
            self._emit("rollouts.carried", step=step, groups=len(collected.in_flight))
        self._emit("reward.window", step=step, **collected.windows)

    def _report(
        self,
        step: int,
        report: StepReport,
        collected: Collected,
        assembled: Assembled,
        seconds: float,
    ) -> None:
        groups = collected.sampled
        sampled = sum(int(r.sampled.sum()) for group in groups for r in group.rollouts)
        metrics = {
            **reward_metrics(groups, self._config.accuracy),
            **assembled.metrics,
            **refill_metrics(self._stage.objective, collected.rollouts, assembled, len(groups)),
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
        self._emit("step.done", **done)

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
