"""Contract suite of RolloutEngine and EngineLifecycle: what every engine promises the loop.

A new implementation adds its builder to IMPLEMENTATIONS. A builder returns the engine, not started,
and the tensors that a version of it consists of. What an engine says that it cannot do (its
abilities) is tested to be refused by name.

The vLLM sidecar is one process for all tests of this file, so it is started already, and each test
publishes under an epoch of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster_roles import start_workers
from fakes.config import FakeEngineConfig
from fakes.engine import ScriptedEngine
from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings
from gyre.core.chunks import collect
from gyre.core.contracts import COMMIT_POLICIES, EngineAbilities, find_unable
from gyre.core.errors import DeadlineError, InputError, SnapshotError
from gyre.core.offers import LocalTensors, Offer
from gyre.core.records import CommitPolicy, Completion, Request, RoleSpec, Sampling
from gyre.core.seeds import derive_seed
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import spec_from_shape
from local_cluster import LocalCluster
from native_cases import VOCAB as TINY_VOCAB
from offers import offer_of
from part_cases import with_wrong_checksum
from vllm_sidecar import (
    Sidecar,
    environment,
    register,
    registered,
    role_spec,
    save_small,
    tensors_of,
)

VOCAB, MAX_TOKENS = 48, 20
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Subject:
    engine: Any
    tensors: dict[str, torch.Tensor]
    shared: bool
    register: Callable[[dict[str, torch.Tensor], int, int], Offer] | None = None
    first_epoch: int = 0
    is_new: bool = True  # nobody has used the engine before
    num_lives: int = 3  # how often a test may start it
    # of a completion that a test ends: the sidecar tells of it late
    long_tokens: int = 100

    def offer(self, version: int, epoch: int = 0) -> Offer:
        epoch += self.first_epoch
        if self.register is not None:
            return self.register(self.tensors, version, epoch)
        return offer_of(
            version, self.tensors, shared=self.shared, checksums=not self.shared, epoch=epoch
        )

    def torn(self, version: int) -> Offer:
        """A version whose bytes are not those of its checksums."""
        offer = self.offer(version)
        if self.register is not None:
            return with_wrong_checksum(offer, next(iter(self.tensors)))
        torn = {name: tensor + 1 for name, tensor in self.tensors.items()}
        return replace(offer, source=LocalTensors(tensors=torn))


def build_native(shared: bool) -> Subject:
    shape = ShapeConfig(
        family="qwen3",
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_size=48,
        tied=True,
        context_tokens=128,
    )
    spec = spec_from_shape(shape, vocab_size=VOCAB, bos_id=None, eos_ids=())
    decoder, source = (Decoder(spec, device=CPU, dtype=torch.float32) for _ in range(2))
    for one in (decoder, source):
        init_weights(one, 0)
    engine = NativeEngine(
        decoder,
        EngineConfig(num_pages=80, page_tokens=4, max_running=6, token_budget=32, burst_steps=2),
        compute=ThreadPoolExecutor(1),
        emit=lambda kind, **fields: None,
        device=CPU,
        dtype=torch.float32,
        shared_weights=shared,
    )
    owner = decoder if shared else source
    tensors = {name: parameter.detach() for name, parameter in owner.named_parameters()}
    return Subject(engine=engine, tensors=tensors, shared=shared)


def build_scripted() -> Subject:
    def recite(request: Request, index: int, version: int) -> list[int]:
        return [derive_seed(request.seed, index, place) % VOCAB for place in range(200)]

    engine = ScriptedEngine(
        recite,
        emit=lambda kind, **fields: None,
        config=FakeEngineConfig(context_tokens=128, max_running=6),
    )
    return Subject(engine=engine, tensors={"w": torch.ones(3)}, shared=False)


def build_pool(role: str, tensors: dict[str, torch.Tensor]) -> Subject:
    """Two engines behind workers."""
    cluster = LocalCluster(on_event=lambda worker, kind, **fields: None)
    specs = [RoleSpec(name=f"engine-{i}", builder=f"cluster_roles:{role}") for i in range(2)]
    handles = start_workers(cluster, specs)
    settings = PoolSettings(call_deadline_s=30.0, hang_s=30.0, progress_tokens=4)
    pool = EnginePool(cluster, handles, settings=settings, emit=lambda kind, **fields: None)
    return Subject(engine=pool, tensors=tensors, shared=False)


IMPLEMENTATIONS: dict[str, Callable[[], Subject]] = {
    "native, shared weights": lambda: build_native(True),
    "native, own weights": lambda: build_native(False),
    "scripted": build_scripted,
    "pool of scripted": lambda: build_pool("fake_engine", {"w": torch.ones(3)}),
    "pool of native": lambda: build_pool("native_engine", build_native(False).tensors),
}


SIDECAR = pytest.param("vLLM sidecar", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory) -> Iterator[tuple[Sidecar, Path]]:
    environment()
    folder = tmp_path_factory.mktemp("vllm") / "model"
    save_small(folder, num_layers=16)  # slow enough to be interrupted
    with closing(Sidecar(role_spec(folder, vocab_size=TINY_VOCAB))) as started:
        yield started, folder


@pytest.fixture(params=[*IMPLEMENTATIONS, SIDECAR])
def subject(request) -> Iterator[Subject]:
    if request.param in IMPLEMENTATIONS:
        yield IMPLEMENTATIONS[request.param]()
        return
    started, folder = request.getfixturevalue("sidecar")
    is_new = started.num_pools == 0
    with registered() as store:
        yield Subject(
            engine=started.pool(),
            tensors=tensors_of(folder),
            shared=False,
            register=partial(register, store),
            is_new=is_new,
            first_epoch=10 * (started.num_pools + 1),
            num_lives=2,
            long_tokens=300,
        )


def ask(name: str = "r", **fields) -> Request:
    sampling = Sampling(max_tokens=fields.pop("max_tokens", MAX_TOKENS), n=fields.pop("n", 2))
    return Request(
        request_id=name,
        tokens=np.arange(1, 8, dtype=np.int32),
        sampling=sampling,
        seed=fields.pop("seed", 5),
        chunk_tokens=fields.pop("chunk_tokens", 3),
        **fields,
    )


def go(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 180))  # type: ignore[arg-type]


async def read(subject: Subject, request: Request) -> tuple[Completion, ...]:
    return await collect(subject.engine.submit(request))


def test_each_completion_streams_and_ends_once(subject: Subject) -> None:
    async def main() -> None:
        await subject.engine.start(dummy=False)
        ended: list[int] = []
        tokens: dict[int, int] = {0: 0, 1: 0}
        async for chunk in subject.engine.submit(ask()):
            assert chunk.request_id == "r" and chunk.index not in ended
            count = len(chunk.tokens)
            assert count == len(chunk.logprobs) == len(chunk.raw_logprobs) == len(chunk.versions)
            assert chunk.tokens.dtype == np.int32 and chunk.logprobs.dtype == np.float32
            assert (chunk.versions == 0).all() and (chunk.logprobs <= 1e-6).all()
            tokens[chunk.index] += count
            if chunk.finish is not None:
                assert chunk.finish == "length"
                ended.append(chunk.index)
            else:
                assert count == 3
        assert sorted(ended) == [0, 1] and tokens == {0: MAX_TOKENS, 1: MAX_TOKENS}
        stats = await subject.engine.stats()
        assert stats.running == stats.waiting == 0
        assert stats.generated_tokens == 2 * MAX_TOKENS or not subject.is_new

    go(main)


def test_the_same_request_gives_the_same_tokens_alone_or_not_streamed_or_not(
    subject: Subject,
) -> None:
    async def main() -> None:
        await subject.engine.start(dummy=False)
        alone = await read(subject, ask())
        crowd = [subject.engine.submit(ask(f"c{i}", seed=100 + i)) for i in range(9)]
        again = await read(subject, ask("s", chunk_tokens=0))
        for stream in crowd:
            await collect(stream)
        assert [part.tokens.tolist() for part in again] == [part.tokens.tolist() for part in alone]
        assert alone[0].tokens.tolist() != alone[1].tokens.tolist()

    go(main)


def test_a_refusal_is_an_answer_for_each_completion(subject: Subject) -> None:
    async def main() -> None:
        if subject.is_new:
            before = await read(subject, ask())
            assert [part.finish for part in before] == ["refused"] * 2 and all(
                part.reason for part in before
            )
        refused = (await subject.engine.stats()).refused
        await subject.engine.start(dummy=True)
        dummy = await read(subject, ask())
        assert [part.finish for part in dummy] == ["refused"] * 2
        await subject.engine.prepare(subject.offer(1))
        await subject.engine.commit(1, policy="drain")
        for request in (ask(max_tokens=600), replace(ask(), grammar="root ::= x")):
            parts = await read(subject, request)
            assert [part.finish for part in parts] == ["refused"] * 2 and all(
                part.reason for part in parts
            )
        assert (await read(subject, ask()))[0].finish == "length"
        assert (await subject.engine.stats()).refused == refused + 3

    go(main)


ASKS: dict[str, Callable[[], Request]] = {
    "top_k": lambda: ask_for(top_k=5),
    "top_p": lambda: ask_for(top_p=0.9),
    "min_p": lambda: ask_for(min_p=0.1),
    "penalties": lambda: ask_for(presence_penalty=1.0),
    "logit_bias": lambda: ask_for(logit_bias=((3, 1.0),)),
    "min_tokens": lambda: ask_for(min_tokens=4, stop_ids=(1, 2, 3)),
    "stop strings": lambda: ask_for(stop=("x",)),
    "top_logprobs": lambda: ask_for(top_logprobs=2),
    "prompt_logprobs": lambda: ask_for(prompt_logprobs=0),
    "a priority": lambda: replace(ask(), priority=1),
    "a deadline": lambda: replace(ask(), deadline_s=60.0),
    "a trace": lambda: replace(ask(), traced=True),
}


def ask_for(**sampling: Any) -> Request:
    request = ask()
    return replace(request, sampling=replace(request.sampling, **sampling))


def test_what_an_engine_cannot_do_is_refused_by_name(subject: Subject) -> None:
    async def main() -> None:
        await subject.engine.start(dummy=False)
        abilities: EngineAbilities = await subject.engine.abilities()
        for name, make in ASKS.items():
            request = replace(make(), request_id=name)
            parts = await read(subject, request)
            if find_unable(request, abilities) is None:
                assert {part.finish for part in parts} <= {"length", "stop"}, (name, parts)
            else:
                assert {part.finish for part in parts} == {"refused"}, name
                assert all(name in part.reason for part in parts), parts

    if subject.tensors.keys() == {"w"}:
        pytest.skip("a scripted engine chooses no token by a distribution")
    go(main)


@pytest.mark.slow
def test_raw_logprobs_are_told_or_are_no_numbers(subject: Subject) -> None:
    async def main() -> None:
        await subject.engine.start(dummy=False)
        abilities: EngineAbilities = await subject.engine.abilities()
        plain, warm, greedy = [
            (await read(subject, replace(ask_for(temperature=heat), request_id=f"t{heat}")))[0]
            for heat in (1.0, 0.7, 0.0)
        ]
        np.testing.assert_array_equal(plain.logprobs, plain.raw_logprobs)
        assert (greedy.logprobs == 0.0).all() and (greedy.raw_logprobs < 0.0).all()
        assert np.isfinite(warm.logprobs).all()
        assert np.isfinite(warm.raw_logprobs).all() == abilities.raw_logprobs

    if subject.tensors.keys() == {"w"}:
        pytest.skip("a scripted engine has one log-prob for all tokens")
    go(main)


def test_abort_ends_a_request_with_what_it_has(subject: Subject) -> None:
    async def main() -> None:
        await subject.engine.start(dummy=False)
        stream = subject.engine.submit(ask(max_tokens=subject.long_tokens, chunk_tokens=1))
        other = subject.engine.submit(ask("other"))
        await anext(stream)
        await subject.engine.abort("r")
        await subject.engine.abort("r")
        await subject.engine.abort("never seen")
        assert [part.finish for part in await collect(stream)] == ["abort"] * 2
        assert [part.finish for part in await collect(other)] == ["length"] * 2

    go(main)


def test_abort_before_anything_ran(subject: Subject) -> None:
    async def main() -> None:
        await subject.engine.start(dummy=False)
        stream = subject.engine.submit(ask())
        await subject.engine.abort("r")
        assert [part.finish for part in await collect(stream)] == ["abort"] * 2

    go(main)


def test_interrupted_requests_go_on_from_their_partials(subject: Subject) -> None:
    async def main() -> None:
        await subject.engine.start(dummy=False)
        most = subject.long_tokens
        whole = await read(subject, ask(chunk_tokens=0, max_tokens=most))
        streams = [
            subject.engine.submit(ask(chunk_tokens=1, max_tokens=most)),
            subject.engine.submit(ask("late", chunk_tokens=0)),
        ]
        await anext(streams[0])
        partials = await subject.engine.interrupt(deadline_s=20)
        parts = await collect(streams[0])
        assert {part.finish for part in parts} <= {"interrupted", "length"} and set(partials) >= {
            "r"
        }
        await collect(streams[1])
        assert [partial.index for partial in partials["r"]] == [0, 1]
        rest = await read(subject, replace(ask("go on", max_tokens=most), partials=partials["r"]))
        draws_by_position = (await subject.engine.abilities()).draws_by_position
        for index in (0, 1):
            begun = partials["r"][index].tokens.tolist()
            joined = [*begun, *rest[index].tokens.tolist()]
            assert len(joined) == most and rest[index].finish == "length"
            assert begun == whole[index].tokens.tolist()[: len(begun)]
            if draws_by_position:
                assert joined == whole[index].tokens.tolist()
        assert await subject.engine.interrupt(deadline_s=20) == {}

    go(main)


def test_deadlines_and_drain(subject: Subject) -> None:
    async def main() -> None:
        await subject.engine.start(dummy=False)
        assert {part.finish for part in await read(subject, ask(deadline_s=0.0))} == {"deadline"}
        stream = subject.engine.submit(ask(max_tokens=100))
        with pytest.raises(DeadlineError, match=r"in flight|drain"):
            await subject.engine.drain(deadline_s=0.0)
        await subject.engine.drain(deadline_s=20)
        stats = await subject.engine.stats()
        assert stats.running == stats.waiting == 0
        assert [part.finish for part in await collect(stream)] == ["length"] * 2

    go(main)


@pytest.mark.parametrize("policy", COMMIT_POLICIES)
def test_a_version_goes_live_by_commit_only(subject: Subject, policy: CommitPolicy) -> None:
    async def main() -> None:
        await subject.engine.start(dummy=False)
        if policy not in (await subject.engine.abilities()).commit_policies:
            await subject.engine.prepare(subject.offer(1))
            with pytest.raises(InputError, match=f"cannot commit with policy '{policy}'"):
                await subject.engine.commit(1, policy=policy)
            assert set((await read(subject, ask()))[0].versions.tolist()) == {0}
            return
        with pytest.raises(InputError):
            await subject.engine.commit(1, policy=policy)
        await subject.engine.prepare(subject.offer(1))
        assert set((await read(subject, ask()))[0].versions.tolist()) == {0}
        await subject.engine.rollback()
        with pytest.raises(InputError):
            await subject.engine.commit(1, policy=policy)
        await subject.engine.prepare(subject.offer(2))
        await subject.engine.commit(2, policy=policy)
        await subject.engine.commit(2, policy=policy)
        assert set((await read(subject, ask()))[0].versions.tolist()) == {2}
        assert (await subject.engine.stats()).version == 2

    go(main)


def test_a_publisher_that_was_replaced_is_refused(subject: Subject) -> None:
    async def main() -> None:
        await subject.engine.start(dummy=False)
        await subject.engine.prepare(subject.offer(5, epoch=2))
        await subject.engine.commit(5, policy="drain")
        with pytest.raises(
            InputError, match=f"epoch {subject.first_epoch + 2} has published here since"
        ):
            await subject.engine.prepare(subject.offer(6, epoch=1))
        with pytest.raises(InputError, match="older than version 5"):
            await subject.engine.prepare(subject.offer(4, epoch=2))
        with pytest.raises(InputError, match="not prepared"):
            await subject.engine.commit(6, policy="drain")
        # the attempt after it resumed from an older snapshot
        await subject.engine.prepare(subject.offer(3, epoch=3))
        await subject.engine.commit(3, policy="drain")
        assert set((await read(subject, ask()))[0].versions.tolist()) == {3}

    go(main)


def test_a_torn_version_is_not_prepared(subject: Subject) -> None:
    if subject.shared:
        pytest.skip("shared weights carry no bytes that could be torn")

    async def main() -> None:
        await subject.engine.start(dummy=False)
        with pytest.raises(SnapshotError):
            await subject.engine.prepare(subject.torn(1))
        with pytest.raises(InputError):
            await subject.engine.commit(1, policy="drain")

    go(main)


def test_destroyed_and_instantiated_again(subject: Subject) -> None:
    async def main() -> None:
        expected = None
        for version in range(1, subject.num_lives + 1):
            await subject.engine.start(dummy=True)
            await subject.engine.prepare(subject.offer(version))
            await subject.engine.commit(version, policy="drain")
            parts = await read(subject, ask())
            expected = expected or parts[0].tokens.tolist()
            assert parts[0].tokens.tolist() == expected and set(parts[0].versions.tolist()) == {
                version
            }
            stream = subject.engine.submit(ask(max_tokens=subject.long_tokens))
            await subject.engine.terminate()
            assert [part.finish for part in await collect(stream)] == ["abort"] * 2
            assert not (await subject.engine.health()).ok
        await subject.engine.terminate()

    go(main)
