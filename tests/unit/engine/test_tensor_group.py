"""An engine whose rank 0 leads and whose other rank follows, each with its part of the model, over
real processes: it serves as an engine alone does, and ends by name when a rank fails."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gyre.core.chunks import collect
from gyre.core.errors import GyreError, InputError, RankError, SnapshotError
from gyre.core.offers import FolderTensors, Offer
from gyre.core.records import Manifest, Request, Sampling
from gyre.distributed.process_group import RankGroup, alone
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.engine.scheduler.journal import Abort, Entry, Steps
from gyre.engine.tensor_group import (
    LOOPBACK,
    TOKEN_BYTES,
    EndCore,
    EntryStream,
    Followers,
    agree_on_pages,
    lead,
)
from gyre.models.hub.export import export_hub
from gyre.models.hub.folders import WEIGHTS_FILE
from layout_cases import spec_of
from offers import offer_of
from rank_pool import RankPool
from tensor_cases import answers, decoder_of, fill_decoder, served, whole_version

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


async def taking(
    folders: tuple[str, str], engine: NativeEngine, offer: Callable[[int], Any]
) -> list[Any]:
    """Versions from registered shards and from a folder, and some that a rank cannot take."""
    await engine.start(dummy=False)
    good, damaged = (folder_offer(4 + at, folder) for at, folder in enumerate(folders))
    found = []

    async def look(name: str) -> None:
        found.append(await answers(engine, asked(name, 2, temperature=0.0)))

    async def refused(kind: type[GyreError], work: Awaitable[None]) -> None:
        with pytest.raises(kind) as error:
            await work
        assert not engine.failure
        found.append(str(error.value))

    await look("first")
    await refused(SnapshotError, engine.prepare(damaged))
    await engine.prepare(overwritten := offer(2))
    for version in (6, 7):
        offer(version)
    await refused(SnapshotError, engine.commit(2, policy="continue"))
    await look("still")
    await engine.rollback()
    await refused(InputError, engine.prepare(overwritten))
    with pytest.raises(InputError, match="not prepared"):
        await engine.commit(2, policy="drain")
    await engine.prepare(good)
    await engine.rollback()
    await engine.prepare(good)
    await engine.commit(4, policy="continue")
    await look("folder")
    await engine.prepare(offer(8))
    await engine.commit(8, policy="keep_prefix")
    await look("shards")
    await engine.terminate()
    return found


def folder_offer(version: int, folder: str) -> Offer:
    manifest = Manifest(version=version, entries=(), shared=False)
    return Offer(manifest=manifest, source=FolderTensors(folder=folder))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """A checkpoint, and a damaged one."""
    decoder = decoder_of(SPEC, alone(), dtype=torch.float32, scale=8.0)
    fill_decoder(decoder, seed=11, scale=8.0)
    for name in ("good", "damaged"):
        export_hub(decoder, tmp_path / name, dtype=torch.float32, tokenizer_files=None)
    file = tmp_path / "damaged" / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    return str(tmp_path / "good"), str(tmp_path / "damaged")


def test_all_ranks_take_a_version_or_none(pair: RankPool, folders: tuple[str, str]) -> None:
    drive, given = partial(taking, folders), {"folder": folders[0]}
    one = served(alone(), SPEC, drive, SETTINGS, **given)
    found, steps = pair.run(served, SPEC, drive, SETTINGS, **given)
    assert steps > 10
    answered, one = ([turn for turn in turns if isinstance(turn, dict)] for turns in (found, one))
    assert answered == one
    first, damaged, lost, still, older, folder, _ = found
    tokens = [[part[0] for part in parts] for parts in first.values()]
    assert tokens == [[part[0] for part in parts] for parts in still.values()]
    assert tokens == [[part[0] for part in parts] for parts in folder.values()], "the same folder"
    assert "does not match" in damaged and "overwritten" in lost and "has version 7" in older


async def refused_elsewhere(engine: NativeEngine, offer: Callable[[int], Any]) -> list[Any]:
    """Rank 1 cannot open what rank 0 can."""
    await engine.start(dummy=False)
    before = await answers(engine, asked("r", 2, temperature=0.0))
    with pytest.raises(InputError) as error:
        await engine.prepare(offer(2))
    with pytest.raises(InputError, match="not prepared"):
        await engine.commit(2, policy="drain")
    assert engine.worker.weights.swap is None, "what rank 0 had opened is closed"
    with pytest.raises(InputError, match="version 3 is in the memory of one process"):
        await engine.prepare(offer_of(3, whole_version(SPEC, 3), checksums=True))
    after = await answers(engine, asked("r", 2, temperature=0.0))
    await engine.terminate()
    return [before, after, str(error.value)]


def test_what_another_rank_cannot_take_is_taken_by_none(pair: RankPool) -> None:
    (before, after, told), _ = pair.run(served, SPEC, refused_elsewhere, SETTINGS, apart=1)
    assert before == after
    assert "version 2 was refused by rank 1 of the engine" in told


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
    received = theirs.messages()
    for entry in sent:
        ours.write(entry)
        assert next(received) == entry
    ours.close()
    assert list(received) == []


def test_an_end_that_takes_nothing_is_named_in_time() -> None:
    ours, _theirs = streams()
    with pytest.raises(RankError, match=r"rank 1 of the engine took no entry within 0.2 s"):
        for _ in range(100):
            ours.write(Abort(request_ids=(), reason="x" * 100_000))


def test_half_an_entry_is_no_entry() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"\x10\x00\x00\x00abc")
    ours.close()
    with pytest.raises(RankError, match="rank 0 ended within an entry"):
        list(EntryStream(theirs, 0, timeout_s=1.0).messages())


def lone_leader(group: RankGroup, strangers: int) -> tuple[str, list[str]]:
    """Rank 1 shares, but never connects as itself. Strangers do, with another token or none."""
    if group.rank == 1:
        port, _ = group.share(None)[0]
        for number in range(strangers):
            with closing(socket.create_connection((LOOPBACK, port), timeout=5.0)) as stranger:
                stranger.sendall(bytes(number * (TOKEN_BYTES + 1)))
        return "", []
    events: list[str] = []
    with pytest.raises(RankError) as refused:
        lead(group, timeout_s=1.0, emit=lambda kind, **fields: events.append(kind))
    return str(refused.value), events


@pytest.mark.parametrize("strangers", [0, 2])
def test_a_rank_that_does_not_come_is_named(pair: RankPool, strangers: int) -> None:
    told, events = pair.run(lone_leader, strangers)[0]
    assert "ranks [1] of the engine did not connect within 1 s" in told
    assert events == ["engine.stranger"] * strangers


def pages_of(group: RankGroup, own: list[int]) -> int:
    """The KV pages of ranks whose devices have room for `own`."""
    config = EngineConfig(page_tokens=4, num_pages=own[group.rank])
    decoder = decoder_of(SPEC, group, dtype=torch.float32)
    return agree_on_pages(config, decoder, group, dtype=torch.float32).num_pages


def test_ranks_take_the_pages_that_all_have_room_for(pair: RankPool) -> None:
    assert pair.run(pages_of, [9, 7]) == [7, 7]


@pytest.mark.parametrize(
    ("told", "words"),
    [("rank 1 failed: its reason", "rank 1 failed: its reason"), ("", "took no entry within 9 s")],
)
def test_a_rank_that_ended_is_named_by_what_it_told(told: str, words: str) -> None:
    """A reset connection may be seen before the failure detector knows the reason."""

    class Group:
        fault = ""

        def look_for(self, what: str, look: Callable[[], None], within_s: float) -> None:
            assert look() is None and within_s >= 2.0, "shorter than a report takes"
            self.fault = told
            if told:
                raise RuntimeError("it looks no further")

    ours, theirs = socket.socketpair()
    theirs.close()
    group: Any = Group()
    with closing(ours), pytest.raises(RankError, match=words):
        Followers(group, [EntryStream(ours, 1, timeout_s=9.0)]).send(EndCore())
