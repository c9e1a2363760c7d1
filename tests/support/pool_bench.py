"""A pool of simulated engines whose every answer and notice a test places. In: engines by name,
settings. Out: a Bench, requests, and what their readers found. Callers: tests of the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from cluster_sim import SimCluster, SimEngine
from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings
from gyre.cluster.engine_pool.restarts import RestartPolicy
from gyre.core.offers import LocalTensors, Offer, WeightSource
from gyre.core.records import Manifest, Request, Sampling, TokenChunk

A, B = "engine-0", "engine-1"


class Bench:
    def __init__(
        self,
        names: tuple[str, ...] = (A, B),
        *,
        vital: tuple[str, ...] = (),
        revive: bool = True,
        starts_with_weights: bool = False,
        page_tokens: int = 0,
        num_pages: int = 0,
        **settings: Any,
    ) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.full_disk_at = ""  # kind of event that cannot be written
        self.sim = SimCluster(page_tokens=page_tokens, num_pages=num_pages)
        self.pool = EnginePool(
            self.sim,  # type: ignore[arg-type]
            [self.sim.make(name) for name in names],
            settings=PoolSettings(
                **{
                    "call_deadline_s": 60.0,
                    "hang_s": 60.0,
                    "progress_tokens": 2,
                    "restarts": RestartPolicy(max_restarts=3),
                    **settings,
                }
            ),
            emit=self.note,
            vital=frozenset(vital),
            revive=self.sim.revive if revive else None,
            starts_with_weights=starts_with_weights,
        )
        self.sim.pool_version = lambda: self.pool.version

    def note(self, kind: str, **fields: Any) -> None:
        if kind == self.full_disk_at:
            raise OSError(28, "No space left on device")
        self.events.append((kind, fields))

    def count(self, kind: str) -> int:
        return sum(name == kind for name, _ in self.events)

    def state(self, name: str) -> str:
        return self.pool.members[name].state

    async def publish(self, version: int, source: WeightSource | None = None) -> None:
        await self.pool.prepare(empty_offer(version, source))
        await self.pool.commit(version, policy="drain")

    async def prepare(self, version: int) -> None:
        await self.pool.prepare(empty_offer(version))

    async def until(self, true: Callable[[], Any]) -> None:
        for _ in range(2000):
            if true():
                return
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert true(), self.events

    async def reach(self, engine: SimEngine, method: str) -> None:
        await self.until(lambda: engine.asked(method))

    def hold(self, *methods: str) -> None:
        self.sim.held |= set(methods)

    def release(self, *methods: str) -> None:
        self.sim.held -= set(methods)
        for lives in self.sim.lives.values():
            for engine in lives:
                engine.serve()

    def read(self, request: Request) -> asyncio.Task[dict[int, list[TokenChunk]]]:
        task = asyncio.create_task(read(self.pool.submit(request)))
        # some are not read to their end
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def settle(self) -> None:
        """Until nothing moves any more."""
        for _ in range(50):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)


def empty_offer(version: int, source: WeightSource | None = None) -> Offer:
    """Of a model without tensors."""
    manifest = Manifest(version=version, entries=(), shared=False)
    return Offer(manifest=manifest, source=source or LocalTensors(tensors={}))


def go(work: Callable[[Bench], Awaitable[None]], *args: Any, **settings: Any) -> None:
    async def main() -> None:
        bench = Bench(*args, **settings)
        try:
            await asyncio.wait_for(work(bench), 60)  # type: ignore[arg-type]
        finally:
            await bench.pool.close()

    asyncio.run(main())


def ask(name: str, *, n: int = 1, max_tokens: int = 8, **fields: Any) -> Request:
    sampling = Sampling(max_tokens=max_tokens, n=n)
    tokens = np.arange(1, 6, dtype=np.int32)
    return Request(
        request_id=name, tokens=tokens, sampling=sampling, seed=len(name), chunk_tokens=1, **fields
    )


async def read(stream: Any) -> dict[int, list[TokenChunk]]:
    found: dict[int, list[TokenChunk]] = {}
    async for chunk in stream:
        found.setdefault(chunk.index, []).append(chunk)
    return found


def tokens_of(chunks: list[TokenChunk]) -> list[int]:
    return np.concatenate([chunk.tokens for chunk in chunks]).tolist()


def finishes(found: dict[int, list[TokenChunk]]) -> list[str | None]:
    return [chunks[-1].finish for chunks in found.values()]


async def step(bench: Bench, engine: SimEngine, count: int) -> None:
    """So many tokens, and a poll that takes them."""
    await bench.reach(engine, "engine.poll")
    engine.step(count)
    engine.perform()
    await bench.settle()


async def drive(bench: Bench, tasks: list[asyncio.Task[Any]], *, tokens: int = 0) -> None:
    """Let every engine answer its polls, and work, until these are done."""
    for _ in range(400):
        for lives in bench.sim.lives.values():
            engine = lives[-1]
            if tokens:
                engine.step(tokens)
            if engine.asked("engine.poll"):
                engine.perform()
        await asyncio.sleep(0 if tokens else 0.001)
        if all(task.done() for task in tasks):
            return
    raise AssertionError(f"not done: {tasks}; {bench.events}")


async def finish(bench: Bench, tasks: list[asyncio.Task[Any]]) -> None:
    """Let every engine work until these are answered, wholly."""
    await drive(bench, tasks, tokens=4)
    for task in tasks:
        assert set(finishes(task.result())) == {"length"}
