"""The ring without rollouts, and the measures on held-out sequences."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from fakes.scorer import TableScorer
from fakes.script import learning_script
from fakes.source import ListSource
from fakes.trainer import CountingTrainer
from gyre.core.records import Evaluation, TrainBatch, TrainSequence
from gyre.core.scores import AccuracyMetric
from gyre.loop.config import EvalConfig
from gyre.loop.evaluate import Rollouts, held_out_loss, pair_accuracy, preference_accuracy
from gyre.loop.offline import OfflineConfig, OfflineLoop
from gyre.loop.ports import Observers, Parts, StageSpec
from gyre.loop.resume import StageProgress, from_snapshot
from gyre.objectives.config import RmConfig, SftConfig
from gyre.observability.events import EventLog, next_attempt, read_events
from gyre.observability.samples import SampleLog
from gyre.observability.spans import Spans
from loop_cases import (
    ENGINE,
    GROUPS_OF_4,
    HELD_OUT,
    TOKENIZER,
    Exports,
    Gate,
    Shelf,
    WatchedEngine,
    WatchedTrainer,
    run,
)


def example(number: int, score: float = 0.0) -> TrainSequence:
    tokens = np.arange(4 + number % 3, dtype=np.int32)
    return TrainSequence(tokens=tokens, columns={"loss_mask": tokens > 1}, scalars={"score": score})


EXAMPLES = [example(number) for number in range(20)]
HELD_OUT_BATCH = TrainBatch(sequences=tuple(EXAMPLES[:4]), step=0)


class Offline:
    def __init__(
        self,
        folder,
        *,
        judged: bool = False,
        objective=None,
        eval_batch=HELD_OUT_BATCH,
        steps: int = 6,
    ):
        self.log = folder / "events.jsonl"
        self.events = EventLog(self.log, attempt=next_attempt(self.log))
        self.samples = SampleLog(folder / "samples.jsonl", self.events)
        self.gate = Gate()
        emit = self.events.emit
        self.trainer = WatchedTrainer(self.gate, emit=emit)
        self.exports = Exports(self.gate, self.trainer)
        self.engine = WatchedEngine(
            self.gate,
            learning_script(ENGINE, TOKENIZER),
            emit=emit,
            config=ENGINE,
            eos_ids=TOKENIZER.eos_ids,
        )
        self.shelf = Shelf(self.trainer)
        judge = None
        if judged:
            scorer, config = TableScorer(emit=emit), EvalConfig(num_problems=len(HELD_OUT))
            accuracy = AccuracyMetric(part="table", threshold=1.0)
            judge = Rollouts(
                self.engine,
                scorer,
                TOKENIZER,
                GROUPS_OF_4,
                config,
                accuracy=accuracy,
                seed=1,
                emit=emit,
            )
        parts = Parts(
            source=ListSource(EXAMPLES, seed=3),
            trainer=self.trainer,
            gate=self.gate,
            snapshots=self.shelf,
            exports=self.exports,
            observers=Observers(
                events=self.events,
                samples=self.samples,
                spans=Spans(emit),
                sample_groups_per_step=0,
            ),
            text=TOKENIZER,
            engine=self.engine,
            lifecycle=self.engine,
            eval_prompts=HELD_OUT if judged else (),
            eval_batch=eval_batch,
        )
        spec = StageSpec(name="cold_start", objective=objective or SftConfig(), steps=steps, seed=7)
        config = OfflineConfig(
            records_per_step=3, snapshot_every_steps=2, export_every_steps=2, eval_every_steps=3
        )
        self.loop = OfflineLoop(spec, parts, config, judge=judge)

    def go(self, progress: StageProgress | None = None) -> StageProgress:
        async def start() -> StageProgress:
            await self.engine.start(dummy=False)
            return await self.loop.run(progress or StageProgress(stage="cold_start"))

        return run(start())

    def rows(self, kind: str) -> list[dict]:
        return [row for row in read_events(self.log) if row["kind"] == kind]

    def steps(self) -> list[tuple]:
        return [
            (row["step"], row["version"], row["num_tokens"], row["metrics"]["loss"])
            for row in self.rows("step.done")
        ]


def test_data_feeds_the_trainer_step_by_step(tmp_path):
    bench = Offline(tmp_path)
    progress = bench.go()
    assert progress.done and progress.step == 6
    assert [len(batch.sequences) for batch in bench.trainer.batches] == [3] * 6
    assert [batch.step for batch in bench.trainer.batches] == list(range(1, 7))
    assert [row["version"] for row in bench.rows("step.done")] == list(range(1, 7))
    assert {phase for phase, what in bench.trainer.calls if what == "step"} == {"train"}
    assert {phase for phase, what in bench.trainer.calls if what.startswith("evaluate")} == {
        "score"
    }
    assert sorted(bench.shelf.kept) == [2, 4, 6]
    assert bench.exports.made == [("train", 2), ("train", 4), ("train", 6)]
    assert (
        json.loads(bench.shelf.kept[6][0])["done"]
        and not json.loads(bench.shelf.kept[4][0])["done"]
    )
    assert progress.evals["loss"].items() >= {"before": 0.5, "after": 0.5, "n": 4}.items()


def test_a_judged_stage_hands_its_weights_over_before_it_generates(tmp_path):
    bench = Offline(tmp_path, judged=True, eval_batch=None)
    progress = bench.go()
    assert set(progress.evals) == {"accuracy"}
    assert progress.evals["accuracy"]["before"] < progress.evals["accuracy"]["after"]
    assert [(row["step"], row["version"]) for row in bench.rows("weights.published")] == [
        (0, 0),
        (3, 3),
        (6, 6),
    ]
    assert {phase for phase, _ in bench.engine.asked} == {"evaluate"}
    assert [phase for phase, _ in bench.gate.seen] == ["handover", "evaluate", "train"] * 3


def test_the_loss_and_the_accuracy_are_kept_apart(tmp_path):
    progress = Offline(tmp_path, judged=True).go()
    assert set(progress.evals) == {"loss", "accuracy"}


@pytest.mark.parametrize("stop_at", [2, 4])
def test_resumed_it_is_the_stage_that_never_stopped(tmp_path, stop_at):
    straight, first = Offline(tmp_path / "a"), Offline(tmp_path / "b")
    straight.go()
    first.go()
    state, blobs, own = first.shelf.kept[stop_at]
    second = Offline(tmp_path / "b")
    loop_state = json.loads(state)
    second.events.fence(loop_state["events"]["attempt"], loop_state["events"]["seq"])
    asyncio.run(second.trainer.restore(own))
    progress = second.go(from_snapshot(loop_state, blobs))
    assert second.steps() == straight.steps()
    assert progress.evals["loss"].items() >= {"before": 0.5, "after": 0.5, "n": 4}.items()
    assert len(second.rows("eval.done")) == len(straight.rows("eval.done"))


def test_pair_accuracy_counts_pairs_whose_chosen_scores_higher(tmp_path):
    pairs = [(1.0, 0.0), (0.0, 1.0), (2.0, -1.0), (0.5, 0.5)]
    batch = TrainBatch(
        sequences=tuple(example(0, score) for pair in pairs for score in pair), step=0
    )
    outcome = asyncio.run(pair_accuracy(CountingTrainer(emit=lambda kind, **fields: None), batch))
    # a tie is half a hit
    assert (outcome.metric, outcome.value, outcome.n) == ("pair_accuracy", 0.625, 4)
    assert outcome.detail["margin"] == pytest.approx((1 - 1 + 3 + 0) / 4)
    progress = Offline(tmp_path, objective=RmConfig(), eval_batch=batch, steps=1).go()
    assert (
        progress.evals["pair_accuracy"].items() >= {"before": 0.625, "after": 0.625, "n": 4}.items()
    )


class TableTrainer(CountingTrainer):
    """Log-probs from a table: one value for each sequence's targets, 9 elsewhere, where nobody must
    look."""

    def __init__(self, policy: list[float], reference: list[float]) -> None:
        super().__init__(emit=lambda kind, **fields: None)
        self._tables = {"policy": policy, "reference": reference}

    async def evaluate(self, batch, which):
        per_token = tuple(
            np.where(s.columns["loss_mask"], np.float32(value), np.float32(9.0))
            for s, value in zip(batch.sequences, self._tables[which], strict=True)
        )
        return Evaluation(which=which, per_token=per_token)


def test_preference_accuracy_compares_gains_over_the_reference():
    batch = TrainBatch(sequences=(example(0), example(1), example(2), example(3)), step=0)
    trainer = TableTrainer(policy=[-1.0, -1.0, -2.0, -1.0], reference=[-2.0, -1.0, -1.0, -3.0])
    outcome = asyncio.run(preference_accuracy(trainer, batch))
    gains = [1.0 * 2, 0.0 * 3, -1.0 * 4, 2.0 * 2]  # targets: 2, 3, 4, 2
    assert (outcome.value, outcome.n) == (0.5, 2)
    assert outcome.detail["margin"] == pytest.approx(
        ((gains[0] - gains[1]) + (gains[2] - gains[3])) / 2
    )


def test_held_out_loss_is_a_mean_over_targets():
    batch = TrainBatch(sequences=(example(0), example(2)), step=0)
    outcome = asyncio.run(held_out_loss(TableTrainer(policy=[-1.0, -4.0], reference=[]), batch))
    assert outcome.value == pytest.approx((1.0 * 2 + 4.0 * 4) / 6) and outcome.n == 2
