"""An engine in service, on any device: aborts, swaps, recompute, new weights in flight, parks,
restarts. Each case runs a tiny model in batch-invariant mode, so every answer must be, to the bit,
what a quiet engine gives. In: a Place. Out: assertions, and what the engine told. Callers:
test_engine_served (CPU), tests/gpu/test_served_gpu.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from engine_cases import tensors_of
from gyre.core.chunks import collect, complete
from gyre.core.contracts import CommitPolicy
from gyre.core.records import Completion, Partial, Request, Sampling, Tier
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import spec_from_shape
from offers import offer_of

VOCAB, CONTEXT, LONGEST_S = 200, 256, 120
Way = Literal["swap", "recompute"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the engine runs."""

    device: torch.device
    dtype: torch.dtype
    page_tokens: int

    @property
    def roomy(self) -> dict[str, Any]:
        return {"num_pages": 16 * CONTEXT // self.page_tokens}

    def tight(self, way: Way) -> dict[str, Any]:
        """Pages for little more than one sequence at full length; what is preempted is swapped or
        computed again."""
        swap = {"kv_host_bytes": 1 << 22, "prefill_tokens_per_s": 1e-3} if way == "swap" else {}
        return {"num_pages": CONTEXT // self.page_tokens + 3, **swap}


def make_decoder(place: Place, seed: int) -> Decoder:
    shape = ShapeConfig(
        family="qwen3",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_size=96,
        tied=True,
        context_tokens=CONTEXT,
    )
    spec = spec_from_shape(shape, vocab_size=VOCAB, bos_id=None, eos_ids=())
    decoder = Decoder(spec, device=place.device, dtype=place.dtype)
    init_weights(decoder, seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)  # so that versions differ visibly
    return decoder


class Served:
    """A started engine with weights of its own, its compute thread and what it told."""

    def __init__(
        self, place: Place, compute: ThreadPoolExecutor, seed: int, settings: dict[str, Any]
    ) -> None:
        self.place, self.compute = place, compute
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.engine = NativeEngine(
            make_decoder(place, seed),
            EngineConfig(
                **{"max_running": 6, "token_budget": 64, "batch_invariant": True, **settings},
                page_tokens=place.page_tokens,
            ),
            compute=compute,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            device=place.device,
            dtype=place.dtype,
            shared_weights=False,
        )

    async def ask(self, requests: list[Request]) -> list[Completion]:
        answers = await asyncio.gather(*[collect(self.engine.submit(one)) for one in requests])
        return [part for parts in answers for part in parts]

    async def prepare(self, version: int, source: Decoder) -> None:
        tensors = tensors_of(source)
        await self.engine.prepare(offer_of(version, tensors))

    async def move(self, names: list[str], tier: Tier) -> None:
        await asyncio.get_running_loop().run_in_executor(
            self.compute, lambda: self.engine.move(names, tier)
        )

    async def check_empty(self) -> None:
        """Nobody is there, and every page, slot and row is free."""
        stats = await self.engine.stats()
        assert stats.running == stats.waiting == stats.pages_used == stats.host_pages_used == 0
        assert self.engine.core is not None
        state = self.engine.core.state
        state.check()
        state.pages.drop_cached()
        assert state.pages.num_available == state.pages.num_pages
        assert state.slots.num_free == state.slots.num_slots
        assert state.rows.num_free == state.rows.max_running

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


@asynccontextmanager
async def served(place: Place, *, seed: int = 1, **settings: Any) -> AsyncIterator[Served]:
    with ThreadPoolExecutor(1) as compute:
        bench = Served(place, compute, seed, settings)
        await bench.engine.start(dummy=False)
        yield bench
        await bench.engine.terminate()


def some_requests(count: int, *, max_tokens: int, **fields: Any) -> list[Request]:
    """Greedy ones and drawn ones, some with a beginning in common."""
    generator = np.random.default_rng(0)
    shared = generator.integers(0, VOCAB, 40).astype(np.int32)
    rules = [Sampling(temperature=temperature, max_tokens=max_tokens) for temperature in (0.0, 1.0)]
    return [
        Request(
            request_id=f"r{i}",
            tokens=np.concatenate(
                [shared[: 40 * (i % 2)], generator.integers(0, VOCAB, 5 + 7 * (i % 4))]
            ).astype(np.int32),
            sampling=rules[i % 2],
            seed=i,
            **{"chunk_tokens": 0, **fields},
        )
        for i in range(count)
    ]


def same(ours: Completion, theirs: Completion, count: int | None = None) -> bool:
    """Whether the first `count` tokens and their log-probs are equal to the bit."""
    count = len(ours.tokens) if count is None else count
    return all(
        np.array_equal(getattr(ours, name)[:count], getattr(theirs, name)[:count])
        for name in ("tokens", "logprobs", "raw_logprobs")
    )


async def soak(place: Place, way: Way, *, num_requests: int) -> None:
    """Random requests and random aborts in too little memory: each is answered once, and nothing
    leaks."""
    generator = np.random.default_rng(7)
    requests = [
        replace(one, sampling=replace(one.sampling, n=1 + i % 3 // 2), priority=i % 3 - 1)
        for i, one in enumerate(some_requests(num_requests, max_tokens=90))
    ]
    finished: list[Completion] = []
    async with served(place, **place.tight(way)) as bench:
        host = bench.engine.worker.memory.host
        assert (host is not None) == (way == "swap")
        assert host is None or host.buffer.bytes.is_pinned() == (place.device.type == "cuda")
        open_: dict[str, asyncio.Task[Any]] = {}
        for request in requests:
            open_[request.request_id] = asyncio.create_task(collect(bench.engine.submit(request)))
            if generator.random() < 0.3:
                await bench.engine.abort(str(generator.choice(sorted(open_))))
            while len(open_) >= 10:
                done, _ = await asyncio.wait(
                    open_.values(), timeout=LONGEST_S, return_when=asyncio.FIRST_COMPLETED
                )
                assert done, "nobody was answered"
                finished += [part for task in done for part in task.result()]
                open_ = {name: task for name, task in open_.items() if task not in done}
        for parts in await asyncio.wait_for(asyncio.gather(*open_.values()), LONGEST_S):
            finished += parts
        stats = await bench.engine.stats()
        await bench.check_empty()
    assert stats.preemptions > 0 and (stats.swaps_out > 0) == (stats.swaps_in > 0) == (
        way == "swap"
    )
    assert len(finished) == sum(one.sampling.n for one in requests)
    assert {part.finish for part in finished} == {"length", "abort"}
    async with served(place, **place.roomy) as quiet:
        expected = {(part.request_id, part.index): part for part in await quiet.ask(requests)}
    for part in finished:
        assert part.finish == "abort" or len(part.tokens) == 90
        assert same(part, expected[part.request_id, part.index]), (
            "company, preemption and aborts change no bit"
        )


async def new_weights(place: Place, policy: CommitPolicy, way: Way) -> None:
    """Tokens carry the version that chose them. Those of the old one are the old engine's; with
    keep_prefix the others are what an engine of new weights chooses from there."""
    longest = 150
    requests = some_requests(4, max_tokens=longest, chunk_tokens=1)
    async with served(place, **place.roomy) as old:
        of_old = await old.ask(requests)
    async with served(place, burst_steps=1, **place.tight(way)) as bench:
        await bench.prepare(1, make_decoder(place, 2))
        streams = [bench.engine.submit(one) for one in requests]
        heads = [
            [await anext(stream) for _ in range(12 if at < 2 else 1)]
            for at, stream in enumerate(streams)
        ]
        await bench.engine.commit(1, policy=policy)
        rests = [[chunk async for chunk in stream] for stream in streams]
        results = [complete([*head, *rest]) for head, rest in zip(heads, rests, strict=True)]
        later = await bench.ask(
            [replace(one, request_id=f"later {one.request_id}") for one in requests]
        )
        stats = await bench.engine.stats()
        await bench.check_empty()
    counts = [int((part.versions == 0).sum()) for part in results]
    assert all(
        len(part.tokens) == longest and (np.diff(part.versions) >= 0).all() for part in results
    )
    assert all(
        same(part, first, count) for part, first, count in zip(results, of_old, counts, strict=True)
    )
    assert counts == [longest] * 4 if policy == "drain" else 0 < max(counts) < longest
    assert stats.version == 1 and stats.preemptions > 0 and (stats.swaps_out > 0) == (way == "swap")
    async with served(place, seed=2, **place.roomy) as new:
        from_there = await new.ask(
            [
                begin(one, part, count)
                for one, part, count in zip(requests, results, counts, strict=True)
            ]
        )
        assert all(
            same(part, first) for part, first in zip(later, await new.ask(requests), strict=True)
        )
    if policy != "continue":  # there the KV is of both
        for part, rest, count in zip(results, from_there, counts, strict=True):
            assert part.tokens[count:].tolist() == rest.tokens.tolist()
            assert part.logprobs[count:].tolist() == rest.logprobs.tolist()


def begin(request: Request, part: Completion, count: int) -> Request:
    """The request again, with the completion's first tokens given."""
    columns = {
        name: getattr(part, name)[:count]
        for name in ("tokens", "logprobs", "raw_logprobs", "versions")
    }
    return replace(request, chunk_tokens=0, partials=(Partial(index=0, **columns),))


async def parks_in_flight(place: Place, tier: Tier) -> list[str]:
    """KV and weights leave amid traffic, more than once; what was under way goes on. Returns the
    events' kinds."""
    requests = some_requests(4, max_tokens=120, chunk_tokens=1)
    async with served(place, **place.roomy) as quiet:
        expected = await quiet.ask(requests)
    async with served(place, burst_steps=1, **place.roomy) as bench:
        streams = [bench.engine.submit(one) for one in requests]
        heads = [[await anext(stream)] for stream in streams]
        for _ in range(2):
            await bench.move(["engine.kv"], tier)
            await bench.move(["engine.weights"], "host")
            assert all(usage.device_bytes == 0 for usage in bench.engine.measure().values())
            assert not (await bench.engine.health()).ok
            await bench.move(["engine.weights", "engine.kv"], "device")
            for head, stream in zip(heads, streams, strict=True):
                head += [await anext(stream) for _ in range(5)]
        rests = [[chunk async for chunk in stream] for stream in streams]
        results = [complete([*head, *rest]) for head, rest in zip(heads, rests, strict=True)]
        assert all(same(part, first) for part, first in zip(results, expected, strict=True))
        assert ("engine.preempted" in bench.kinds()) == (tier == "none")
        await bench.check_empty()
        return bench.kinds()


async def restarts(place: Place) -> None:
    """Destroyed amid traffic and made again on dummy weights: everyone is answered, the new one
    answers as the first did, and nothing stays behind."""
    requests, source = some_requests(4, max_tokens=30), make_decoder(place, 3)
    expected: list[Completion] = []
    left: list[int] = []
    with ThreadPoolExecutor(1) as compute:
        bench = Served(place, compute, 1, place.roomy)
        for version in range(1, 5):
            await bench.engine.start(dummy=True)
            assert not (await bench.engine.health()).ok
            await bench.prepare(version, source)
            await bench.engine.commit(version, policy="drain")
            results = await bench.ask(requests)
            expected = expected or results
            assert all(same(part, first) for part, first in zip(results, expected, strict=True))
            pending = [
                bench.engine.submit(replace(one, request_id=f"late {one.request_id}"))
                for one in requests
            ]
            await bench.engine.terminate()
            assert {part.finish for stream in pending for part in await collect(stream)} <= {
                "abort",
                "length",
            }
            assert all(usage.device_bytes == 0 for usage in bench.engine.measure().values())
            left.append(free_bytes(place.device))
    assert max(left[1:]) - min(left[1:]) <= 8 << 20, f"free device bytes after each life: {left}"


def free_bytes(device: torch.device) -> int:
    """Of the device; 0 where memory is not its own."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
