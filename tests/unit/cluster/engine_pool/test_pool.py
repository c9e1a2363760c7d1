"""The engine pool over workers that are threads: what a lost engine costs, and when it takes work
again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch

from cluster_roles import VOCAB, recite
from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings
from gyre.cluster.engine_pool.restarts import RestartPolicy
from gyre.core.errors import RankError
from gyre.core.records import Request, RoleSpec, Sampling, TokenChunk
from local_cluster import LocalCluster
from offers import offer_of

Events = list[tuple[str, dict[str, Any]]]
WEIGHTS = {"w": torch.ones(3)}


class Bench:
    """A pool of fake engines; `kill` ends one like a process."""

    def __init__(self, **settings: Any) -> None:
        self.events: Events = []
        self.cluster = LocalCluster(
            on_event=lambda worker, kind, **fields: self.note(kind, **fields)
        )
        self.settings = PoolSettings(
            **{
                "call_deadline_s": 20.0,
                "hang_s": 20.0,
                "progress_tokens": 2,
                "restarts": RestartPolicy(max_restarts=1),
                **settings,
            }
        )
        self.starts = 0

    def note(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == kind]

    async def start(self, name: str, **arguments: Any) -> Any:
        self.starts += 1
        arguments = {"token_delay_s": 0.002, **arguments}
        return await self.cluster.start(
            RoleSpec(name=name, builder="cluster_roles:fake_engine", arguments=arguments)
        )

    async def pool(
        self,
        num: int,
        *,
        vital: tuple[str, ...] = (),
        revive: bool = True,
        behind: int = 0,
        **arguments: Any,
    ) -> EnginePool:
        """`behind`: further workers, which are ranks of the first engine."""
        handles = [await self.start(f"engine-{i}", **arguments) for i in range(num)]
        others = [await self.start(f"rank-{i + 1}", **arguments) for i in range(behind)]
        made = EnginePool(
            self.cluster,
            handles,
            settings=self.settings,
            emit=self.note,
            vital=frozenset(vital),
            revive=self.start if revive else None,
            other_ranks={"engine-0": others},
        )
        await made.start(dummy=False)
        await publish(made, 1)
        return made

    def kill(self, name: str) -> None:
        self.cluster.handles[name].kill("killed by a test")

    async def until(self, kind: str) -> None:
        while not self.kinds(kind):
            await asyncio.sleep(0.005)


async def publish(pool: EnginePool, version: int) -> None:
    await pool.prepare(offer_of(version, WEIGHTS, checksums=True))
    await pool.commit(version, policy="drain")


def go(work: Callable[[Bench], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        bench = Bench(**settings)
        try:
            await asyncio.wait_for(work(bench), 40)  # type: ignore[arg-type]
        finally:
            await bench.cluster.close()

    asyncio.run(main())


def ask(name: str, *, n: int = 2, max_tokens: int = 60, chunk_tokens: int = 0) -> Request:
    sampling = Sampling(max_tokens=max_tokens, n=n)
    tokens = np.arange(1, 8, dtype=np.int32)
    return Request(
        request_id=name, tokens=tokens, sampling=sampling, seed=len(name), chunk_tokens=chunk_tokens
    )


async def read(stream: Any) -> dict[int, list[TokenChunk]]:
    found: dict[int, list[TokenChunk]] = {}
    async for chunk in stream:
        found.setdefault(chunk.index, []).append(chunk)
    return found


def check_whole(request: Request, found: dict[int, list[TokenChunk]]) -> None:
    for index in range(request.sampling.n):
        tokens = np.concatenate([chunk.tokens for chunk in found[index]])
        assert tokens.tolist() == recite(request, index, 1)[: request.sampling.max_tokens]
        assert [chunk.finish for chunk in found[index]][-1] == "length"
        assert len(found[index]) == 1 if request.chunk_tokens == 0 else True


def test_requests_spread_by_tokens_and_completions_stay_together() -> None:
    async def work(bench: Bench) -> None:
        pool = await bench.pool(2)
        requests = [
            ask("long", n=4, max_tokens=100),
            *(ask(f"short{i}", max_tokens=20) for i in range(4)),
        ]
        streams = [pool.submit(request) for request in requests]
        for request, stream in zip(requests, streams, strict=True):
            check_whole(request, await read(stream))
        counts = [
            (
                await asyncio.wrap_future(
                    bench.cluster.handles[f"engine-{i}"].begin("engine.stats")
                )
            ).generated_tokens
            for i in range(2)
        ]
        assert counts == [400, 160]
        assert (await pool.stats()).generated_tokens == 560
        await pool.close()

    go(work)


@pytest.mark.parametrize("chunk_tokens", [0, 3])
def test_a_lost_engine_costs_its_own_requests_and_they_go_on(chunk_tokens: int) -> None:
    async def work(bench: Bench) -> None:
        pool = await bench.pool(2)
        requests = [ask("a" * (i + 1), chunk_tokens=chunk_tokens) for i in range(6)]
        streams = [pool.submit(request) for request in requests]
        reads = [asyncio.create_task(read(stream)) for stream in streams]
        while (lives := pool.router.all()) and min(live.book.num_tokens for live in lives) < 8:
            await asyncio.sleep(0.002)
        bench.kill("engine-0")
        for request, task in zip(requests, reads, strict=True):
            check_whole(request, await task)
        again = bench.kinds("retry.request_requeued")
        assert len(again) == 3 and all(fields["kept_tokens"] >= 8 for fields in again)
        (lost,) = bench.kinds("engine.lost")
        assert (
            lost["engine"] == "engine-0"
            and lost["requests"] == 3
            and "killed by a test" in lost["cause"]
        )
        await bench.until("engine.rejoined")
        assert (await pool.stats()).version == 1
        await pool.close()

    go(work)


def test_the_only_engine_comes_back_and_answers() -> None:
    """While no engine is there, requests wait for the one that is on its way back; it has the
    weights first."""

    async def work(bench: Bench) -> None:
        pool = await bench.pool(1)
        request = ask("r")
        task = asyncio.create_task(read(pool.submit(request)))
        await asyncio.sleep(0.01)
        bench.kill("engine-0")
        found = await task
        check_whole(request, found)
        assert {
            int(version)
            for chunks in found.values()
            for chunk in chunks
            for version in chunk.versions
        } == {1}
        order = [kind for kind, _ in bench.events if kind.startswith("engine.re")]
        assert order == ["engine.restarted", "engine.rejoined"]
        await pool.close()

    go(work)


def test_an_engine_that_was_idle_when_it_died_takes_work_again_after_the_next_version() -> None:
    async def work(bench: Bench) -> None:
        pool = await bench.pool(2)
        bench.kill("engine-1")
        await bench.until("engine.rejoined")
        await publish(pool, 2)
        requests = [ask("x" * (i + 1)) for i in range(4)]
        for stream in [pool.submit(request) for request in requests]:
            for chunks in (await read(stream)).values():
                assert {int(v) for chunk in chunks for v in chunk.versions} == {2}
        stats = await asyncio.wrap_future(bench.cluster.handles["engine-1"].begin("engine.stats"))
        assert stats.version == 2 and stats.generated_tokens > 0
        await pool.close()

    go(work)


def test_an_engine_is_restarted_as_often_as_is_allowed() -> None:
    async def work(bench: Bench) -> None:
        pool = await bench.pool(2)
        bench.kill("engine-0")
        await bench.until("engine.rejoined")
        bench.kill("engine-0")
        await bench.until("engine.restarts_exhausted")
        assert bench.starts == 3
        request = ask("still")
        check_whole(request, await read(pool.submit(request)))
        health = await pool.health()
        assert health.ok and "engine-0: lost" in health.reason
        await pool.close()

    go(work)


def test_an_engine_that_reads_its_weights_answers_again_without_a_version() -> None:
    """The only engine is lost twice: its requests wait, and go on from what had come."""

    async def work(bench: Bench) -> None:
        pool = EnginePool(
            bench.cluster,
            [await bench.start("engine-0")],
            settings=bench.settings,
            emit=bench.note,
            revive=bench.start,
            starts_with_weights=True,
            version=0,
        )
        await pool.start(dummy=False)
        request = ask("held", chunk_tokens=1)
        reading = asyncio.create_task(read(pool.submit(request)))
        for number in (1, 2):
            while pool.router.find("held").book.num_tokens < 20 * number:
                await asyncio.sleep(0.002)
            bench.kill("engine-0")
            while len(bench.kinds("engine.rejoined")) < number:
                await asyncio.sleep(0.002)
        found = await reading
        for index, chunks in found.items():
            tokens = np.concatenate([chunk.tokens for chunk in chunks])
            assert tokens.tolist() == recite(request, index, 0)[: request.sampling.max_tokens]
        assert len(bench.kinds("engine.restarted")) == 2 and pool.version == 0
        assert all(fields["kept_tokens"] >= 20 for fields in bench.kinds("retry.request_requeued"))
        await pool.close()

    go(work, restarts=RestartPolicy(max_restarts=2))


def test_no_more_wait_for_an_engine_than_may() -> None:
    async def work(bench: Bench) -> None:
        may_start = asyncio.Event()

        async def start_later(name: str) -> Any:
            await may_start.wait()
            return await bench.start(name)

        pool = EnginePool(
            bench.cluster,
            [await bench.start("engine-0")],
            settings=bench.settings,
            emit=bench.note,
            revive=start_later,
            starts_with_weights=True,
        )
        await pool.start(dummy=False)
        bench.kill("engine-0")
        await bench.until("engine.lost")
        waiting = [asyncio.create_task(read(pool.submit(ask(f"w{i}")))) for i in range(2)]
        await asyncio.sleep(0)
        (chunk,) = (await read(pool.submit(ask("over", n=1))))[0]
        assert chunk.finish == "refused" and "at most 4 may" in chunk.reason
        may_start.set()
        for task in waiting:
            assert [chunks[-1].finish for chunks in (await task).values()] == ["length"] * 2
        await pool.close()

    go(work, max_waiting=4)


def test_without_any_engine_a_request_ends_with_an_error() -> None:
    async def work(bench: Bench) -> None:
        pool = await bench.pool(1, revive=False)
        task = asyncio.create_task(read(pool.submit(ask("r"))))
        await asyncio.sleep(0.01)
        bench.kill("engine-0")
        with pytest.raises(RankError, match="every engine is lost"):
            await task
        with pytest.raises(RankError, match="every engine is lost"):
            await read(pool.submit(ask("later")))
        await pool.close()

    go(work)


def test_an_engine_beside_a_trainer_rank_is_vital() -> None:
    async def work(bench: Bench) -> None:
        pool = await bench.pool(2, vital=("engine-0", "engine-1"))
        tasks = [asyncio.create_task(read(pool.submit(ask("a" * (i + 1))))) for i in range(4)]
        await asyncio.sleep(0.01)
        bench.kill("engine-1")
        for task in tasks:
            with pytest.raises(RankError, match=r"engine-1 .* is lost: .*killed by a test"):
                await task
        with pytest.raises(RankError, match="engine-1"):
            await publish(pool, 2)
        assert not (await pool.health()).ok and bench.starts == 2
        await pool.close()

    go(work)


def test_a_vital_engine_is_lost_with_any_of_its_ranks_by_name() -> None:
    """The pool calls the first rank alone, and sees the others end."""

    async def work(bench: Bench) -> None:
        pool = await bench.pool(2, vital=("engine-0", "engine-1"), behind=2)
        task = asyncio.create_task(read(pool.submit(ask("a"))))
        await asyncio.sleep(0.01)
        bench.kill("rank-2")
        with pytest.raises(RankError, match=r"engine-0 .* is lost: rank-2 .*killed by a test"):
            await task
        (lost,) = bench.kinds("engine.lost")
        assert lost["engine"] == "engine-0" and "a rank of its engine, ended" in lost["cause"]
        await pool.close()

    go(work)


def test_an_engine_that_hangs_is_lost_with_its_stacks() -> None:
    """It answers polls and does no step: the first request never gets a token there."""

    async def work(bench: Bench) -> None:
        pool = await bench.pool(2, stalled=("stuck",))
        with pytest.raises(RankError, match="every engine is lost"):
            await read(pool.submit(ask("stuck")))
        causes = [fields["cause"] for fields in bench.kinds("engine.lost")]
        assert causes and all(
            "no progress of the engine for 1 s" in cause and "thread" in cause for cause in causes
        )
        await pool.close()

    go(work, hang_s=1.0, restarts=RestartPolicy())


def test_a_request_that_the_books_cannot_hold_is_refused() -> None:
    async def work(bench: Bench) -> None:
        pool = await bench.pool(1)
        first = pool.submit(ask("same"))
        twice = await read(pool.submit(ask("same")))
        assert len(twice) == ask("same").sampling.n, "each completion has an answer"
        for (chunk,) in twice.values():
            assert chunk.finish == "refused" and "in flight already" in chunk.reason
        for n in (0, -1, 10**9, "two"):
            refused = await read(pool.submit(ask(f"n {n}", n=n)))  # type: ignore[arg-type]
            assert refused[0][0].finish == "refused" and "sampling.n" in refused[0][0].reason
        check_whole(ask("same"), await read(first))
        assert (await pool.stats()).refused == 5 and VOCAB > 0
        await pool.close()

    go(work)
