"""What an engine's seat answers to a submit."""

from __future__ import annotations

import asyncio

import numpy as np

from fakes.engine import Faults, ScriptedEngine
from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.core.records import Request, Sampling


def ask(name: str) -> Request:
    return Request(
        request_id=name, tokens=np.arange(4, dtype=np.int32), sampling=Sampling(max_tokens=2, n=2)
    )


def test_a_submit_names_what_was_admitted() -> None:
    """A request that was refused is told of by the next poll."""

    async def main() -> None:
        engine = ScriptedEngine(
            lambda request, index, version: (1, 2),
            emit=lambda kind, **fields: None,
            faults=Faults(refuse=lambda request: "no" if request.request_id == "b" else ""),
        )
        seat = EngineEndpoint(engine)
        await seat.start(False)
        assert await seat.submit([ask("a"), ask("b"), ask("c")]) == ("a", "c")
        news = await seat.poll()
        assert [chunk.finish for chunk in news.chunks if chunk.request_id == "b"] == ["refused"] * 2

    asyncio.run(main())
