"""A vLLM that answers with the wrong number of tokens is lost to its pool: another engine goes on from
what was right, or the request ends by name."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings
from gyre.core.chunks import collect
from gyre.core.errors import RankError
from gyre.core.records import Completion, Request, RoleSpec, Sampling
from local_cluster import LocalCluster

Events = list[tuple[str, dict[str, Any]]]


def ask_pool(*more: int, told: int, chunk_tokens: int) -> tuple[Completion, Events]:
    """The answer for one request of 3 tokens, by engines of which each last answer has so many
    tokens `more`, and what the pool and its workers told."""
    events: Events = []

    async def main() -> Completion:
        cluster = LocalCluster(
            on_event=lambda worker, kind, **fields: events.append((kind, fields))
        )
        specs = [
            RoleSpec(
                name=f"engine-{at}",
                builder="scripted_vllm:build_scripted",
                arguments={"told": told, "more": count},
            )
            for at, count in enumerate(more)
        ]
        pool = EnginePool(
            cluster,
            [await cluster.start(spec) for spec in specs],
            settings=PoolSettings(call_deadline_s=10.0, hang_s=10.0, progress_tokens=1),
            emit=lambda kind, **fields: events.append((kind, fields)),
        )
        request = Request(
            request_id="r",
            tokens=np.arange(1, 5, dtype=np.int32),
            sampling=Sampling(max_tokens=3, ignore_eos=True),
            seed=3,
            chunk_tokens=chunk_tokens,
        )
        try:
            (found,) = await collect(pool.submit(request))
            return found
        finally:
            await pool.close()
            await cluster.close()

    return asyncio.run(asyncio.wait_for(main(), 30)), events


@pytest.mark.parametrize("chunk_tokens", [0, 1])
@pytest.mark.parametrize("told", [0, 1, 3])
@pytest.mark.parametrize("more", [1, -1])
def test_another_engine_goes_on_from_what_was_right(
    more: int, told: int, chunk_tokens: int
) -> None:
    found, events = ask_pool(more, 0, told=told, chunk_tokens=chunk_tokens)
    assert found.finish == "length" and found.tokens.tolist() == [0, 1, 2]
    lost = [fields for kind, fields in events if kind == "engine.lost"]
    assert [row["engine"] for row in lost] == ["engine-0"]
    wrong = "4 tokens of at most 3" if more == 1 else "by its length with 2 of 3 tokens"
    assert wrong in lost[0]["cause"]
    (failed,) = [fields for kind, fields in events if kind == "engine.completion_failed"]
    assert wrong in failed["error"]


def test_the_request_ends_by_name_where_no_engine_answers_it_right() -> None:
    with pytest.raises(RankError, match="every engine is lost"):
        ask_pool(1, 1, told=0, chunk_tokens=1)
