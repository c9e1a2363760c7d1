"""The engine's frontend when callers are cancelled and when work on the core raises: everyone is
answered, nothing is half-changed, and a restart heals."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from engine_cases import Bench, ask, go, make_decoder, tensors_of, tokens_of, versions_of
from gyre.core.chunks import collect
from gyre.core.errors import EngineRefused, InputError
from gyre.core.records import Request
from gyre.engine import core_worker
from offers import FailAt, Fault, offer_of


class Ray(RuntimeError):
    """What goes wrong on purpose."""


def named(name: str, **fields) -> Request:
    return replace(ask(1, **fields)[0], request_id=name)


@contextmanager
def busy(bench: Bench) -> Iterator[threading.Event]:
    """The compute thread does nothing until the event is set, at the end at the latest."""
    free = threading.Event()
    bench.compute.submit(free.wait, 60)
    try:
        yield free
    finally:
        free.set()


def break_method(
    where: object, name: str, monkeypatch: pytest.MonkeyPatch, *, after: int = 0
) -> None:
    """The method raises, once it was called `after` times."""
    real, calls = getattr(where, name), iter(range(after))

    def broken(*args, **fields):
        if next(calls, None) is None:
            raise Ray("cosmic ray")
        return real(*args, **fields)

    monkeypatch.setattr(where, name, broken)


@pytest.mark.parametrize("begun", [False, True])
def test_a_cancelled_abort_loses_nobodys_answer(begun: bool) -> None:
    """The abort takes along what was accepted since the last step, and what others are due."""

    async def main() -> None:
        bench = Bench(shared=True)
        await bench.engine.start(dummy=False)
        with busy(bench) as free:
            first = bench.engine.submit(named("first", max_tokens=200))
            await asyncio.sleep(0)  # the pump takes it
            second = bench.engine.submit(named("second"))
            inside, proceed = threading.Event(), threading.Event()
            core = bench.engine.core
            assert core is not None
            real = core.abort

            def slow(request_ids: Sequence[str], reason: str):
                inside.set()
                assert proceed.wait(60)
                return real(request_ids, reason)

            core.abort = slow  # type: ignore[method-assign]
            leaving = asyncio.ensure_future(bench.engine.abort("first"))
            await asyncio.sleep(0.01)
            if begun:
                free.set()
                await asyncio.get_running_loop().run_in_executor(None, inside.wait, 60)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            assert leaving.cancelled()
            proceed.set()
        assert (await collect(first))[0].finish == "abort"
        assert (await collect(second))[0].finish == "length"
        assert bench.engine.frontend.load.completions == bench.engine.frontend.load.tokens == 0
        bench.check()

    go(main)


def test_a_failed_cycle_is_left_alone_and_a_restart_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        bench = Bench(shared=True, c_kernels=False)
        await bench.engine.start(dummy=False)
        expected = tokens_of(await bench.ask())
        with monkeypatch.context() as patch:
            break_method(bench.decoder, "hidden", patch, after=3)
            streams = [bench.engine.submit(one) for one in ask(3)]
            ended = [(await collect(stream))[0] for stream in streams]
            assert {(part.finish, "cosmic ray" in part.reason) for part in ended} == {
                ("abort", True)
            }
        assert await bench.engine.interrupt(deadline_s=60) == {}
        await bench.engine.drain(deadline_s=60)
        await bench.engine.abort("r0")
        tensors = tensors_of(bench.decoder)
        await bench.engine.prepare(offer_of(1, tensors, shared=True))
        with pytest.raises(EngineRefused, match="cosmic ray"):
            await bench.engine.commit(1, policy="continue")
        assert (await bench.engine.stats()).version == 0, "nothing is half-changed"
        await bench.move(["engine.kv"], "none")
        await bench.move(["engine.kv"], "device")
        assert bench.kinds().count("engine.failed") == 1
        await bench.engine.terminate()
        await bench.engine.start(dummy=False)
        assert tokens_of(await bench.ask()) == expected
        bench.check()

    go(main)


@pytest.mark.parametrize("queued", ["interrupt", "abort", "terminate", "restart", "commit"])
def test_what_was_queued_behind_a_failing_step(
    queued: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop has not heard of the failure yet when the compute thread comes to the next
    piece of work."""

    async def main() -> None:
        bench = Bench(shared=True, c_kernels=False)
        await bench.engine.start(dummy=False)
        expected = tokens_of(await bench.ask())
        tensors = tensors_of(bench.decoder)
        await bench.engine.prepare(offer_of(1, tensors, shared=True))
        with monkeypatch.context() as patch, busy(bench) as free:
            break_method(bench.decoder, "hidden", patch)
            first = bench.engine.submit(named("first"))
            await asyncio.sleep(0)  # its burst waits for the compute thread, and will fail
            second = bench.engine.submit(named("second"))
            work = {
                "interrupt": lambda: bench.engine.interrupt(deadline_s=60),
                "abort": lambda: bench.engine.abort("first"),
                "terminate": bench.engine.terminate,
                "restart": lambda: bench.engine.start(dummy=False),
                "commit": lambda: bench.engine.commit(1, policy="keep_prefix"),
            }[queued]
            task = asyncio.ensure_future(work())
            await asyncio.sleep(0.01)
            free.set()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            for stream in (first, second):
                part = (await collect(stream))[0]
                assert part.finish == "abort" and "cosmic ray" in part.reason
        assert isinstance(result, EngineRefused) if queued == "commit" else result in ({}, None)
        await bench.engine.terminate()
        await bench.engine.start(dummy=False)
        assert tokens_of(await bench.ask()) == expected
        bench.check()

    go(main)


@pytest.mark.parametrize("what", ["abort", "interrupt", "commit", "move"])
def test_work_between_steps_that_raises_answers_everyone(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        bench = Bench(shared=False, burst_steps=1)
        await bench.engine.start(dummy=False)
        expected = tokens_of(await bench.ask())
        streams = [bench.engine.submit(one) for one in ask(3, max_tokens=200, chunk_tokens=1)]
        for stream in streams:
            await anext(stream)
        tensors = tensors_of(make_decoder(2))
        await bench.engine.prepare(offer_of(1, tensors))
        with monkeypatch.context() as patch:
            name = {"commit": "change_version", "move": "forget_kv"}.get(what, "_end")
            break_method(bench.engine.core, name, patch)
            if what == "abort":
                await bench.engine.abort("r0")
            elif what == "interrupt":
                assert await bench.engine.interrupt(deadline_s=60) == {}
            else:
                with pytest.raises(EngineRefused, match="cosmic ray"):
                    await (
                        bench.move(["engine.kv"], "none")
                        if what == "move"
                        else bench.engine.commit(1, policy="continue")
                    )
            for stream in streams:
                part = (await collect(stream))[0]
                assert part.finish == "abort" and "cosmic ray" in part.reason
        assert not (await bench.engine.health()).ok
        await bench.engine.terminate()
        await bench.engine.start(dummy=True)
        await bench.publish(3, make_decoder(1), shared=False)
        assert tokens_of(await bench.ask()) == expected
        bench.check()

    go(main)


def test_a_commit_that_fails_at_any_step_leaves_the_last_version_answering() -> None:
    """Every seventh operation fails in turn (`test_swap.py` has each), and what it writes is torn.
    What runs meanwhile goes on, and a later commit of the same version ends well."""

    async def main() -> None:
        bench, other = Bench(shared=False, burst_steps=1), Bench(shared=False, seed=2)
        await bench.engine.start(dummy=False)
        await other.engine.start(dummy=False)
        expected, after = tokens_of(await bench.ask()), tokens_of(await other.ask())
        running = bench.engine.submit(named("running", max_tokens=200, chunk_tokens=1))
        await anext(running)
        own = bench.engine.worker.weights
        number, failed = 0, True
        while failed:
            number, failed = number + 7, False
            await bench.engine.prepare(offer_of(1, tensors_of(make_decoder(2))))
            swap = own.swap

            def run(swap=swap, number=number) -> None:
                with FailAt(number, torn=True):
                    type(swap).run(swap)

            swap.run = run  # type: ignore[method-assign]
            try:
                await bench.engine.commit(1, policy="continue")
            except Fault:
                failed = True
                assert (await bench.engine.health()).ok
                assert (await bench.engine.stats()).version == 0
                assert tokens_of(await bench.ask()) == expected, number
        assert "weights.commit_failed" in bench.kinds() and number > 50
        part = (await collect(running))[0]
        assert part.finish == "length"
        assert set(part.versions.tolist()) <= {0, 1} and part.versions[-1] == 1
        assert tokens_of(await bench.ask()) == after
        bench.check()

    go(main)


def test_a_commit_whose_event_cannot_be_written_leaves_the_last_version_answering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        bench = Bench(shared=False)
        await bench.engine.start(dummy=False)
        expected = tokens_of(await bench.ask())
        await bench.engine.prepare(offer_of(1, tensors_of(make_decoder(2))))
        honest = bench.engine.worker.emit

        def emit(kind: str, **fields) -> None:
            if kind == "engine.committed":
                raise OSError(28, "No space left on device")
            honest(kind, **fields)

        with monkeypatch.context() as patch:
            patch.setattr(bench.engine.worker, "emit", emit)
            with pytest.raises(OSError, match="No space left"):
                await bench.engine.commit(1, policy="drain")
        assert (await bench.engine.stats()).version == 0
        assert tokens_of(await bench.ask()) == expected
        await bench.engine.commit(1, policy="drain")
        assert versions_of(await bench.ask()) == {1}

    go(main)


def test_a_start_that_fails_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        bench = Bench(shared=False)
        for _ in range(2):
            with monkeypatch.context() as patch:
                break_method(core_worker, "choose_runner", patch)
                with pytest.raises(Ray):
                    await bench.engine.start(dummy=False)
            assert bench.engine.measure()["engine.kv"].device_bytes == 0
        await bench.engine.start(dummy=False)
        assert (await bench.ask(1))[0][0].finish == "length"
        await bench.engine.terminate()
        with monkeypatch.context() as patch:
            break_method(core_worker, "choose_runner", patch)
            with pytest.raises(Ray):
                await bench.engine.start(dummy=True)
        assert all(usage.device_bytes == 0 for usage in bench.engine.measure().values())
        with pytest.raises(InputError, match="freed"):
            await bench.engine.start(dummy=False)

    go(main)
