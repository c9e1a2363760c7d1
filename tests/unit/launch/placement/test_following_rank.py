"""An engine's rank behind the first enters phases as rank 0 does, and says within a deadline why it
does not. Over real processes the ledgers of both ranks come back to the same numbers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gyre.core.errors import InputError, MemoryBudgetError, RankError, WorkerLate, WorkerLost
from gyre.core.records import Component, Usage
from gyre.engine.scheduler.journal import MoveComponent
from gyre.engine.tensor_group import EnteredPhase, EntryStream
from gyre.launch.placement.following_rank import FollowedMemory, FollowingRank
from layout_cases import spec_of
from rank_pool import RankPool
from tensor_cases import PHASES, switched

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
    "kv_host_bytes": 4096,
    "c_kernels": False,
}


class Holder:
    """What plays rank 0's messages: one component, which may fail to move."""

    core = None

    def __init__(self, error: Exception | None = None) -> None:
        self.tier_now, self._error, self.memory = "device", error, self

    def tier(self, name: str) -> str:
        return self.tier_now

    def move(self, names: list[str], tier: str) -> None:
        if self._error is not None:
            raise self._error
        self.tier_now = tier


@contextmanager
def following(holder: Holder, *, timeout_s: float) -> Iterator[tuple[EntryStream, FollowingRank]]:
    """A rank that plays what is written to the stream."""
    ours, theirs = socket.socketpair()
    stream, compute = EntryStream(ours, 1, timeout_s=5.0), ThreadPoolExecutor(1)
    group: Any = SimpleNamespace(rank=1, timeout_s=timeout_s)
    try:
        yield (
            stream,
            FollowingRank(EntryStream(theirs, 0, timeout_s=5.0), holder, group, compute),  # type: ignore[arg-type]
        )
    finally:
        stream.close()
        compute.shutdown()


def parked(stream: EntryStream) -> None:
    stream.write(MoveComponent(component="engine.weights", tier="host"))
    stream.write(EnteredPhase(phase="train", step=3))


def test_a_phase_is_entered_when_rank_0_has_been_followed_there() -> None:
    async def work() -> None:
        holder = Holder()
        with following(holder, timeout_s=10.0) as (stream, rank):
            entering = asyncio.ensure_future(rank.enter("train", 3, lambda: holder.tier_now))
            await asyncio.sleep(0.1)
            assert not entering.done(), "rank 0 has not entered it"
            parked(stream)
            assert await entering == "host"
            # and where rank 0 was faster than the driver
            stream.write(MoveComponent(component="engine.weights", tier="device"))
            stream.write(EnteredPhase(phase="rollout", step=4))
            await asyncio.sleep(0.1)
            assert await rank.enter("rollout", 4, lambda: holder.tier_now) == "device"

    asyncio.run(work())


def test_a_phase_that_rank_0_does_not_enter_has_a_deadline() -> None:
    async def work() -> None:
        with following(Holder(), timeout_s=0.2) as (stream, rank):
            stream.write(EnteredPhase(phase="train", step=2))
            with pytest.raises(
                WorkerLate, match=r"rank 1 .* waited 0\.2 s for rank 0 to enter phase train of st"
            ) as late:
                await rank.enter("train", 3, list)
            assert "parallel.timeout_s" in late.value.hint

    asyncio.run(work())


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (MemoryBudgetError("no room on the host", hint="free some"), MemoryBudgetError, "no room"),
        (InputError("no such tier"), InputError, "no such tier"),
        (RankError("rank 0 ended within an entry"), WorkerLost, "within an entry"),
        (RuntimeError("cosmic ray"), WorkerLost, "RuntimeError: cosmic ray"),
    ],
)
def test_a_rank_that_cannot_park_says_so_at_once(
    error: Exception, kind: type[Exception], words: str
) -> None:
    async def work() -> None:
        with following(Holder(error), timeout_s=30.0) as (stream, rank):
            # it hears no more after that
            stream.write(MoveComponent(component="engine.weights", tier="host"))
            with pytest.raises(kind, match=words) as told:
                await asyncio.wait_for(rank.enter("train", 3, list), 5)
            assert isinstance(told.value, InputError) or "rank 1 of the engine" in f"{told.value}"

    asyncio.run(work())


def test_a_rank_whose_rank_0_has_gone_is_lost() -> None:
    async def work() -> None:
        with following(Holder(), timeout_s=30.0) as (stream, rank):
            entering = asyncio.ensure_future(rank.enter("train", 3, list))
            await asyncio.sleep(0.05)
            stream.close()
            with pytest.raises(WorkerLost, match=r"rank 1 .* follows no more: rank 0 has ended"):
                await asyncio.wait_for(entering, 5)

    asyncio.run(work())


def test_components_move_where_rank_0_says_and_nowhere_else() -> None:
    held = Component(name="engine.kv", size_bytes=8, tier="device", tiers=("device", "none"))
    usage = {"engine.kv": Usage(device_bytes=8, host_bytes=0, disk_bytes=0)}
    memory: Any = SimpleNamespace(components=lambda: [held], measure=lambda: usage)
    followed = FollowedMemory(memory, 2)
    assert followed.components() == [held] and followed.measure() == usage
    with pytest.raises(RankError, match=r"rank 2 .* would move engine\.kv to none, which rank 0"):
        followed.move(["engine.kv"], "none")


@pytest.mark.slow
def test_ledgers_of_both_ranks_return_to_the_same_numbers(pair: RankPool) -> None:
    """Over 20 switches, with work between them. A rank holds its part of the weights and of KV, and
    nothing of them while the trainer has the device."""
    (first, answers), (second, _) = pair.run(switched, SPEC, SETTINGS, 20)
    assert first == second, "equal parts"
    assert len(first) == 20 * len(PHASES)
    for at in range(len(PHASES)):
        assert all(row == first[at] for row in first[at :: len(PHASES)])
    by_phase = dict(zip(PHASES, first, strict=False))
    on_device = {
        phase: {name: sizes["device"] for name, sizes in row.items()}
        for phase, row in by_phase.items()
    }
    assert on_device["rollout"]["engine.weights"] > 0 < on_device["rollout"]["engine.kv"]
    assert on_device["handover"]["engine.weights"] > 0 == on_device["handover"]["engine.kv"]
    assert set(on_device["train"].values()) == {0}
    assert by_phase["train"]["engine.weights"]["host"] == on_device["rollout"]["engine.weights"]
    assert len(answers) == 20 and all(found == answers[0] for found in answers)
