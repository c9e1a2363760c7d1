"""Life of the engine: versions come in whole, memory moves and comes back, everyone is answered
whatever happens."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_cases import Bench, ask, go, make_decoder, tensors_of, tokens_of, versions_of
from gyre.core.chunks import collect
from gyre.core.errors import InputError, SnapshotError
from gyre.core.offers import LocalTensors
from gyre.engine.scheduler.journal import Recapture, Steps, read_journal
from offers import offer_of


def test_dummy_weights_take_no_work_until_a_commit() -> None:
    async def main() -> None:
        bench = Bench(shared=False)
        await bench.engine.start(dummy=True)
        refused = await bench.ask(1)
        assert refused[0][0].finish == "refused" and "dummy weights" in refused[0][0].reason
        assert not (await bench.engine.health()).ok
        source = make_decoder(5)
        await bench.publish(4, source, shared=False)
        assert (await bench.engine.health()).ok
        results = await bench.ask()
        assert versions_of(results) == {4}
        reference = Bench(shared=True, seed=5)
        await reference.engine.start(dummy=False)
        assert tokens_of(results) == tokens_of(await reference.ask())

    go(main)


def test_shared_weights_are_published_without_a_copy_and_dummies_leave_them_alone() -> None:
    async def main() -> None:
        bench = Bench(shared=True)
        before = {
            name: (tensor.data_ptr(), tensor.clone())
            for name, tensor in tensors_of(bench.decoder).items()
        }
        await bench.engine.start(dummy=True)
        await bench.publish(9, bench.decoder, shared=True)
        assert versions_of(await bench.ask()) == {9}
        for name, tensor in tensors_of(bench.decoder).items():
            assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1])
        with pytest.raises(InputError, match="tensors given here"):
            await bench.publish(10, make_decoder(2), shared=True)
        with pytest.raises(InputError, match="a copy"):
            await bench.publish(10, make_decoder(2), shared=False)

    go(main)


def test_a_corrupt_version_changes_nothing_and_a_good_one_repairs_to_the_bit() -> None:
    async def main() -> None:
        bench = Bench(shared=False)
        await bench.engine.start(dummy=False)
        addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(bench.decoder).items()}
        before = tokens_of(await bench.ask())
        source = make_decoder(2)
        tensors = tensors_of(source)
        good = offer_of(1, tensors, checksums=True)
        torn = {**tensors, "layers.1.down.weight": tensors["layers.1.down.weight"] + 1}
        with pytest.raises(SnapshotError, match="checksum"):
            await bench.engine.prepare(replace(good, source=LocalTensors(tensors=torn)))
        with pytest.raises(InputError, match="not prepared"):
            await bench.engine.commit(1, policy="drain")
        await bench.engine.prepare(good)
        assert tokens_of(await bench.ask()) == before, "a prepared version must not be seen"
        await bench.engine.rollback()
        with pytest.raises(InputError, match="not prepared"):
            await bench.engine.commit(1, policy="drain")
        with torch.no_grad():
            for parameter in bench.decoder.parameters():
                parameter.fill_(float("nan"))
        broken = await bench.ask()
        assert {parts[0].finish for parts in broken} == {"abort"}
        await bench.publish(1, source, shared=False)
        for name, tensor in tensors_of(bench.decoder).items():
            assert torch.equal(tensor, tensors[name]) and tensor.data_ptr() == addresses[name]
        assert (await bench.ask())[0][0].finish == "length"
        await bench.engine.commit(1, policy="drain")  # committed before: nothing happens
        bench.check()

    go(main)


def test_cached_beginnings_of_an_old_version_never_match() -> None:
    async def main() -> None:
        for policy in ("drain", "keep_prefix", "continue"):
            bench, other = Bench(shared=False), Bench(shared=False, seed=2)
            await bench.engine.start(dummy=False)
            await other.engine.start(dummy=False)
            await bench.ask()
            hits = (await bench.engine.stats()).prefix_hit_tokens
            await bench.ask()
            assert (await bench.engine.stats()).prefix_hit_tokens == hits + 3 * 8
            cached = len(bench.engine.core.state.pages.prefix)  # type: ignore[union-attr]
            await bench.publish(1, make_decoder(2), shared=False, policy=policy)
            left = len(bench.engine.core.state.pages.prefix)  # type: ignore[union-attr]
            assert left == (cached if policy == "keep_prefix" else 0)
            assert tokens_of(await bench.ask()) == tokens_of(await other.ask())
            assert (await bench.engine.stats()).prefix_hit_tokens == hits + 3 * 8
            bench.check()

    go(main)


@pytest.mark.parametrize("policy", ["drain", "keep_prefix", "continue"])
def test_a_commit_amid_traffic(policy: str) -> None:
    """drain ends what runs under the old version and starts the rest under the new one; the others
    change midway."""

    async def main() -> None:
        bench = Bench(shared=False, burst_steps=1)
        await bench.engine.start(dummy=False)
        streams = [bench.engine.submit(one) for one in ask(3, max_tokens=60, chunk_tokens=2)]
        first = [await anext(stream) for stream in streams]
        tensors = tensors_of(make_decoder(2))
        await bench.engine.prepare(offer_of(1, tensors))
        commit = asyncio.ensure_future(bench.engine.commit(1, policy=policy))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        late = asyncio.ensure_future(bench.ask(2, name="late"))
        results = await asyncio.gather(*map(collect, streams))
        await commit
        versions = [
            np.concatenate([head.versions, rest[0].versions])
            for head, rest in zip(first, results, strict=True)
        ]
        assert all(len(v) == 60 and (np.diff(v) >= 0).all() for v in versions)
        assert {int(v[-1]) for v in versions} == ({0} if policy == "drain" else {1})
        assert all(int(v[0]) == 0 for v in versions)
        assert versions_of(await late) == {1}
        assert ("engine.preempted" in bench.kinds()) == (policy == "keep_prefix")
        assert bench.kinds().count("engine.committed") == 1
        bench.check()

    go(main)


def test_terminate_answers_everyone_frees_everything_and_can_start_again() -> None:
    async def main() -> None:
        bench = Bench(shared=False)
        source = make_decoder(3)
        expected = None
        for version in range(1, 4):
            await bench.engine.start(dummy=True)
            await bench.publish(version, source, shared=False)
            results = await bench.ask()
            expected = expected or tokens_of(results)
            assert tokens_of(results) == expected and versions_of(results) == {version}
            pending = [bench.engine.submit(one) for one in ask(12, max_tokens=100)]
            await asyncio.sleep(0.01)
            await bench.engine.terminate()
            assert {part.finish for stream in pending for part in await collect(stream)} == {
                "abort"
            }
            assert all(usage.device_bytes == 0 for usage in bench.engine.measure().values())
            refused = await bench.ask(1)
            assert refused[0][0].finish == "refused" and "not started" in refused[0][0].reason
        with pytest.raises(InputError, match="freed"):
            await bench.engine.start(dummy=False)
        await bench.engine.terminate()

    go(main)


def test_memory_moves_keep_or_forget_and_work_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        bench = Bench(shared=False, folder=tmp_path)
        await bench.engine.start(dummy=False)
        expected = tokens_of(await bench.ask())
        sizes = {component.name: component.size_bytes for component in bench.engine.components()}
        assert set(sizes) == {"engine.kv", "engine.weights"}
        for tier in ("host", "disk"):
            hits = (await bench.engine.stats()).prefix_hit_tokens
            await bench.move(["engine.kv", "engine.weights"], tier)
            assert all(usage.device_bytes == 0 for usage in bench.engine.measure().values())
            refused = await bench.ask(1)
            assert refused[0][0].finish == "refused" and "device" in refused[0][0].reason
            await bench.move(["engine.weights", "engine.kv"], "device")
            assert {
                name: usage.device_bytes for name, usage in bench.engine.measure().items()
            } == sizes
            assert tokens_of(await bench.ask()) == expected
            assert (await bench.engine.stats()).prefix_hit_tokens == hits + 3 * 8, (
                "KV survives host and disk"
            )
        await bench.move(["engine.kv"], "none")
        assert ("engine.prefix_cleared", "engine.kv left for tier none") in [
            (kind, fields.get("reason")) for kind, fields in bench.events
        ]
        await bench.move(["engine.kv"], "device")
        hits = (await bench.engine.stats()).prefix_hit_tokens
        assert tokens_of(await bench.ask()) == expected
        assert (await bench.engine.stats()).prefix_hit_tokens == hits
        await bench.move(["engine.weights"], "none")
        await bench.move(["engine.weights"], "device")
        refused = await bench.ask(1)
        assert refused[0][0].finish == "refused" and "dummy" in refused[0][0].reason
        bench.check()

    go(main)


def test_kv_that_leaves_amid_traffic_does_not_change_tokens() -> None:
    async def main() -> None:
        for tier in ("host", "none"):
            bench = Bench(shared=True, burst_steps=1)
            await bench.engine.start(dummy=False)
            expected = tokens_of(await bench.ask(4, max_tokens=50))
            streams = [bench.engine.submit(one) for one in ask(4, max_tokens=50, chunk_tokens=5)]
            first = [await anext(stream) for stream in streams]
            await bench.move(["engine.kv"], tier)
            await asyncio.sleep(0.1)
            await bench.move(["engine.kv"], "device")
            rest = [await collect(stream) for stream in streams]
            got = [
                [*a.tokens.tolist(), *b[0].tokens.tolist()]
                for a, b in zip(first, rest, strict=True)
            ]
            assert got == expected
            assert ("engine.preempted" in bench.kinds()) == (tier == "none")
            bench.check()

    go(main)


def test_deadlines_are_answered_running_waiting_and_asleep() -> None:
    async def main() -> None:
        now = [0.0]
        bench = Bench(shared=True, clock=lambda: now[0], max_running=1, token_budget=16)
        await bench.engine.start(dummy=False)
        running, waiting = (
            bench.engine.submit(one)
            for one in ask(2, max_tokens=200, chunk_tokens=1, deadline_s=5.0)
        )
        await anext(running)
        now[0] = 6.0
        ended = [(await collect(stream))[0] for stream in (running, waiting)]
        assert [part.finish for part in ended] == ["deadline", "deadline"]
        assert len(ended[1].tokens) == 0 and ended[0].reason
        asleep = bench.engine.submit(
            replace(ask(1, max_tokens=200, deadline_s=5.0)[0], request_id="asleep")
        )
        await bench.move(["engine.kv"], "host")
        now[0] = 20.0
        assert (await collect(asleep))[0].finish == "deadline"
        bench.check()

    go(main)


def test_a_request_that_a_drain_keeps_outside_can_be_aborted_and_passes_its_deadline() -> None:
    async def main() -> None:
        now = [0.0]
        bench = Bench(shared=False, clock=lambda: now[0], burst_steps=1)
        await bench.engine.start(dummy=False)
        running = bench.engine.submit(ask(1, max_tokens=200, chunk_tokens=1)[0])
        await anext(running)
        commit = asyncio.ensure_future(
            bench.publish(1, make_decoder(2), shared=False, policy="drain")
        )
        while not bench.engine.frontend.is_holding:
            await asyncio.sleep(0.001)
        aborted, late, kept = (
            bench.engine.submit(replace(ask(1, deadline_s=deadline_s)[0], request_id=name))
            for name, deadline_s in (("aborted", None), ("late", 3.0), ("kept", None))
        )
        await bench.engine.abort("aborted")
        assert (await collect(aborted))[0].finish == "abort" and not commit.done()
        now[0] = 4.0
        assert (await collect(late))[0].finish == "deadline" and not commit.done()
        await bench.engine.abort("r0")
        await commit
        assert versions_of([await collect(kept)]) == {1}
        bench.check()

    go(main)


def test_a_fault_of_ours_answers_everyone_and_a_restart_heals() -> None:
    async def main() -> None:
        bench = Bench(shared=True, c_kernels=False)
        await bench.engine.start(dummy=False)
        expected = tokens_of(await bench.ask())
        hidden = bench.decoder.hidden

        def broken(*args):
            raise RuntimeError("cosmic ray")

        bench.decoder.hidden = broken  # type: ignore[method-assign]
        results = await bench.ask(3)
        assert {(part[0].finish, "cosmic ray" in part[0].reason) for part in results} == {
            ("abort", True)
        }
        assert "engine.failed" in bench.kinds() and not (await bench.engine.health()).ok
        assert (await bench.ask(1))[0][0].finish == "refused"
        bench.decoder.hidden = hidden  # type: ignore[method-assign]
        await bench.engine.terminate()
        await bench.engine.start(dummy=False)
        assert tokens_of(await bench.ask()) == expected

    go(main)


def test_a_full_queue_refuses_and_a_closed_stream_aborts() -> None:
    async def main() -> None:
        bench = Bench(shared=True, max_running=2, max_queued=3)
        await bench.engine.start(dummy=False)
        streams = [bench.engine.submit(one) for one in ask(6, max_tokens=100)]
        twin = bench.engine.submit(ask(1)[0])
        assert "in flight already" in (await collect(twin))[0].reason
        assert "queue is full" in (await collect(streams[5]))[0].reason
        resumed = bench.engine.submit(replace(ask(1)[0], request_id="resumed", resumed=True))
        await streams[0].aclose()
        finishes = [(await collect(stream))[0].finish for stream in [*streams[1:5], resumed]]
        assert finishes == ["length"] * 5
        assert (await bench.engine.stats()).refused == 2
        bench.check()

    go(main)


def test_too_many_queued_tokens_are_refused_until_some_are_answered() -> None:
    async def main() -> None:
        # 80 + 25 given tokens: eleven prompts of 9
        bench = Bench(shared=True, num_pages=20, max_queued_tokens=25)
        await bench.engine.start(dummy=False)
        results = await bench.ask(13)
        assert [parts[0].finish for parts in results] == ["length"] * 11 + ["refused"] * 2
        assert (
            "99 given tokens are unanswered, this request has 9, and 105" in results[11][0].reason
        )
        assert [parts[0].finish for parts in await bench.ask(11, name="later")] == ["length"] * 11
        await bench.engine.abort("nobody")
        assert bench.engine.frontend.load.completions == bench.engine.frontend.load.tokens == 0
        bench.check()

    go(main)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 0])
def test_chunks_have_the_size_that_was_asked_for(chunk_tokens: int) -> None:
    async def main() -> None:
        bench = Bench(shared=True)
        await bench.engine.start(dummy=False)
        chunks = [
            chunk
            async for chunk in bench.engine.submit(
                ask(1, max_tokens=10, chunk_tokens=chunk_tokens)[0]
            )
        ]
        sizes = {1: [1] * 10, 4: [4, 4, 2], 0: [10]}[chunk_tokens]
        assert [len(chunk.tokens) for chunk in chunks] == sizes
        assert [chunk.finish for chunk in chunks] == [None] * (len(sizes) - 1) + ["length"]

    go(main)


def test_graphs_are_captured_anew_before_the_step_that_meets_new_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only while steps can run: what is elsewhere has no address."""

    async def main() -> None:
        bench = Bench(shared=True, journal_folder=tmp_path, journal=True)
        await bench.engine.start(dummy=False)
        expected = tokens_of(await bench.ask())
        assert bench.engine.core is not None
        runner, moved, calls = bench.engine.core.runner, [True], []
        monkeypatch.setattr(runner, "has_moved", lambda: moved[0])

        def recapture() -> None:
            calls.append(bench.engine.failure)
            moved[0] = False

        monkeypatch.setattr(runner, "recapture", recapture)
        await bench.move(["engine.kv"], "host")
        assert (await bench.ask(1))[0][0].finish == "refused" and not calls
        await bench.move(["engine.kv"], "device")
        assert tokens_of(await bench.ask()) == expected and len(calls) == 1
        await bench.engine.terminate()

    go(main)
    (path,) = tmp_path.iterdir()
    kinds = [type(entry) for entry in read_journal(path)]
    assert kinds.count(Recapture) == 1 and kinds[kinds.index(Recapture) + 1] is Steps
