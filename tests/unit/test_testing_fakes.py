"""The shipped fakes keep the contracts, and go wrong only as they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import DeadlineError, InputError, SnapshotError
from gyre.core.records import Prompt, Request, Rollout, Sampling, TokenChunk, TrainBatch, TrainSequence
from gyre.testing.config import FakeEngineConfig, FakeScorerConfig, FakeSourceConfig, FakeTrainerConfig
from gyre.testing.engine import Faults, ScriptedEngine
from gyre.testing.scorer import TableScorer
from gyre.testing.script import byte_tokenizer, learning_script, sum_prompts, table_script
from gyre.testing.source import ListSource
from gyre.testing.trainer import CountingTrainer

TOKENIZER = byte_tokenizer()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(coroutine, 20)

    return asyncio.run(limited())


class Events:
    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        self.seen.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.seen]


def request(request_id: str = "r", text: str = "1+2=", **sampling: Any) -> Request:
    fields = {
        key: sampling.pop(key) for key in ("chunk_tokens", "deadline_s", "priority", "grammar") if key in sampling
    }
    tokens = TOKENIZER.encode(text)
    return Request(request_id=request_id, tokens=tokens, sampling=Sampling(**sampling), **fields)


def engine_of(table: dict[str, list[str]] | None = None, *, emit: Events | None = None, **more: Any) -> ScriptedEngine:
    script = table_script(table or {"1+2=": ["3", "four"]}, TOKENIZER)
    return ScriptedEngine(script, emit=emit or Events(), eos_ids=TOKENIZER.eos_ids, **more)


async def read(stream: Any) -> dict[int, list[TokenChunk]]:
    chunks: dict[int, list[TokenChunk]] = {}
    async for chunk in stream:
        chunks.setdefault(chunk.index, []).append(chunk)
    return chunks


def joined(chunks: list[TokenChunk], name: str = "tokens") -> list[Any]:
    return np.concatenate([getattr(chunk, name) for chunk in chunks]).tolist()


@pytest.mark.parametrize("chunk_tokens", [0, 1, 2, 5])
def test_a_completion_is_the_script_whatever_the_chunks(chunk_tokens):
    async def go() -> None:
        engine = engine_of()
        await engine.start(dummy=False)
        chunks = await read(engine.submit(request(n=3, chunk_tokens=chunk_tokens)))
        texts = [TOKENIZER.decode(joined(chunks[i]), skip_special=True) for i in range(3)]
        assert texts == ["3", "four", "3"]
        for parts in chunks.values():
            assert [part.finish for part in parts[:-1]] == [None] * (len(parts) - 1)
            assert parts[-1].finish == "stop"
            assert set(joined(parts, "versions")) == {0}
            assert set(joined(parts, "logprobs")) == {-0.5}
            assert all(chunk_tokens == 0 or len(part.tokens) <= chunk_tokens for part in parts)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.generated_tokens) == (0, 0, 2 + 5 + 2)

    run(go())


def test_why_a_completion_ends():
    async def go() -> None:
        engine = engine_of({"1+2=": ["abcdef"]}, decode=TOKENIZER.decode)
        await engine.start(dummy=False)
        letter = int(TOKENIZER.encode("c")[0])
        cases = [
            (request(max_tokens=2), "ab", "length"),
            (request(stop_ids=(letter,)), "abc", "stop"),
            (request(stop=("cd",)), "abcd", "stop"),
            (request(), "abcdef", "stop"),
        ]
        for asked, text, finish in cases:
            chunks = await read(engine.submit(asked))
            assert TOKENIZER.decode(joined(chunks[0]), skip_special=True) == text
            assert chunks[0][-1].finish == finish

    run(go())


def test_refusals_are_answers_with_reasons():
    emit = Events()

    async def refused(engine: ScriptedEngine, asked: Request) -> str:
        chunks = await read(engine.submit(asked))
        assert [[c.finish for c in parts] for parts in chunks.values()] == [["refused"]] * max(1, asked.sampling.n)
        return chunks[0][0].reason

    async def go() -> None:
        faults = Faults(refuse=lambda asked: "no thirteen" if asked.request_id == "13" else "")
        engine = engine_of(emit=emit, faults=faults)
        assert "not started" in await refused(engine, request(n=2))
        await engine.start(dummy=True)
        assert "dummy" in await refused(engine, request())
        assert not (await engine.health()).ok
        with pytest.raises(InputError, match="runs already"):
            await engine.start(dummy=False)
        await engine.prepare(*CountingTrainer(emit=Events()).register())
        await engine.commit(0, policy="drain")
        assert "context" in await refused(engine, request(max_tokens=5000))
        assert "grammar" in await refused(engine, request(grammar="x"))
        assert "tokenizer" in await refused(engine, request(stop=("x",)))
        assert "at least 1" in await refused(engine, request(n=0))
        assert await refused(engine, request("13")) == "no thirteen"
        first, second = engine.submit(request()), engine.submit(request())
        assert "in flight" in (await read(second))[0][0].reason
        assert (await read(first))[0][-1].finish == "stop"
        engine.move(["engine.kv"], "host")
        assert "not on the device" in await refused(engine, request())
        assert (await engine.stats()).refused == 9
        assert emit.kinds() == ["engine.refused"] * 9

    run(go())


def test_submission_is_immediate_and_priority_goes_first():
    async def go() -> None:
        engine = engine_of(config=FakeEngineConfig(max_running=1))
        await engine.start(dummy=False)
        done: list[str] = []

        async def follow(stream: Any, name: str) -> None:
            await read(stream)
            done.append(name)

        streams = [engine.submit(request(name, priority=p)) for name, p in (("low", 0), ("mid", 1), ("high", 2))]
        assert (await engine.stats()).waiting == 3
        await asyncio.gather(*(follow(s, name) for s, name in zip(streams, ("low", "mid", "high"), strict=True)))
        assert done == ["high", "mid", "low"]

    run(go())


def test_interrupt_then_go_on_gives_the_same_tokens():
    async def go() -> None:
        engine = engine_of({"1+2=": ["abcdefghij"]}, config=FakeEngineConfig(token_delay_s=0.005))
        await engine.start(dummy=False)
        whole = joined((await read(engine.submit(request(top_p=0.9))))[0])
        stream = engine.submit(request(top_p=0.9))
        early = [await anext(stream) for _ in range(4)]
        partials = await engine.interrupt(deadline_s=1)
        rest = [chunk async for chunk in stream]
        assert rest[-1].finish == "interrupted"
        (partial,) = partials["r"]
        assert joined([*early, *rest]) == partial.tokens.tolist() == whole[: len(partial.tokens)]
        assert partial.support is not None
        assert len(partial.support.offsets) == len(partial.tokens) + 1
        again = replace(request(top_p=0.9), partials=(partial,))
        later = (await read(engine.submit(again)))[0]
        assert partial.tokens.tolist() + joined(later) == whole
        assert await engine.interrupt(deadline_s=1) == {}

    run(go())


@pytest.mark.parametrize("policy", ["drain", "keep_prefix", "continue"])
def test_tokens_carry_the_version_that_chose_them(policy):
    async def go() -> None:
        engine = engine_of({"1+2=": ["abcdefgh"]}, config=FakeEngineConfig(token_delay_s=0.005))
        await engine.start(dummy=False)
        manifest, source = CountingTrainer(emit=Events(), version=7).register()
        stream = engine.submit(request())
        await anext(stream)
        await engine.prepare(manifest, source)
        assert (await engine.stats()).version == 0
        await engine.commit(7, policy=policy)
        await engine.commit(7, policy=policy)
        versions = joined([chunk async for chunk in stream], "versions")
        assert versions == sorted(versions)
        assert set(versions) == ({0} if policy == "drain" else {0, 7} if 0 in versions else {7})
        assert (await engine.stats()).version == 7
        assert set(joined((await read(engine.submit(request())))[0], "versions")) == {7}

    run(go())


def test_a_version_is_whole_or_not_there():
    async def go() -> None:
        engine = engine_of()
        await engine.start(dummy=True)
        manifest, source = CountingTrainer(emit=Events(), version=3).register()
        with pytest.raises(InputError, match="not prepared"):
            await engine.commit(3, policy="drain")
        with pytest.raises(SnapshotError, match="not whole"):
            await engine.prepare(manifest, {"version": torch.zeros(1)})
        await engine.prepare(manifest, source)
        await engine.rollback()
        with pytest.raises(InputError, match="not prepared"):
            await engine.commit(3, policy="drain")
        await engine.prepare(manifest, source)
        await engine.commit(3, policy="drain")
        assert (await engine.health()).ok
        broken = engine_of(faults=Faults(fail_prepare=True))
        with pytest.raises(InputError, match="started"):
            await broken.prepare(manifest, source)
        await broken.start(dummy=True)
        with pytest.raises(RuntimeError, match="told not to"):
            await broken.prepare(manifest, source)

    run(go())


def test_waits_end_by_their_deadline_and_name_what_they_waited_for():
    async def go() -> None:
        engine = engine_of(faults=Faults(stalled=frozenset({"slow"})), config=FakeEngineConfig(drain_deadline_s=0.01))
        await engine.start(dummy=False)
        stream = engine.submit(request("slow"))
        with pytest.raises(DeadlineError, match="slow"):
            await engine.drain(deadline_s=0.01)
        await engine.prepare(*CountingTrainer(emit=Events(), version=1).register())
        with pytest.raises(DeadlineError, match="version 1"):
            await engine.commit(1, policy="drain")
        await engine.abort("slow")
        await engine.abort("nobody")
        assert (await read(stream))[0][-1].finish == "abort"
        await engine.drain(deadline_s=1)
        late = await read(engine.submit(request("slow", deadline_s=0.01)))
        assert (late[0][-1].finish, "0.01 s" in late[0][-1].reason) == ("deadline", True)

    run(go())


def test_a_stream_closed_early_aborts_its_request():
    async def go() -> None:
        engine = engine_of({"1+2=": ["abcdefgh"]}, config=FakeEngineConfig(token_delay_s=0.005))
        await engine.start(dummy=False)
        stream = engine.submit(request())
        await anext(stream)
        await stream.aclose()
        await engine.drain(deadline_s=0)
        unread = engine.submit(request())
        await unread.aclose()
        assert [chunk async for chunk in unread] == []
        assert (await read(engine.submit(request())))[0][-1].finish == "stop"

    run(go())


def test_a_failure_answers_every_stream_and_a_restart_heals():
    emit = Events()

    async def go() -> None:
        engine = engine_of({"1+2=": ["abcd"]}, emit=emit, faults=Faults(crash_after_tokens=4))
        await engine.start(dummy=False)
        streams = [engine.submit(request(name)) for name in ("a", "b", "c")]
        ends = [(await read(stream))[0][-1] for stream in streams]
        assert [end.finish for end in ends] == ["abort"] * 3
        assert all("told to fail" in end.reason for end in ends)
        assert "told to fail" in (await engine.health()).reason
        assert emit.kinds() == ["engine.failed"]
        assert (await read(engine.submit(request())))[0][-1].finish == "refused"
        await engine.start(dummy=False)
        assert (await engine.health()).ok
        assert (await read(engine.submit(request())))[0][-1].finish == "stop"

    run(go())


def test_terminate_frees_everything():
    async def go() -> None:
        engine = engine_of(faults=Faults(stalled=frozenset({"r"})))
        await engine.start(dummy=False)
        stream = engine.submit(request())
        await engine.terminate()
        assert (await read(stream))[0][-1].finish == "abort"
        assert sum(use.device_bytes + use.host_bytes for use in engine.measure().values()) == 0
        assert "not started" in (await engine.health()).reason
        with pytest.raises(InputError, match="freed"):
            await engine.start(dummy=False)
        await engine.start(dummy=True)
        await engine.prepare(*CountingTrainer(emit=Events(), version=2).register())
        await engine.commit(2, policy="drain")
        assert joined((await read(engine.submit(request("again"))))[0], "versions") == [2, 2]

    run(go())


def test_nothing_advances_while_a_component_is_away():
    async def go() -> None:
        engine = engine_of({"1+2=": ["abcdef"]}, config=FakeEngineConfig(token_delay_s=0.002))
        await engine.start(dummy=False)
        stream = engine.submit(request())
        await anext(stream)
        engine.move(["engine.kv"], "none")
        parked = (await engine.stats()).generated_tokens
        await asyncio.sleep(0.02)
        assert (await engine.stats()).generated_tokens == parked
        assert "engine.kv" in (await engine.health()).reason
        engine.move(["engine.kv"], "device")
        assert [chunk async for chunk in stream][-1].finish == "stop"
        engine.move(["engine.weights"], "none")
        engine.move(["engine.weights"], "device")
        assert "dummy" in (await engine.health()).reason

    run(go())


def test_a_broken_script_is_a_failure_and_not_a_hang():
    async def go() -> None:
        engine = engine_of(decode=lambda ids: "".join(ids))
        await engine.start(dummy=False)
        (end,) = (await read(engine.submit(request(stop=("x",)))))[0]
        assert (end.finish, "TypeError" in end.reason) == ("abort", True)

    run(go())


def test_memory_moves_are_measured():
    engine = engine_of()
    sizes = {c.name: c.size_bytes for c in engine.components()}
    engine.move(["engine.kv"], "none")
    engine.move(["engine.weights"], "host")
    used = engine.measure()
    assert (used["engine.kv"].device_bytes, used["engine.kv"].host_bytes) == (0, 0)
    assert (used["engine.weights"].device_bytes, used["engine.weights"].host_bytes) == (0, sizes["engine.weights"])
    engine.move(list(sizes), "device")
    assert {name: use.device_bytes for name, use in engine.measure().items()} == sizes
    assert {c.name: c.tier for c in engine.components()} == dict.fromkeys(sizes, "device")
    with pytest.raises(InputError, match="disk"):
        engine.move(["engine.kv"], "disk")
    with pytest.raises(InputError, match="no component 'kv'"):
        engine.move(["kv"], "host")


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
    train, held_out = sum_prompts(FakeSourceConfig(num_prompts=40, held_out_fraction=0.25, seed=3), TOKENIZER)
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
                tokens=np.arange(length + 2, dtype=np.int32), columns={"loss_mask": mask}, scalars={"score": length}
            )
        )
    return TrainBatch(sequences=tuple(sequences), step=step)


def test_the_trainer_keeps_books():
    emit = Events()

    async def go() -> None:
        trainer = CountingTrainer(emit=emit, config=FakeTrainerConfig(sequences_per_update=2), version=10)
        report = await trainer.step(batch_of([3, 0, 4, 1]))
        assert (report.step, report.version, report.num_updates) == (5, 12, 2)
        assert (report.num_tokens, report.metrics["target_tokens"]) == (5 + 6 + 3, 8.0)
        idle = await trainer.step(batch_of([0, 0]))
        assert (idle.version, idle.num_updates) == (12, 0)
        assert emit.kinds() == ["trainer.nothing_to_train"]
        manifest, tensors = trainer.register()
        assert (manifest.version, tensors["version"].tolist()) == (12, [12.0])
        again = CountingTrainer(emit=emit)
        again.restore(trainer.snapshot())
        assert again.register()[0] == manifest
        assert again.snapshot()["tensors"]["counts"].tolist() == [12, 8]
        with pytest.raises(SnapshotError, match="grpo"):
            again.restore({"tensors": {}, "state": {"objective": "grpo"}})
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
        assert trainer.register()[0].version == 0
        assert emit.kinds() == ["fake.failure"]

    run(go())


def rollout(name: str, text: str) -> Rollout:
    none, empty = np.empty(0, np.float32), np.empty(0, np.int32)
    prompt = Prompt(prompt_id="p", tokens=empty, text="1+2=", task={"answer": "3"}, source="fake")
    return Rollout(
        rollout_id=name,
        group_id="g",
        prompt=prompt,
        tokens=empty,
        sampled=np.empty(0, bool),
        logprobs=none,
        raw_logprobs=none,
        versions=empty,
        sampling=Sampling(),
        finish="stop",
        text=text,
    )


def test_the_scorer_compares_answers_in_order():
    scorer = TableScorer(emit=Events())
    scores = run(scorer.score([rollout("a", "3"), rollout("b", "4"), rollout("c", " 3\n")], deadline_s=1))
    assert [(s.rollout_id, s.value) for s in scores] == [("a", 1.0), ("b", 0.0), ("c", 1.0)]
    table = TableScorer({"x": 0.5}, emit=Events())
    assert [s.value for s in run(table.score([rollout("a", "x"), rollout("b", "y")], deadline_s=1))] == [0.5, 0.0]
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
    assert emit.kinds() == ["rewards.failed"] * 3


@settings(deadline=None)
@given(size=st.integers(1, 12), seed=st.integers(0, 5), first=st.integers(1, 30), then=st.integers(1, 30))
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
    """Rollout, score, train, hand over, by hand: the score rises with the version that sampled it."""

    async def go() -> list[float]:
        emit, config = Events(), FakeEngineConfig(start_accuracy=0.2, gain_per_version=0.2)
        engine = ScriptedEngine(learning_script(config, TOKENIZER), emit=emit, config=config, eos_ids=TOKENIZER.eos_ids)
        train, _ = sum_prompts(FakeSourceConfig(num_prompts=200), TOKENIZER)
        source, trainer, scorer = ListSource(train), CountingTrainer(emit=emit), TableScorer(emit=emit)
        await engine.start(dummy=False)
        means = []
        for step in range(5):
            rollouts, sequences = [], []
            for place, prompt in enumerate(source.take(32)):
                name = f"{step}/{place}"
                asked = Request(request_id=name, tokens=prompt.tokens, sampling=Sampling(n=4), seed=place)
                for index, chunks in (await read(engine.submit(asked))).items():
                    assert set(joined(chunks, "versions")) == {step}
                    text = TOKENIZER.decode(joined(chunks), skip_special=True)
                    rollouts.append(replace(rollout(f"{name}/{index}", text), prompt=prompt))
                    tokens = np.concatenate([prompt.tokens, np.array(joined(chunks), dtype=np.int32)])
                    mask = np.arange(len(tokens)) >= len(prompt.tokens)
                    sequences.append(TrainSequence(tokens=tokens, columns={"loss_mask": mask}))
            scores = await scorer.score(rollouts, deadline_s=5)
            means.append(float(np.mean([s.value for s in scores])))
            report = await trainer.step(TrainBatch(sequences=tuple(sequences), step=step))
            await engine.prepare(*trainer.register())
            await engine.commit(report.version, policy="drain")
        return means

    means = run(go())
    assert means == sorted(means)
    assert means[0] == pytest.approx(0.2, abs=0.12)
    assert means[-1] == 1.0
