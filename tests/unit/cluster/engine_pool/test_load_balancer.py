"""The balancer in a pool: what it believes, sessions, engines that stand still, and what it counts.
Engines are simulated, so each moves when a test says so."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from cluster_sim import token_at
from gyre.cluster.engine_pool.ejection import EjectionPolicy
from gyre.core.records import Request, RoutingStats, Sampling
from pool_bench import A, B, Bench, drive, finish, go

PAGE = 4


def prompt(name: str, start: int, *more: int, answer: int = 8, session: str = "") -> Request:
    """Five pages that are the same for one `start`, then what is given."""
    tokens = [*range(start, start + 5 * PAGE), *more]
    return Request(
        request_id=name,
        tokens=np.array(tokens, np.int32),
        sampling=Sampling(max_tokens=answer),
        seed=start,
        chunk_tokens=1,
        session_id=session,
    )


async def begin(bench: Bench) -> None:
    await bench.pool.start(dummy=True)
    await bench.publish(1)


async def ask(bench: Bench, request: Request) -> str:
    """Return the engine that answered."""
    await finish(bench, [bench.read(request)])
    return took(bench, request.request_id)


def took(bench: Bench, request_id: str) -> str:
    return next(
        name
        for name, lives in bench.sim.lives.items()
        for engine in lives
        for call in engine.done
        if call.method == "engine.submit" and request_id in [one.request_id for one in call.args[0]]
    )


def stats(bench: Bench, name: str) -> RoutingStats:
    return bench.pool.balancer.stats(bench.pool.members[name], asyncio.get_running_loop().time())


def prefix(**fields: Any) -> dict[str, Any]:
    return {"routing": "prefix", "page_tokens": PAGE, "num_pages": 40, **fields}


def test_a_prefix_goes_to_the_engine_that_has_it_and_new_ones_to_the_other() -> None:
    async def work(bench: Bench) -> None:
        await begin(bench)
        first = [await ask(bench, prompt(f"first{i}", 100 * i)) for i in range(4)]
        assert first == [A, B, A, B]
        again = [await ask(bench, prompt(f"again{i}", 100 * i, 7)) for i in (3, 2, 1, 0)]
        assert again == first[::-1]
        assert [stats(bench, name).believed_hit_tokens for name in (A, B)] == [10 * PAGE] * 2
        assert [stats(bench, name).requests for name in (A, B)] == [4, 4]

    go(work, **prefix())


def test_the_answer_is_part_of_what_the_next_turn_finds() -> None:
    async def work(bench: Bench) -> None:
        await begin(bench)
        one = prompt("one", 0, answer=10)
        await ask(bench, one)
        answer = [token_at(one, 0, place) for place in range(10)]
        await ask(bench, prompt("two", 0, *answer, 1, 2))
        assert stats(bench, A).believed_hit_tokens == 7 * PAGE  # 5 of the prompt, 2 of the answer

    go(work, (A,), **prefix())


def test_new_weights_and_a_new_process_have_no_cache() -> None:
    async def work(bench: Bench) -> None:
        await begin(bench)
        await ask(bench, prompt("a", 0, session="s"))
        await bench.publish(2)
        await ask(bench, prompt("b", 0, session="s"))
        assert stats(bench, A).believed_hit_tokens == 0
        bench.sim.newest(A).die()
        await bench.until(lambda: bench.count("engine.rejoined"))
        await ask(bench, prompt("c", 0, session="s"))
        assert stats(bench, A).believed_hit_tokens == 0
        await ask(bench, prompt("d", 0, session="s"))
        # the last token is always computed, and with it the last page
        assert stats(bench, A).believed_hit_tokens == 4 * PAGE
        assert (stats(bench, A).sessions_kept, stats(bench, A).sessions) == (2, 1)

    go(work, (A,), **prefix())


def test_an_answer_that_began_before_new_weights_is_not_believed_cached() -> None:
    async def work(bench: Bench) -> None:
        await begin(bench)
        task = bench.read(prompt("a", 0, answer=12))
        await bench.settle()
        await bench.publish(2)
        await finish(bench, [task])
        await ask(bench, prompt("b", 0))
        assert stats(bench, A).believed_hit_tokens == 0

    go(work, (A,), **prefix())


def test_a_session_stays_at_its_engine_without_a_common_prefix() -> None:
    async def work(bench: Bench) -> None:
        await begin(bench)
        names = [await ask(bench, prompt(f"s{i}", 100 * i, session="one")) for i in range(4)]
        assert names == [A] * 4
        others = [await ask(bench, prompt(f"o{i}", 1000 + 100 * i)) for i in range(2)]
        assert others == [B, B]  # it had fewer
        found = stats(bench, A)
        assert (found.sessions_kept, found.sessions_moved, found.sessions) == (3, 0, 1)

    go(work, **prefix())


def test_a_session_leaves_an_engine_that_has_much_more_to_do() -> None:
    async def work(bench: Bench) -> None:
        await begin(bench)
        await ask(bench, prompt("s0", 0, session="one"))
        held = [bench.read(prompt(f"h{i}", 0, i, answer=200)) for i in range(3)]
        await bench.settle()
        moved = bench.read(prompt("s1", 500, session="one"))
        await bench.settle()
        busy = took(bench, "h0")
        assert busy == A and took(bench, "s1") == B
        assert stats(bench, B).sessions_moved == 1
        await finish(bench, [*held, moved])

    go(work, **prefix())


def test_an_engine_that_stands_still_gets_nothing_until_it_goes_on_and_then_slowly() -> None:
    async def work(bench: Bench) -> None:
        await begin(bench)
        held = bench.read(prompt("held", 0, answer=30))
        await bench.settle()
        assert took(bench, "held") == A
        await asyncio.sleep(0.1)  # A makes no progress
        tasks = [bench.read(prompt(f"r{i}", 0, i)) for i in range(6)]
        await bench.settle()
        assert {took(bench, f"r{i}") for i in range(6)} == {B}  # though A has the prefix
        assert (bench.count("engine.ejected"), stats(bench, A).share) == (1, 0.0)
        await drive(bench, [held, *tasks], tokens=4)
        later = await ask(bench, prompt("later", 900))
        assert later == B and bench.count("engine.returning") == 1
        assert 0.1 <= stats(bench, A).share < 0.2
        found = stats(bench, A)
        assert (found.ejections, found.load) == (1, 0)

    go(work, **prefix(ejection=EjectionPolicy(still_s=0.05, return_s=600.0)))


def test_where_every_engine_stands_still_requests_go_to_them_all_the_same() -> None:
    async def work(bench: Bench) -> None:
        await begin(bench)
        tasks = [bench.read(prompt(f"h{i}", 100 * i)) for i in range(2)]
        await bench.settle()
        await asyncio.sleep(0.1)
        tasks += [bench.read(prompt(f"r{i}", 100 * i)) for i in range(4)]
        await bench.settle()
        assert bench.count("engine.ejected") == 2
        assert bench.count("engine.ejections_ignored") == 1
        await finish(bench, tasks)

    go(work, **prefix(ejection=EjectionPolicy(still_s=0.05, return_s=600.0)))


def test_a_lost_engine_comes_back_with_a_small_share() -> None:
    async def work(bench: Bench) -> None:
        await begin(bench)
        bench.sim.newest(A).die()
        await bench.until(lambda: bench.count("engine.rejoined"))
        assert [await ask(bench, prompt(f"r{i}", 100 * i)) for i in range(4)] == [B] * 4
        assert (stats(bench, A).ejections, bench.count("engine.ejected")) == (1, 0)
        assert stats(bench, A).share < 0.2 and stats(bench, B).share == 1.0

    go(work, **prefix(ejection=EjectionPolicy(still_s=60.0, return_s=600.0)))


def test_round_robin_takes_turns_whatever_is_cached() -> None:
    async def work(bench: Bench) -> None:
        await begin(bench)
        assert [await ask(bench, prompt(f"r{i}", 0)) for i in range(5)] == [A, B, A, B, A]
        assert stats(bench, A).believed_hit_tokens == 0

    go(work, **prefix(routing="round_robin"))
