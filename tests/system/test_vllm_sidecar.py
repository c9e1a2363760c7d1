"""vLLM in its sidecar: the numbers of transformers and of the native engine, weights by shared memory,
and what follows when vLLM hangs, dies or is not whole. One vLLM, whose worker has a process, serves the
first half of the tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from gyre.cluster.process_cluster import ProcessCluster
from gyre.core.chunks import collect
from gyre.core.errors import DeadlineError, InputError, SnapshotError
from gyre.core.records import Completion, DeviceHoldings, Request
from native_cases import VOCAB, by_transformers, make_requests, run, tokens_of
from vllm_sidecar import (
    WITH_WORKERS,
    Sidecar,
    environment,
    register,
    registered,
    role_spec,
    save_small,
    tensors_of,
)

pytestmark = pytest.mark.slow
# log-probs of float32 models: vLLM's and torch's products add up in other orders
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    environment()
    folder = tmp_path_factory.mktemp("vllm")
    for seed in (0, 1):
        save_small(folder / str(seed), seed=seed)
    return folder / "0", folder / "1"


@pytest.fixture(scope="module")
def sidecar(folders) -> Iterator[Sidecar]:
    spec = role_spec(folders[0], vocab_size=VOCAB, extra=WITH_WORKERS)
    with closing(Sidecar(spec)) as started:
        yield started


def go(work: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 240))  # type: ignore[arg-type]


async def answer(engine: Any, requests: list[Request]) -> list[tuple[Completion, ...]]:
    streams = [engine.submit(request) for request in requests]
    return [await collect(stream) for stream in streams]


def transformers_logprobs(model: Any, request: Request, tokens: list[int]) -> np.ndarray:
    ids = torch.tensor([[*request.tokens.tolist(), *tokens]])
    with torch.no_grad():
        logprobs = model(ids).logits[0].float().log_softmax(-1)
    first = len(request.tokens) - 1
    return np.array([float(logprobs[first + at, token]) for at, token in enumerate(tokens)])


def test_each_version_has_the_numbers_of_transformers_and_of_the_native_engine(
    sidecar: Sidecar, folders: tuple[Path, Path]
) -> None:
    """Greedy tokens are equal, and log-probs within the tolerance, for versions that come by shared
    memory one after the other, with tied weights."""
    greedy = make_requests(4)
    drawn = make_requests(4, temperature=1.0)
    for request in drawn:
        object.__setattr__(request, "request_id", f"drawn {request.request_id}")

    async def main() -> None:
        pool = sidecar.pool()
        await pool.start(dummy=True)
        with registered() as store:
            for version, seed in enumerate((0, 1, 0), start=1):
                folder = folders[seed]
                model = save_small(folder, seed=seed)
                offer = register(store, tensors_of(folder), version, epoch=1)
                await pool.prepare(offer)
                await pool.commit(version, policy="drain")
                answers = await answer(pool, greedy)
                expected = by_transformers(model, greedy)
                assert tokens_of(answers) == expected
                native = await asyncio.to_thread(run, folder, greedy)
                assert tokens_of(native) == expected
                for request, (theirs,), (ours,) in zip(greedy, answers, native, strict=True):
                    exact = transformers_logprobs(model, request, theirs.tokens.tolist())
                    np.testing.assert_allclose(theirs.raw_logprobs, exact, atol=TOLERANCE)
                    np.testing.assert_allclose(
                        theirs.raw_logprobs, ours.raw_logprobs, atol=TOLERANCE
                    )
                    assert (theirs.versions == version).all()
                for request, (part,) in zip(drawn, await answer(pool, drawn), strict=True):
                    exact = transformers_logprobs(model, request, part.tokens.tolist())
                    np.testing.assert_allclose(part.logprobs, exact, atol=TOLERANCE)

    go(main())


def test_a_commit_that_fails_leaves_the_last_version_serving(
    sidecar: Sidecar, folders: tuple[Path, Path]
) -> None:
    """Bytes of the version change after it was prepared: the load finds them in its middle."""
    greedy = make_requests(2)

    async def main() -> None:
        pool = sidecar.pool()
        await pool.start(dummy=True)
        with registered() as store:
            await pool.prepare(register(store, tensors_of(folders[0]), 1, epoch=2))
            await pool.commit(1, policy="drain")
            before = tokens_of(await answer(pool, greedy))
            offer = register(store, tensors_of(folders[1]), 2, epoch=2)
            await pool.prepare(offer)
            (address,) = offer.source.parts[0].addresses  # type: ignore[union-attr]
            with (Path("/dev/shm") / address.rpartition("/")[2]).open("r+b") as slot:
                slot.seek(-100, 2)
                slot.write(b"\xff" * 16)
            with pytest.raises(SnapshotError, match="checksum"):
                await pool.commit(2, policy="drain")
            after = await answer(pool, greedy)
            assert tokens_of(after) == before and (after[0][0].versions == 1).all()
            # the next one is whole
            await pool.prepare(register(store, tensors_of(folders[1]), 3, epoch=2))
            await pool.commit(3, policy="drain")
            assert (await answer(pool, greedy))[0][0].versions.tolist()[0] == 3

    go(main())
    assert [fields["serving"] for kind, fields in sidecar.events if kind == "weights.commit_failed"]


def test_only_addresses_cross_into_vllms_processes(
    sidecar: Sidecar, folders: tuple[Path, Path], monkeypatch
) -> None:
    """What the starter sends for a hand-over is far smaller than the weights, and vLLM's worker has
    the publisher's file open while it reads."""
    from gyre.cluster.worker import frames

    sent: list[int] = []
    framed = frames.framed

    def note(number: int, payload: bytes) -> bytes:
        sent.append(len(payload))
        return framed(number, payload)

    monkeypatch.setattr(frames, "framed", note)
    tensors = tensors_of(folders[0])

    async def main() -> None:
        pool = sidecar.pool()
        await pool.start(dummy=True)
        with registered() as store:
            await pool.prepare(register(store, tensors, 1, epoch=3))
            await pool.commit(1, policy="drain")

    go(main())
    assert sum(sent) < sum(tensor.nbytes for tensor in tensors.values()) / 10


def test_a_phase_and_a_sleep_level_that_it_has_not(sidecar: Sidecar) -> None:
    """It keeps its memory while the trainer trains, as its role says; a CPU build cannot sleep."""

    async def call(method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(sidecar.handle.begin(method, *args))

    async def main() -> None:
        assert await call("begin", "main", "{}", 7, "") == 7
        for phase in ("train", "handover", "rollout"):
            assert await call("enter", phase, 1) == DeviceHoldings()
        assert (await call("engine.health")).ok
        with pytest.raises(InputError, match="cannot be parked at sleep level 1; it takes none"):
            await call("park", 1)
        assert (await call("engine.health")).ok

    go(main())
    rows = [fields for kind, fields in sidecar.events if kind == "memory"]
    assert [row["phase"] for row in rows] == ["train", "handover", "rollout"]
    held = [row["owners"]["engine.vllm"] for row in rows]
    # a build for CPUs: its weights and KV are host memory, and nothing is on a device
    assert all(row["read_from"] == "host" and "device_free_bytes" not in row for row in rows)
    assert all(one["device"] == 0 and one["host"] > 16 << 20 for one in held)


def test_a_start_that_has_begun_waits_for_its_memory(sidecar: Sidecar) -> None:
    """It goes on in the next test. One that is ended while it waits is in the last test."""

    async def call(method: str, *args: Any) -> Any:
        return await asyncio.wrap_future(sidecar.handle.begin(method, *args))

    async def main() -> None:
        await call("engine.terminate")
        own = psutil.Process(sidecar.pid)
        assert not vllm_processes(own)
        sidecar.events.clear()
        assert await call("begin", "main", "{}", 7, "") == 7
        while ("pod.activity", "dummy_start") not in [
            (kind, fields.get("activity")) for kind, fields in sidecar.events
        ]:  # `go` has the deadline
            assert (await call("engine.health")).reason == "the engine is not started"
            await asyncio.sleep(0.05)
        assert vllm_processes(own)

    go(main())


def vllm_processes(own: psutil.Process) -> list[psutil.Process]:
    found = []
    for one in own.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "tracker" not in str(one.cmdline()):
                found.append(one)
    return found


def shared_memory_of(pid: int) -> set[str]:
    """What Python's shared memory a process has mapped: vLLM's, and not the slots of weights."""
    maps = Path(f"/proc/{pid}/maps").read_text().split()
    return {word for word in maps if word.startswith("/dev/shm/psm_")}


def test_vllm_that_dies_in_a_rollout_is_started_again_and_catches_up(
    sidecar: Sidecar, folders: tuple[Path, Path]
) -> None:
    """Its requests end by another life of it, with the version that was committed last."""
    long = make_requests(2, temperature=1.0, max_tokens=400)

    async def main() -> None:
        pool = sidecar.pool(revive=sidecar.start_again)
        await pool.start(dummy=True)
        with registered() as store:
            await pool.prepare(register(store, tensors_of(folders[1]), 1, epoch=4))
            await pool.commit(1, policy="drain")
            streams = [pool.submit(request) for request in long]
            vllm = psutil.Process(sidecar.pid).children(recursive=True)
            shared = {path for process in vllm for path in shared_memory_of(process.pid)}
            max(vllm, key=lambda process: process.memory_info().rss).kill()
            found = [await collect(stream) for stream in streams]
            assert [(part.finish, len(part.tokens)) for (part,) in found] == [("length", 400)] * 2
            assert all((part.versions == 1).all() for (part,) in found)
            assert not any(process.is_running() for process in vllm)
            assert shared and not [path for path in shared if Path(path).exists()]
        await pool.close()

    go(main())
    assert any(kind == "engine.completion_failed" for kind, _ in sidecar.events)


def test_vllm_that_hangs_at_its_start_is_a_named_error_and_leaves_no_process(
    folders: tuple[Path, Path],
) -> None:
    """Its processes are stopped as soon as they are there, so they neither go on nor end."""
    spec = role_spec(folders[0], vocab_size=VOCAB, start_deadline_s=15.0)

    async def main() -> None:
        cluster = ProcessCluster(gpus=0, on_event=lambda worker, kind, **fields: None)
        handle = await cluster.start(spec)
        own = psutil.Process(int(handle.place.rpartition(" ")[2]))
        starting, stopped = handle.begin("engine.start", True), set[psutil.Process]()
        while not starting.done():  # `go` has the deadline
            for process in set(vllm_processes(own)) - stopped:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
                    stopped.add(process)
            await asyncio.sleep(0.01)
        assert stopped
        with pytest.raises(DeadlineError, match=r"vLLM had not started after 15 s"):
            starting.result()
        assert not vllm_processes(own) and not any(one.is_running() for one in stopped)
        health = await asyncio.wrap_future(handle.begin("engine.health"))
        assert not health.ok and health.reason == "the engine is not started"
        await cluster.close()

    go(main())
