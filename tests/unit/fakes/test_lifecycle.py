"""The scripted engine's versions, failures and memory: whole or not there, healed by a restart,
measured."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from fake_cases import Events, engine_of, joined, read, request, run
from fakes.config import FakeEngineConfig
from fakes.engine import Faults
from fakes.trainer import CountingTrainer
from gyre.core.errors import InputError, SnapshotError
from gyre.core.offers import LocalTensors


@pytest.mark.parametrize("policy", ["drain", "keep_prefix", "continue"])
def test_tokens_carry_the_version_that_chose_them(policy):
    async def go() -> None:
        engine = engine_of({"1+2=": ["abcdefgh"]}, config=FakeEngineConfig(token_delay_s=0.005))
        await engine.start(dummy=False)
        offer = await CountingTrainer(emit=Events(), version=7).register()
        stream = engine.submit(request())
        await anext(stream)
        await engine.prepare(offer)
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
        offer = await CountingTrainer(emit=Events(), version=3).register()
        with pytest.raises(InputError, match="not prepared"):
            await engine.commit(3, policy="drain")
        with pytest.raises(SnapshotError, match="not whole"):
            await engine.prepare(
                replace(offer, source=LocalTensors(tensors={"version": torch.zeros(1)}))
            )
        await engine.prepare(offer)
        await engine.rollback()
        with pytest.raises(InputError, match="not prepared"):
            await engine.commit(3, policy="drain")
        await engine.prepare(offer)
        await engine.commit(3, policy="drain")
        assert (await engine.health()).ok
        broken = engine_of(faults=Faults(fail_prepare=True))
        with pytest.raises(InputError, match="started"):
            await broken.prepare(offer)
        await broken.start(dummy=True)
        with pytest.raises(RuntimeError, match="told not to"):
            await broken.prepare(offer)

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
        await engine.prepare(await CountingTrainer(emit=Events(), version=2).register())
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


def test_memory_moves_are_measured():
    engine = engine_of()
    sizes = {c.name: c.size_bytes for c in engine.components()}
    engine.move(["engine.kv"], "none")
    engine.move(["engine.weights"], "host")
    used = engine.measure()
    assert (used["engine.kv"].device_bytes, used["engine.kv"].host_bytes) == (0, 0)
    assert (used["engine.weights"].device_bytes, used["engine.weights"].host_bytes) == (
        0,
        sizes["engine.weights"],
    )
    engine.move(list(sizes), "device")
    assert {name: use.device_bytes for name, use in engine.measure().items()} == sizes
    assert {c.name: c.tier for c in engine.components()} == dict.fromkeys(sizes, "device")
    with pytest.raises(InputError, match="disk"):
        engine.move(["engine.kv"], "disk")
    with pytest.raises(InputError, match="no component 'kv'"):
        engine.move(["kv"], "host")
