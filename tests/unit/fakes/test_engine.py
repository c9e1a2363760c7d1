"""The scripted engine keeps the engine's contract: what it answers, when it refuses, and that no
wait is without end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from fake_cases import TOKENIZER, Events, engine_of, joined, read, request, run
from fakes.config import FakeEngineConfig
from fakes.engine import Faults, ScriptedEngine
from fakes.trainer import CountingTrainer
from gyre.core.errors import DeadlineError, InputError
from gyre.core.records import Request


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
        assert [[c.finish for c in parts] for parts in chunks.values()] == [["refused"]] * max(
            1, asked.sampling.n
        )
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
        await engine.prepare(await CountingTrainer(emit=Events()).register())
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

        streams = [
            engine.submit(request(name, priority=p))
            for name, p in (("low", 0), ("mid", 1), ("high", 2))
        ]
        assert (await engine.stats()).waiting == 3
        await asyncio.gather(
            *(follow(s, name) for s, name in zip(streams, ("low", "mid", "high"), strict=True))
        )
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


def test_waits_end_by_their_deadline_and_name_what_they_waited_for():
    async def go() -> None:
        engine = engine_of(
            faults=Faults(stalled=frozenset({"slow"})),
            config=FakeEngineConfig(drain_deadline_s=0.01),
        )
        await engine.start(dummy=False)
        stream = engine.submit(request("slow"))
        with pytest.raises(DeadlineError, match="slow"):
            await engine.drain(deadline_s=0.01)
        await engine.prepare(await CountingTrainer(emit=Events(), version=1).register())
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


def test_a_broken_script_is_a_failure_and_not_a_hang():
    async def go() -> None:
        engine = engine_of(decode=lambda ids: "".join(ids))
        await engine.start(dummy=False)
        (end,) = (await read(engine.submit(request(stop=("x",)))))[0]
        assert (end.finish, "TypeError" in end.reason) == ("abort", True)

    run(go())
