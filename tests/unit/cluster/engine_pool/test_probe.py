"""How engines are: asked by a short deadline, with every answer placed by the test."""

from __future__ import annotations

import asyncio
import re

from hypothesis import given
from hypothesis import strategies as st

from cluster_sim import SimEngine
from gyre.cluster.engine_pool.probe import Probe, find_status
from gyre.core.records import EngineStats, Health, RoutingStats
from pool_bench import A, B, Bench, ask, finish, go, step

STALL_S = 0.2
STATS = EngineStats(
    running=0, waiting=0, prompt_tokens=0, prefix_hit_tokens=0, generated_tokens=0, preemptions=0,
    refused=0, steps=0, pages_used=0, pages_total=8, version=1,
)  # fmt: skip


def test_a_question_without_an_answer_is_not_asked_again() -> None:
    async def work() -> None:
        answers_at_once = False
        engine = SimEngine(A, lambda: 1, lambda method: answers_at_once)
        engine.version = 1
        probe = Probe(engine, "engine.health")
        assert [await probe.ask(0.01) for _ in range(5)] == [None] * 5
        assert len(engine.asked("engine.health")) == 1
        waiting = [asyncio.create_task(probe.ask(30)) for _ in range(2)]
        await asyncio.sleep(0)
        engine.perform()
        assert await asyncio.gather(*waiting) == [Health(ok=True)] * 2
        answers_at_once = True
        assert await probe.ask(30) == Health(ok=True)
        assert len(engine.done) == 2

    asyncio.run(work())


def test_who_asks_a_replica_that_is_closed_meanwhile_is_told_that_nothing_came() -> None:
    async def work() -> None:
        probe = Probe(SimEngine(A, lambda: 1, lambda method: False), "engine.health")
        waiting = asyncio.create_task(probe.ask(30))
        await asyncio.sleep(0)
        probe.cancel()
        assert await asyncio.wait_for(waiting, 10) is None

    asyncio.run(work())


def test_an_engine_that_does_not_answer_is_not_lost_and_the_other_one_is_ready() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        assert (await bench.pool.health()) == Health(ok=True)
        bench.hold("engine.health")
        asked = asyncio.create_task(bench.pool.health())
        await bench.reach(bench.sim.newest(B), "engine.health")
        bench.sim.newest(B).perform()
        health = await asked
        assert health.ok and health.reason == f"{A}: it had not answered after 0.05 s"
        assert (await bench.pool.health()).ok is False, "then neither does"
        assert bench.count("engine.lost") == 0
        bench.release("engine.health")
        assert (await bench.pool.health()) == Health(ok=True)

    go(work, probe_s=0.05)


def test_requests_without_progress_make_an_engine_unwell_until_it_goes_on() -> None:
    """Its event loop answers all along: its steps alone stand still."""

    async def work(bench: Bench) -> None:
        await bench.publish(1)
        await asyncio.sleep(2 * STALL_S)
        assert (await bench.pool.health()) == Health(ok=True), "an idle engine is ready"
        task, engine = bench.read(ask("r", max_tokens=200)), bench.sim.newest(A)
        await bench.reach(engine, "engine.poll")
        ends = asyncio.get_running_loop().time() + 2 * STALL_S
        while asyncio.get_running_loop().time() < ends:
            await bench.reach(engine, "engine.poll")
            engine.perform()
            await bench.settle()
        health = await bench.pool.health()
        assert health.ok, "the other one is ready"
        assert re.search(f"{A}: no progress for .* s with 1 requests under way", health.reason)
        while (await bench.pool.health()) != Health(ok=True):
            await step(bench, engine, 1)
        await finish(bench, [task])

    go(work, stall_s=STALL_S)


def test_of_a_broken_pool_no_engine_is_ready() -> None:
    async def work(bench: Bench) -> None:
        await bench.publish(1)
        bench.full_disk_at = "engine.lost"
        bench.sim.newest(A).die()
        await bench.settle()
        found = await bench.pool.inspect()
        assert [one.state for one in found] == ["lost", "unwell"]
        assert all("No space left" in one.reason for one in found)
        assert not (await bench.pool.health()).ok

    go(work)


@given(
    state=st.sampled_from(["up", "fresh", "lost"]),
    health=st.sampled_from([None, Health(ok=True), Health(ok=False, reason="on dummies")]),
    still_s=st.floats(0, 100),
    stall_s=st.floats(0.1, 50),
)
def test_an_engine_is_ready_exactly_when_nothing_is_wrong(state, health, still_s, stall_s) -> None:
    found = find_status(
        A, state, health, STATS, still_s=still_s, stall_s=stall_s, probe_s=2.0,
        num_requests=1, outstanding_tokens=3, routing=RoutingStats(),
    )  # fmt: skip
    is_well = health is not None and health.ok and still_s < stall_s
    assert (found.state == "ready") == (state == "up" and is_well)
    assert (found.state == "lost") == (state == "lost") == (found.stats is None)
    assert (found.reason == "") == (found.state == "ready")
