"""The pool under random schedules: engines die, come back, are late; versions go out; requests are
asked, aborted and interrupted in between. Whatever the order, nothing is answered twice, falsely or
never, and no engine works on old weights."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from cluster_sim import SimCluster, SimEngine, token_at
from gyre.cluster.engine_pool.ejection import EjectionPolicy
from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings
from gyre.cluster.engine_pool.restarts import RestartPolicy
from gyre.cluster.engine_pool.routing import RoutingPolicy
from gyre.core.errors import RankError
from gyre.core.records import Request, Sampling, TokenChunk
from pool_bench import empty_offer

NAMES = ("engine-0", "engine-1", "engine-2")
POLICIES: tuple[RoutingPolicy, ...] = ("prefix", "least_tokens", "round_robin")
MAX_RESTARTS = 2
TURNS = 220


class World:
    """One run of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.events: list[tuple[str, dict[str, Any]]] = []
        held = tuple(f"engine.{name}" for name in HELD)
        self.sim = SimCluster(held=held, page_tokens=2, num_pages=6)
        self.pool = EnginePool(
            self.sim,  # type: ignore[arg-type]
            [self.sim.make(name) for name in NAMES],
            settings=PoolSettings(
                call_deadline_s=60.0,
                hang_s=60.0,
                progress_tokens=2,
                restarts=RestartPolicy(max_restarts=MAX_RESTARTS),
                routing=POLICIES[seed % 3],
                ejection=EjectionPolicy(still_s=0.0005, return_s=0.001) if seed % 2 else None,
            ),
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            revive=self.sim.revive,
        )
        for engine in self.engines:
            engine.version = 0
        self.sim.pool_version = lambda: self.pool.version
        self.version = 0
        self.asked: list[tuple[Request, asyncio.Task[dict[int, list[TokenChunk]]]]] = []
        self.stopped: set[str] = set()  # requests that somebody asked to end
        self.business: set[asyncio.Task[Any]] = set()  # calls to the pool
        self.interrupts: list[asyncio.Task[Any]] = []
        self.publishing: asyncio.Task[Any] | None = None

    @property
    def engines(self) -> list[SimEngine]:
        return [engine for lives in self.sim.lives.values() for engine in lives]

    async def run(self) -> None:
        self.call(self.pool.start(dummy=True))
        self.publish()
        for _ in range(TURNS):
            self.act()
            for _ in range(self.random.randrange(4)):
                await asyncio.sleep(0)
        for _ in range(3000):  # no more faults: everything comes to its end
            if (
                not self.business
                and all(task.done() for _, task in self.asked)
                and not self.pool.returns
            ):
                break
            self.work()
            await asyncio.sleep(0)
        else:
            raise AssertionError(f"something waits for ever: {self.business} {self.events[-5:]}")

    def act(self) -> None:
        chance = self.random.random()
        if chance < 0.05:
            self.publish()
        elif chance < 0.15:
            self.ask()
        elif chance < 0.18:
            self.die()
        elif chance < 0.21 and self.asked:
            request, _ = self.random.choice(self.asked)
            self.stopped.add(request.request_id)
            self.call(self.pool.abort(request.request_id))
        elif chance < 0.22:
            self.stopped |= {request.request_id for request, _ in self.asked}
            self.interrupts.append(self.call(self.pool.interrupt(deadline_s=30.0)))
        elif chance < 0.25:
            self.call(self.pool.stats())
        else:
            self.work()

    def work(self) -> None:
        """Some engine takes a step or answers something."""
        engine = self.random.choice(self.engines)
        if engine.cause:
            return
        if self.random.random() < 0.5:
            engine.step(self.random.randrange(1, 4))
        if engine.open:
            engine.perform(self.pick(engine))

    def pick(self, engine: SimEngine) -> Any:
        """A poll waits and anything else comes in order: what is in flight to a worker keeps its
        order."""
        polls = engine.asked("engine.poll")
        others = [call for call in engine.open if call not in polls]
        heads = [*others[:1], *polls[:1]]
        return self.random.choice(heads)

    def die(self) -> None:
        alive = [engine for engine in self.engines if not engine.cause]
        if alive:
            engine = self.random.choice(alive)
            engine.die(noticed=self.random.random() < 0.5)

    def publish(self) -> None:
        if self.publishing is not None and not self.publishing.done():
            return
        self.version += 1
        self.publishing = self.call(self._publish(self.version))

    async def _publish(self, version: int) -> None:
        await self.pool.prepare(empty_offer(version))
        await self.pool.commit(version, policy="continue")

    def ask(self) -> None:
        number = len(self.asked)
        sampling = Sampling(max_tokens=self.random.randrange(1, 12), n=self.random.randrange(1, 4))
        tokens = np.arange(1, self.random.randrange(2, 9), dtype=np.int32)
        request = Request(
            request_id=f"r{number}",
            tokens=tokens,
            sampling=sampling,
            seed=number,
            chunk_tokens=number % 3,
            session_id=self.random.choice(["", "a", "b"]),
        )
        if not all(task.done() for task in self.interrupts):
            self.stopped.add(request.request_id)  # it may be in time for that
        self.asked.append((request, asyncio.create_task(read(self.pool.submit(request)))))

    def call(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self.business.add(task)
        task.add_done_callback(self.business.discard)
        return task


HELD = ("poll", "submit", "prepare", "commit", "rollback", "abort", "interrupt", "stats", "start")


async def read(stream: Any) -> dict[int, list[TokenChunk]]:
    found: dict[int, list[TokenChunk]] = {}
    async for chunk in stream:
        found.setdefault(chunk.index, []).append(chunk)
    return found


@pytest.mark.parametrize("block", range(4))
def test_whatever_the_order_every_request_has_one_true_answer(block: int) -> None:
    seen: set[str] = set()
    for seed in range(block * 25, block * 25 + 25):
        world = World(seed)

        async def main(world: World = world) -> None:
            try:
                await asyncio.wait_for(world.run(), 60)
                check(world)
            finally:
                await world.pool.close()

        try:
            asyncio.run(main())
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        seen |= {kind for kind, _ in world.events}
    assert seen >= {"engine.lost", "retry.request_requeued", "engine.rejoined"}, seen


def check(world: World) -> None:
    assert not [stale for engine in world.engines for stale in engine.stale], "work on old weights"
    lost = [fields["engine"] for kind, fields in world.events if kind == "engine.lost"]
    for name, lives in world.sim.lives.items():
        assert len(lives) <= 1 + MAX_RESTARTS
        assert lost.count(name) <= len([engine for engine in lives if engine.cause])
    requeued = [
        fields["request_id"] for kind, fields in world.events if kind == "retry.request_requeued"
    ]
    assert len(set(requeued)) <= len(world.asked)
    for member in world.pool.members.values():
        assert world.pool.balancer.stats(member, 0.0).load == 0, "a request still counts"
    all_gone = all(engine.cause for engine in world.engines)
    for request, task in world.asked:
        if task.exception() is not None:
            assert isinstance(task.exception(), RankError) and all_gone
            continue
        found = task.result()
        if found.get(0) and found[0][-1].finish == "refused":
            continue
        assert sorted(found) == list(range(request.sampling.n))
        for index, chunks in found.items():
            tokens = np.concatenate([chunk.tokens for chunk in chunks]).tolist()
            assert tokens == [token_at(request, index, place) for place in range(len(tokens))]
            assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [
                True
            ]
            if request.request_id not in world.stopped:
                assert chunks[-1].finish == "length" and len(tokens) == request.sampling.max_tokens
