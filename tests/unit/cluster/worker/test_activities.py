"""What a trainer rank and an engine tell of their activities, as they do them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fakes.config import FakeEngineConfig, FakeTrainerConfig
from fakes.engine import ScriptedEngine
from fakes.trainer import CountingTrainer
from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.cluster.worker.trainer_endpoint import TrainerEndpoint
from gyre.core.errors import InputError
from gyre.core.records import Request, Sampling, TrainBatch
from gyre.observability.spans import ActivityClock


class Told:
    """A clock that goes on by a second with each look, and what was told by it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.now_s = 0.0
        self.set_back_s = 0.0
        self.clock = ActivityClock(self._emit, clock=self._look)

    @property
    def names(self) -> list[str]:
        return [row["activity"] for row in self.rows]

    def _emit(self, kind: str, /, **fields: Any) -> None:
        if kind == "pod.clock_set_back":
            self.set_back_s += fields["seconds"]
            return
        assert kind == "pod.activity"
        self.rows.append(fields)

    def _look(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_an_activity_that_raises_is_not_told_and_one_that_began_before_is_whole() -> None:
    told = Told()
    with pytest.raises(InputError), told.clock.timing("train"):
        raise InputError("no", hint="none")
    told.clock.begin("dummy_start", ago_s=9.0).end()
    assert told.rows == [{"activity": "dummy_start", "seconds": 10.0}]


def test_a_wall_clock_that_was_set_back_makes_no_activity_shorter_and_is_told() -> None:
    told = Told()
    told.clock.begin("dummy_start", ago_s=-9.0).end()
    assert told.rows == [{"activity": "dummy_start", "seconds": 1.0}]
    assert told.set_back_s == 9.0


def test_a_rank_tells_of_its_steps_and_passes() -> None:
    told = Told()
    trainer = CountingTrainer(
        emit=lambda kind, **fields: None, config=FakeTrainerConfig(sequences_per_update=4)
    )
    rank = TrainerEndpoint(trainer, rank=0, compute=ThreadPoolExecutor(1), activities=told.clock)

    async def main() -> None:
        batch = TrainBatch(sequences=(), step=1)
        await rank.evaluate(batch, "policy")
        await rank.step(batch)

    asyncio.run(main())
    assert told.names == ["score", "train"]
    assert all(row == {"activity": row["activity"], "seconds": 1.0} for row in told.rows)


def test_an_engine_tells_of_an_update_with_its_bytes_and_of_rollouts_once() -> None:
    """Requests that overlap are one rollout, from the first that comes to the last answer."""
    told, held = Told(), [700, 700, 0]

    async def held_bytes() -> int:
        return held.pop(0)

    engine = ScriptedEngine(
        lambda request, index, version: list(range(5)),
        emit=lambda kind, **fields: None,
        config=FakeEngineConfig(context_tokens=64, max_running=4),
    )
    endpoint = EngineEndpoint(engine, activities=told.clock, held_bytes=held_bytes)
    trainer = CountingTrainer(
        emit=lambda kind, **fields: None, config=FakeTrainerConfig(sequences_per_update=4)
    )

    def request(name: str) -> Request:
        return Request(
            request_id=name,
            tokens=np.arange(4, dtype=np.int32),
            sampling=Sampling(max_tokens=4),
        )

    async def main() -> None:
        offer = await trainer.register(epoch=1)
        await endpoint.start(True)
        await endpoint.prepare(offer)
        await endpoint.commit(offer.version, "drain")
        await endpoint.submit([request("a"), request("b")])
        ended: set[str] = set()
        while ended != {"a", "b"}:
            ended |= set((await endpoint.poll()).ended)
        await endpoint.terminate()
        size = sum(entry.size_bytes for entry in offer.manifest.entries)
        assert told.names == ["dummy_start", "update", "update", "rollout", "terminate"]
        assert [row.get("size_bytes") for row in told.rows] == [700, None, size, None, 700]

    asyncio.run(main())
