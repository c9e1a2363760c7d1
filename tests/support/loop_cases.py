"""Cases for the loop's tests: a whole ring on the shipped fakes, which notes who was called in
which phase."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes.config import FakeEngineConfig, FakeScorerConfig, FakeSourceConfig, FakeTrainerConfig
from fakes.engine import Faults, ScriptedEngine
from fakes.scorer import Table, TableScorer, answer_table
from fakes.script import Script, byte_tokenizer, learning_script, sum_prompts
from fakes.source import ListSource
from fakes.trainer import CountingTrainer
from gyre.core.offers import Offer
from gyre.core.records import Phase, Request, Rollout, TrainBatch
from gyre.core.scores import AccuracyMetric
from gyre.core.seeds import derive_seed
from gyre.loop.collect import Window
from gyre.loop.config import EvalConfig, RolloutConfig
from gyre.loop.controller import Ring, RingConfig
from gyre.loop.ports import Observers, Parts, StageSpec
from gyre.loop.resume import StageProgress, from_snapshot
from gyre.loop.stopping import StopRequest
from gyre.objectives.config import AnyObjective, GrpoConfig
from gyre.observability.events import EventLog, next_attempt, read_events
from gyre.observability.samples import SampleLog
from gyre.observability.spans import Spans
from run_logs import is_measured, read_samples

TOKENIZER = byte_tokenizer()
ENGINE = FakeEngineConfig(start_accuracy=0.3, gain_per_version=0.1)
TRAIN, HELD_OUT = sum_prompts(FakeSourceConfig(num_prompts=40), TOKENIZER)
GROUPS_OF_4 = RolloutConfig(
    prompts_per_step=4,
    completions_per_prompt=4,
    max_refills=0,
    max_tokens=16,
    deadline_s=20.0,
    reward_deadline_s=20.0,
)


RIGHT = AccuracyMetric(part="table", threshold=1.0)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end, and insist that nothing is left running."""

    async def watched() -> Any:
        try:
            return await asyncio.wait_for(coroutine, 30)
        finally:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            if left:  # the engine's rounds end at their next look: nothing is live
                _, left = await asyncio.wait(left, timeout=1.0)
            assert not left, f"left pending: {left}"

    return asyncio.run(watched())


def digits_script(request: Request, index: int, version: int) -> Sequence[int]:
    """1 to 12 digits and the end: a pure function of the request's seed, the index and the
    place."""
    seed = derive_seed(request.seed, "digits", index)
    chosen = [derive_seed(seed, place) % 10 for place in range(1 + seed % 12)]
    return [*TOKENIZER.encode("".join(map(str, chosen))).tolist(), TOKENIZER.end_id]


def digit_share(rollout: Rollout) -> float:
    """A reward that differs between siblings: the share of large digits."""
    digits = [int(char) for char in rollout.text]
    return sum(digit > 4 for digit in digits) / max(1, len(digits))


@dataclass
class Gate:
    """Notes each phase; everybody else asks it which one it is."""

    phase: Phase = "idle"
    seen: list[tuple[Phase, int]] = field(default_factory=list)

    async def enter(self, phase: Phase, *, step: int) -> None:
        self.phase = phase
        self.seen.append((phase, step))


class Exports:
    """Notes (phase, version) of each export."""

    def __init__(self, gate: Gate, trainer: CountingTrainer) -> None:
        self._gate, self._trainer = gate, trainer
        self.made: list[tuple[Phase, int]] = []

    async def export(self) -> None:
        self.made.append((self._gate.phase, self._trainer.register_now().version))


class WatchedTrainer(CountingTrainer):
    """Notes (phase, what) of each call, and keeps the batches."""

    def __init__(self, gate: Gate, **more: Any) -> None:
        super().__init__(**more)
        self.gate, self.calls, self.batches = gate, [], []

    async def step(self, batch: TrainBatch) -> Any:
        self.calls.append((self.gate.phase, "step"))
        self.batches.append(batch)
        return await super().step(batch)

    async def evaluate(self, batch: TrainBatch, which: Any) -> Any:
        self.calls.append((self.gate.phase, f"evaluate {which}"))
        return await super().evaluate(batch, which)

    async def register(self, *, epoch: int = 0) -> Offer:
        self.calls.append((self.gate.phase, "register"))
        return await super().register(epoch=epoch)


class WatchedEngine(ScriptedEngine):
    """Notes (phase, what) of each call of its life, and the phases in which it was asked for
    tokens."""

    def __init__(self, gate: Gate, script: Script, **more: Any) -> None:
        super().__init__(script, **more)
        self.gate, self.calls, self.asked, self.fail_commit = gate, [], [], False

    def submit(self, request: Request) -> Any:
        self.asked.append((self.gate.phase, request))
        return super().submit(request)

    def is_reciting(self) -> bool:
        """Some completions have tokens, and have not ended."""
        return any(recital.num_tokens for recital in self.live)

    async def start(self, *, dummy: bool) -> None:
        self.calls.append((self.gate.phase, f"start dummy={dummy}"))
        await super().start(dummy=dummy)

    async def prepare(self, offer: Offer) -> None:
        self.calls.append((self.gate.phase, f"prepare {offer.version}"))
        await super().prepare(offer)

    async def commit(self, version: int, *, policy: Any) -> None:
        self.calls.append((self.gate.phase, f"commit {version} {policy}"))
        if self.fail_commit:
            raise RuntimeError("told to fail")
        await super().commit(version, policy=policy)

    async def rollback(self) -> None:
        self.calls.append((self.gate.phase, "rollback"))
        await super().rollback()

    async def terminate(self) -> None:
        self.calls.append((self.gate.phase, "terminate"))
        await super().terminate()


class Shelf:
    """Keeps snapshots as a disk would: JSON, bytes and the trainer's own state."""

    def __init__(self, trainer: CountingTrainer) -> None:
        self._trainer = trainer
        self.kept: dict[int, tuple[str, dict[str, bytes], Mapping[str, Any]]] = {}

    async def save(
        self, *, step: int, state: Mapping[str, Any], blobs: Mapping[str, bytes]
    ) -> None:
        self.kept[step] = (json.dumps(state), dict(blobs), await self._trainer.snapshot())


class Bench:
    """One attempt at a stage on fakes. `folder` holds its log; another bench on it is the next
    attempt."""

    def __init__(
        self,
        folder: Path,
        *,
        objective: AnyObjective | None = None,
        rollout: RolloutConfig = GROUPS_OF_4,
        evaluation: EvalConfig | None = None,
        steps: int = 3,
        snapshot_every: int = 0,
        export_every: int = 0,
        script: Script | None = None,
        table: Table = answer_table,
        delays_s: Mapping[str, float] | None = None,
        scorer: Any = None,
        scorer_delay_s: float = 0.0,
        faults: Faults | None = None,
        engine: FakeEngineConfig = ENGINE,
        trainer: FakeTrainerConfig | None = None,
        restart_engine: bool = False,
        max_failed_share: float = 1.0,
        reward_model: tuple[str, float] | None = None,
        accuracy: AccuracyMetric | None = RIGHT,
        window: Window | None = None,
        stop: StopRequest | None = None,
    ) -> None:
        self.stop = stop or StopRequest(deadline_s=30.0)
        self.log = folder / "events.jsonl"
        self.events = EventLog(self.log, attempt=next_attempt(self.log))
        self.samples = SampleLog(folder / "samples.jsonl", self.events)
        emit: Callable[..., None] = self.events.emit
        self.gate = Gate()
        self.trainer = WatchedTrainer(self.gate, emit=emit, config=trainer)
        self.engine = WatchedEngine(
            self.gate,
            script or learning_script(engine, TOKENIZER),
            emit=emit,
            config=engine,
            faults=faults,
            eos_ids=TOKENIZER.eos_ids,
            decode=TOKENIZER.decode,
        )
        self.seen: list[Rollout] = []  # everything that was ever scored, in order

        def judge(rollout: Rollout) -> float:
            self.seen.append(rollout)
            assert callable(table)
            return table(rollout)

        self.scorer = scorer or TableScorer(
            judge, emit=emit, config=FakeScorerConfig(delay_s=scorer_delay_s), delays_s=delays_s
        )
        self.source = ListSource(TRAIN, seed=5)
        self.shelf = Shelf(self.trainer)
        self.exports = Exports(self.gate, self.trainer)
        parts = Parts(
            source=self.source,
            trainer=self.trainer,
            gate=self.gate,
            snapshots=self.shelf,
            exports=self.exports,
            observers=Observers(
                events=self.events,
                samples=self.samples,
                spans=Spans(emit),
                sample_groups_per_step=100,
            ),
            text=TOKENIZER,
            engine=self.engine,
            lifecycle=self.engine,
            scorer=self.scorer,
            eval_prompts=HELD_OUT if evaluation else (),
            stop=self.stop,
        )
        self.ring = Ring(
            StageSpec(
                name="main", objective=objective or GrpoConfig(variant="dapo"), steps=steps, seed=11
            ),
            parts,
            RingConfig(
                rollout=rollout,
                evaluation=evaluation or EvalConfig(),
                snapshot_every_steps=snapshot_every,
                export_every_steps=export_every,
                accuracy=accuracy,
                window=window,
                max_failed_share=max_failed_share,
                reward_model=reward_model,
                restart_engine=restart_engine,
            ),
        )

    async def go(self, progress: StageProgress | None = None) -> StageProgress:
        await self.engine.start(dummy=False)
        return await self.ring.run(progress or StageProgress(stage="main"))

    async def resume(self, kept: tuple[str, dict[str, bytes], Mapping[str, Any]]) -> StageProgress:
        """Go on from a snapshot of another bench."""
        state, blobs, own = kept
        loop_state = json.loads(state)
        progress = from_snapshot(loop_state, blobs)
        position = loop_state["events"]
        self.events.fence(position["attempt"], position["seq"], step=progress.step)
        await self.trainer.restore(own)
        return await self.go(progress)

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in read_events(self.log) if row["kind"] == kind]

    def steps(self) -> list[dict[str, Any]]:
        """What each step came to, without what depends on the clock."""
        return [
            {
                "step": row["step"],
                "version": row["version"],
                "num_tokens": row["num_tokens"],
                "num_updates": row["num_updates"],
                **{name: value for name, value in row["metrics"].items() if not is_measured(name)},
            }
            for row in self.rows("step.done")
        ]

    def sample_rows(self) -> list[dict[str, Any]]:
        rows = read_samples(self.log.with_name("samples.jsonl"), read_events(self.log).lineage)
        return [
            {name: value for name, value in row.items() if name not in ("seq", "attempt")}
            for row in rows
        ]

    def close(self) -> None:
        self.samples.close()
        self.events.close()


def turn(bench: Bench, **more: Any) -> StageProgress:
    """Run a bench to its end and close it, whatever happens."""
    try:
        return run(bench.resume(more["kept"]) if "kept" in more else bench.go())
    finally:
        bench.close()


async def interrupt_when(task: asyncio.Task[Any], ready: Callable[[], bool]) -> None:
    """Cancel the task, as Ctrl-C does, once `ready`; return when it has ended."""
    while not ready() and not task.done():
        await asyncio.sleep(0.001)
    assert not task.done(), "it ended before it could be interrupted"
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
