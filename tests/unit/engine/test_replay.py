"""A kept journal, played again, gives what the engine gave, to the bit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_cases import CPU, Bench, ask, go, make_decoder, tensors_of
from gyre.core.records import Sampling, TokenChunk
from gyre.engine.config import EngineConfig
from gyre.engine.core_worker import CoreFailed, CoreWorker
from gyre.engine.replay import replay
from gyre.engine.scheduler.journal import (
    Abort,
    Commit,
    Expire,
    Interrupt,
    MoveComponent,
    Start,
    read_journal,
)
from gyre.models.decoder import Decoder

Answers = dict[tuple[str, int], list[tuple]]
SCARCE = {"num_pages": 30, "max_running": 4, "token_budget": 16, "burst_steps": 3}


def note(answers: Answers, chunk: TokenChunk) -> None:
    """What a chunk brought, as plain values."""
    arrays = (chunk.tokens, chunk.logprobs, chunk.raw_logprobs, chunk.versions)
    brought = (*(array.tolist() for array in arrays), chunk.finish, chunk.reason)
    answers.setdefault((chunk.request_id, chunk.index), []).append(brought)


def play(folder: Path, weights: dict[int, Decoder]) -> Answers:
    """Replay the only journal of a folder on a decoder of its own."""
    decoder, answers = make_decoder(9), {}
    (path,) = folder.iterdir()

    def load(version: int) -> None:
        for name, tensor in tensors_of(decoder).items():
            tensor.copy_(tensors_of(weights[version])[name])

    entries = read_journal(path)
    for chunk in replay(entries, decoder, load=load, emit=lambda kind, **fields: None):
        note(answers, chunk)
    return answers


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_with_traffic_is_replayed_to_the_bit(tmp_path: Path, overlap: bool) -> None:
    now, answers, versions = [0.0], {}, {0: make_decoder(1)}
    bench = Bench(
        shared=False,
        clock=lambda: now[0],
        journal_folder=tmp_path,
        journal=True,
        overlap=overlap,
        kv_host_bytes=2**16,
        **SCARCE,
    )
    engine = bench.engine

    async def read(stream) -> None:
        async for chunk in stream:
            note(answers, chunk)

    def submit(name: str, count: int, **fields) -> list[asyncio.Task]:
        sampling = Sampling(temperature=1.0, max_tokens=24, n=2)
        asked = [
            replace(one, sampling=sampling, seed=seed)
            for seed, one in enumerate(ask(count, name=name, chunk_tokens=2, **fields))
        ]
        return [asyncio.ensure_future(read(engine.submit(one))) for one in asked]

    async def begun(name: str) -> None:
        """The engine goes on only when the event loop does, so the request still runs then."""
        while (name, 0) not in answers:
            await asyncio.sleep(0)

    async def main() -> None:
        await engine.start(dummy=False)
        tasks = []
        for version, policy in enumerate(("continue", "keep_prefix", "drain"), start=1):
            tasks += submit(f"early{version}-", 4, deadline_s=5.0) + submit(f"kept{version}-", 3)
            await begun(f"early{version}-0")
            now[0] += 6.0
            await begun(f"kept{version}-1")
            await engine.abort(f"kept{version}-1")
            versions[version] = make_decoder(1 + version)
            await bench.publish(version, versions[version], shared=False, policy=policy)
            tasks += submit(f"late{version}-", 3)
            await begun(f"late{version}-0")
            if version == 1:
                await bench.move(["engine.kv"], "none")
                await bench.move(["engine.kv"], "device")
            if version == 2:
                await bench.move(["engine.kv_host"], "none")
                await bench.move(["engine.kv_host"], "host")
        tasks += submit("last-", 3)
        await begun("last-0")
        await engine.interrupt(deadline_s=60)
        await asyncio.gather(*tasks)
        await engine.terminate()
        await engine.start(dummy=True)
        await bench.publish(9, versions.setdefault(9, make_decoder(3)), shared=False)
        await asyncio.gather(*submit("again-", 2))
        await engine.terminate()

    go(main)
    (path,) = tmp_path.iterdir()
    kinds = {type(entry) for entry in read_journal(path)}
    assert {Abort, Expire, Interrupt, Commit, MoveComponent} <= kinds
    assert "engine.preempted" in bench.kinds()
    again = play(tmp_path, versions)
    outside = set(answers) - set(again)  # ended before they came to the core
    assert all(tokens == [] for key in outside for tokens, *_ in answers[key])
    assert again == {key: parts for key, parts in answers.items() if key not in outside}
    assert sum(len(tokens) for parts in again.values() for tokens, *_ in parts) > 100


def test_a_failure_is_replayed_as_it_was(tmp_path: Path) -> None:
    """The journal is written up to the step that failed, whatever its buffer holds back."""
    decoder = make_decoder(1)

    def break_late(where: Decoder) -> None:
        plain, calls = where.hidden, iter(range(5))

        def broken(*args):
            if next(calls, None) is None:
                raise RuntimeError("cosmic ray")
            return plain(*args)

        where.hidden = broken  # type: ignore[method-assign]

    async def main() -> None:
        bench = Bench(shared=True, journal_folder=tmp_path, journal=True, c_kernels=False)
        await bench.engine.start(dummy=False)
        break_late(bench.decoder)
        results = await bench.ask(3)
        assert {parts[0].finish for parts in results} == {"abort"}

    go(main)
    (path,) = tmp_path.iterdir()
    break_late(decoder)
    with pytest.raises(CoreFailed, match="cosmic ray"):
        list(
            replay(
                read_journal(path),
                decoder,
                load=lambda version: None,
                emit=lambda kind, **fields: None,
            )
        )


def test_a_start_has_the_engine_s_keys_and_none_of_what_a_run_adds(tmp_path: Path) -> None:
    class RunsEngineConfig(EngineConfig):
        """A run's config of its engine, which chooses between engines, too."""

        kind: str = "native"

    bench = Bench(shared=True)
    config = RunsEngineConfig(num_pages=60, page_tokens=4, max_running=8, token_budget=64)
    worker = CoreWorker(
        bench.decoder,
        config,
        None,
        emit=lambda kind, **fields: None,
        device=CPU,
        dtype=torch.float32,
        version=0,
        shared_weights=True,
        eos_ids=(),
        journal_folder=tmp_path,
    )
    worker.start(dummy=False)
    worker.terminate()
    (path,) = tmp_path.iterdir()
    (start,) = read_journal(path)
    assert isinstance(start, Start) and set(start.settings) == set(EngineConfig.model_fields)
    assert play(tmp_path, {0: bench.decoder}) == {}


def test_no_journal_is_kept_unless_asked(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(shared=True, journal_folder=tmp_path)
        await bench.engine.start(dummy=False)
        await bench.ask()
        await bench.engine.terminate()

    go(main)
    assert not list(tmp_path.iterdir())
