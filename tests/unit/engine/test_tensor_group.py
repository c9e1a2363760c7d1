"""An engine whose rank 0 leads and whose other rank follows, each with its part of the model, over
real processes: it serves as an engine alone does, and ends by name when a rank fails."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from gyre.core.chunks import collect
from gyre.core.errors import RankError
from gyre.core.records import Request, Sampling
from gyre.distributed.process_group import RankGroup, alone
from gyre.engine.engine import NativeEngine
from gyre.engine.scheduler.journal import Abort, Entry, Steps, encode_entry
from gyre.engine.tensor_group import EntryStream, lead
from layout_cases import spec_of
from rank_pool import RankPool
from tensor_cases import answers, served

SPEC = replace(
    spec_of("qwen3", hidden_size=16, num_layers=2, vocab_size=53, mlp_size=24),
    context_tokens=96,
    head_dim=8,
)
SETTINGS = {
    "page_tokens": 4,
    "max_running": 4,
    "token_budget": 16,
    "num_pages": 30,
    "burst_steps": 3,
    "c_kernels": False,
}
SOON_S = 30.0  # far below the group's timeout


def asked(name: str, count: int, **sampling: Any) -> list[Request]:
    rng = np.random.default_rng(count)
    return [
        Request(
            request_id=f"{name}{number}",
            tokens=rng.integers(0, 53, 9 + 5 * number).astype(np.int32),
            sampling=Sampling(**{"max_tokens": 24, **sampling}),
            seed=number,
            chunk_tokens=2,
        )
        for number in range(count)
    ]


async def traffic(engine: NativeEngine, offer: Callable[[int], Any]) -> list[Any]:
    """Requests, new weights, an abort, KV that leaves the device, and another life."""
    await engine.start(dummy=False)
    found = [await answers(engine, asked("greedy", 4, temperature=0.0))]
    found += [await answers(engine, asked("sampled", 3, temperature=1.0, n=2))]
    stopped = asyncio.ensure_future(collect(engine.submit(asked("stopped", 1, max_tokens=80)[0])))
    await asyncio.sleep(0.02)
    await engine.abort("stopped0")
    found += [(await stopped)[0].finish]
    await engine.prepare(offer(2))
    await engine.commit(2, policy="drain")
    found += [await answers(engine, asked("new", 4, temperature=0.0, top_logprobs=2))]
    for tier in ("none", "device"):
        await engine.frontend.on_compute(lambda tier=tier: engine.move(["engine.kv"], tier))
    found += [await answers(engine, asked("moved", 2, temperature=0.0))]
    await engine.terminate()
    await engine.start(dummy=True)
    await engine.prepare(offer(3))
    await engine.commit(3, policy="drain")
    found += [await answers(engine, asked("again", 3, temperature=0.0))]
    assert engine.core is not None
    found += [engine.core.state.counters.steps]
    await engine.terminate()
    return found


def test_a_leader_and_a_follower_serve_as_one_engine(pair: RankPool) -> None:
    """The follower's core made the steps of the leader's last one. Answers do not depend on which
    requests shared a step."""
    *one, _ = served(alone(), SPEC, traffic, SETTINGS)
    (*found, steps), followed = pair.run(served, SPEC, traffic, SETTINGS)
    assert found == one
    assert followed == steps > 10
    assert {part[2] for part in found[0]["greedy0"]} == {"length"}


async def failing(engine: NativeEngine, offer: Callable[[int], Any]) -> tuple[Any, str, float]:
    await engine.start(dummy=False)
    started_s = time.monotonic()
    found = await answers(engine, asked("r", 3, temperature=0.0))
    return found, engine.failure, time.monotonic() - started_s


def ended(told: tuple[bool, Any]) -> str:
    """Why the leader's engine failed, once everyone was answered soon."""
    failed, value = told
    assert not failed, value
    found, failure, seconds = value
    assert seconds < SOON_S
    assert {part[2] for parts in found.values() for part in parts} == {"abort"}
    return failure


@pytest.fixture
def mortal():
    """Ranks that a test may break."""
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_raises_ends_the_steps_of_both(mortal: RankPool, rank: int) -> None:
    leader, follower = mortal.attempt(served, SPEC, failing, SETTINGS, breaks=rank)
    failure = ended(leader)
    if rank == 0:
        assert failure == "RuntimeError: cosmic ray"
        assert follower[0] and "rank 0 failed: RuntimeError: cosmic ray" in follower[1][1]
    else:
        assert "rank 1 failed: RuntimeError: cosmic ray" in failure
        assert follower[0] and "cosmic ray" in follower[1][1]


@pytest.mark.slow
def test_a_follower_with_another_config_is_refused_by_name(mortal: RankPool) -> None:
    others = {"token_budget": 8, "num_pages": 31}
    leader, follower = mortal.attempt(served, SPEC, failing, SETTINGS, others=others)
    ended(leader)
    kind, text = follower[1]
    assert kind == "ConfigError"
    assert "engine.token_budget (16 there, 8 here)" in text and "KV pages (30 there, 31" in text


async def killing(
    follower: int, engine: NativeEngine, offer: Callable[[int], Any]
) -> tuple[Any, str, float]:
    """Serve once, and again after the follower's death."""
    await engine.start(dummy=False)
    await answers(engine, asked("r", 1))
    os.kill(follower, signal.SIGKILL)
    started_s = time.monotonic()
    return await answers(engine, asked("s", 1)), engine.failure, time.monotonic() - started_s


@pytest.mark.slow
def test_a_follower_that_dies_ends_the_steps(mortal: RankPool) -> None:
    drive = partial(killing, mortal.processes[1].pid)
    leader, _ = mortal.attempt(served, SPEC, drive, SETTINGS)
    assert "rank 1" in ended(leader)


def streams() -> tuple[EntryStream, EntryStream]:
    ours, theirs = socket.socketpair()
    return EntryStream(ours, 1, timeout_s=0.2), EntryStream(theirs, 0, timeout_s=0.2)


def test_entries_come_whole_and_end_with_the_stream() -> None:
    ours, theirs = streams()
    sent: list[Entry] = [Steps(count=3), Abort(request_ids=("a", "b"), reason="x" * 70_000)]
    received = theirs.entries()
    for entry in sent:
        ours.write(encode_entry(entry))
        assert next(received) == entry
    ours.close()
    assert list(received) == []


def test_an_end_that_takes_nothing_is_named_in_time() -> None:
    ours, _theirs = streams()
    with pytest.raises(RankError, match=r"rank 1 of the engine took no entry within 0.2 s"):
        for _ in range(100):
            ours.write(bytes(100_000))


def test_half_an_entry_is_no_entry() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"\x10\x00\x00\x00abc")
    ours.close()
    with pytest.raises(RankError, match="rank 0 ended within an entry"):
        list(EntryStream(theirs, 0, timeout_s=1.0).entries())


def lone_leader(group: RankGroup) -> str:
    """Rank 1 shares, but never connects."""
    if group.rank == 1:
        group.share(None)
        return ""
    with pytest.raises(RankError) as refused:
        lead(group, timeout_s=0.3)
    return str(refused.value)


def test_a_rank_that_does_not_come_is_named(pair: RankPool) -> None:
    expected = "ranks [1] of the engine did not connect within 0.3 s"
    assert expected in pair.run(lone_leader)[0]
