"""The other fakes keep their contracts, go wrong only as they are told to, and turn the ring
together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_cases import TOKENIZER, Events, joined, read, request, rollout, run
from fakes.config import FakeEngineConfig, FakeScorerConfig, FakeSourceConfig, FakeTrainerConfig
from fakes.engine import ScriptedEngine
from fakes.scorer import TableScorer
from fakes.script import learning_script, sum_prompts
from fakes.source import ListSource
from fakes.trainer import CountingTrainer
from gyre.core.errors import SnapshotError
from gyre.core.records import Request, Rollout, Sampling, TrainBatch, TrainSequence


def test_the_learning_script_gets_better_with_versions():
    config = FakeEngineConfig(start_accuracy=0.2, gain_per_version=0.1)
    script = learning_script(config, TOKENIZER)
    asked = [replace(request(text=f"{i}+5="), seed=i) for i in range(200)]

    def accuracy(version: int) -> float:
        texts = [TOKENIZER.decode(script(r, 0, version), skip_special=True) for r in asked]
        return sum(text == str(i + 5) for i, text in enumerate(texts)) / 200

    assert accuracy(0) == pytest.approx(0.2, abs=0.08)
    assert accuracy(0) < accuracy(4) < accuracy(8) == 1.0
    assert script(asked[3], 1, 2) == script(asked[3], 1, 2)


def test_sum_prompts_are_different_and_split():
    train, held_out = sum_prompts(
        FakeSourceConfig(num_prompts=40, held_out_fraction=0.25, seed=3), TOKENIZER
    )
    assert (len(train), len(held_out)) == (30, 10)
    assert len({p.prompt_id for p in (*train, *held_out)}) == 40
    for prompt in train:
        assert TOKENIZER.decode(prompt.tokens) == prompt.text
        left, right = prompt.text.removesuffix("=").split("+")
        assert prompt.task["answer"] == str(int(left) + int(right))


def batch_of(lengths: list[int], step: int = 5) -> TrainBatch:
    sequences = []
    for length in lengths:
        mask = np.zeros(length + 2, dtype=bool)
        mask[2:] = True
        sequences.append(
            TrainSequence(
                tokens=np.arange(length + 2, dtype=np.int32),
                columns={"loss_mask": mask},
                scalars={"score": length},
            )
        )
    return TrainBatch(sequences=tuple(sequences), step=step)


def test_the_trainer_keeps_books():
    emit = Events()

    async def go() -> None:
        trainer = CountingTrainer(
            emit=emit, config=FakeTrainerConfig(sequences_per_update=2), version=10
        )
        report = await trainer.step(batch_of([3, 0, 4, 1]))
        assert (report.step, report.version, report.num_updates) == (5, 12, 2)
        assert (report.num_tokens, report.metrics["target_tokens"]) == (5 + 6 + 3, 8.0)
        idle = await trainer.step(batch_of([0, 0]))
        assert (idle.version, idle.num_updates) == (12, 0)
        assert emit.kinds() == ["trainer.nothing_to_train"]
        manifest, tensors = (offer := await trainer.register()).manifest, offer.source.tensors
        assert (manifest.version, tensors["version"].tolist()) == (12, [12.0])
        again = CountingTrainer(emit=emit)
        await again.restore(await trainer.snapshot())
        assert (await again.register()).manifest == manifest
        assert (await again.snapshot())["tensors"]["counts"].tolist() == [12, 8]
        with pytest.raises(SnapshotError, match="grpo"):
            await again.restore({"tensors": {}, "state": {"objective": "grpo"}})
        await trainer.close()
        assert sum(use.device_bytes for use in trainer.measure().values()) == 0

    run(go())


def test_the_trainer_evaluates_targets_only():
    async def go() -> None:
        trainer, batch = CountingTrainer(emit=Events()), batch_of([2, 0])
        for which, value in (("policy", -0.5), ("reference", -0.5), ("critic", 0.0)):
            found = await trainer.evaluate(batch, which)
            assert [a.tolist() for a in found.per_token] == [[0.0, 0.0, value, value], [0.0, 0.0]]
        assert (await trainer.evaluate(batch, "reward")).per_sequence.tolist() == [2.0, 0.0]
        assert (await trainer.evaluate(batch, "critic")).per_sequence.tolist() == [0.0, 0.0]

    run(go())


def test_the_trainer_fails_when_told_and_changes_nothing():
    emit = Events()

    async def go() -> None:
        trainer = CountingTrainer(emit=emit, fail_at_steps=[5])
        with pytest.raises(RuntimeError, match="step 5"):
            await trainer.step(batch_of([3]))
        assert (await trainer.register()).version == 0
        assert emit.kinds() == ["trainer.update_skipped"]

    run(go())


def test_the_scorer_compares_answers_in_order():
    scorer = TableScorer(emit=Events())
    scores = run(
        scorer.score([rollout("a", "3"), rollout("b", "4"), rollout("c", " 3\n")], deadline_s=1)
    )
    assert [(s.rollout_id, s.value) for s in scores] == [("a", 1.0), ("b", 0.0), ("c", 1.0)]
    table = TableScorer({"x": 0.5}, emit=Events())
    assert [
        s.value for s in run(table.score([rollout("a", "x"), rollout("b", "y")], deadline_s=1))
    ] == [0.5, 0.0]
    assert run(table.score([], deadline_s=1)) == []


def test_the_scorer_labels_failures_and_keeps_its_deadline():
    emit = Events()

    def judge(item: Rollout) -> float:
        return {"nan": float("nan"), "ok": 1.0}[item.text]

    async def go() -> list[str]:
        scorer = TableScorer(judge, emit=emit, config=FakeScorerConfig(), delays_s={"slow": 100.0})
        items = [rollout("a", "ok"), rollout("b", "nan"), rollout("c", "?"), rollout("slow", "ok")]
        scores = await scorer.score(items, deadline_s=0.05)
        assert all(np.isfinite(s.value) and s.ended_s >= s.started_s for s in scores)
        await scorer.close()
        return [s.parts[0].outcome for s in scores]

    assert run(go()) == ["ok", "invalid", "error", "timeout"]
    assert sorted(emit.kinds()) == ["reward.error", "reward.invalid", "reward.timeout"]


@settings(deadline=None)
@given(
    size=st.integers(1, 12),
    seed=st.integers(0, 5),
    first=st.integers(1, 30),
    then=st.integers(1, 30),
)
def test_the_source_goes_on_exactly_where_its_state_was_taken(size, seed, first, then):
    records = [f"record {i}" for i in range(size)]
    source = ListSource(records, seed=seed)
    source.take(first)
    state = source.state()
    expected = source.take(then)
    other = ListSource(records, seed=seed)
    other.restore(state)
    assert other.take(then) == expected
    fresh = ListSource(records, seed=seed)
    assert sorted(fresh.take(size)) == sorted(records)
    assert fresh.take(then) == ListSource(records, seed=seed).take(size + then)[size:]
    with pytest.raises(SnapshotError):
        ListSource([*records, "another"], seed=seed).restore(state)


def test_the_fakes_turn_the_ring():
    """Rollout, score, train, hand over, by hand: the score rises with the version that sampled
    it."""

    async def go() -> list[float]:
        emit, config = Events(), FakeEngineConfig(start_accuracy=0.2, gain_per_version=0.2)
        engine = ScriptedEngine(
            learning_script(config, TOKENIZER), emit=emit, config=config, eos_ids=TOKENIZER.eos_ids
        )
        train, _ = sum_prompts(FakeSourceConfig(num_prompts=200), TOKENIZER)
        source, trainer, scorer = (
            ListSource(train),
            CountingTrainer(emit=emit),
            TableScorer(emit=emit),
        )
        await engine.start(dummy=False)
        means = []
        for step in range(5):
            rollouts, sequences = [], []
            for place, prompt in enumerate(source.take(32)):
                name = f"{step}/{place}"
                asked = Request(
                    request_id=name, tokens=prompt.tokens, sampling=Sampling(n=4), seed=place
                )
                for index, chunks in (await read(engine.submit(asked))).items():
                    assert set(joined(chunks, "versions")) == {step}
                    text = TOKENIZER.decode(joined(chunks), skip_special=True)
                    rollouts.append(replace(rollout(f"{name}/{index}", text), prompt=prompt))
                    tokens = np.concatenate(
                        [prompt.tokens, np.array(joined(chunks), dtype=np.int32)]
                    )
                    mask = np.arange(len(tokens)) >= len(prompt.tokens)
                    sequences.append(TrainSequence(tokens=tokens, columns={"loss_mask": mask}))
            scores = await scorer.score(rollouts, deadline_s=5)
            means.append(float(np.mean([s.value for s in scores])))
            report = await trainer.step(TrainBatch(sequences=tuple(sequences), step=step))
            await engine.prepare(await trainer.register())
            await engine.commit(report.version, policy="drain")
        return means

    means = run(go())
    assert means == sorted(means)
    assert means[0] == pytest.approx(0.2, abs=0.12)
    assert means[-1] == 1.0
