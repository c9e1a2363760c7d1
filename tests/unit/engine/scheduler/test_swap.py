"""Swap and overlap in a whole engine: under new weights, under moves of memory, and in what it
reports."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from engine_cases import Bench, ask, go, make_decoder, tokens_of
from gyre.core.chunks import collect, complete
from gyre.core.errors import ConfigError, InputError
from gyre.core.records import Partial

ROOMY = {"num_pages": 60}
# of four sequences two fit whole
TIGHT = {"num_pages": 26, "kv_host_bytes": 10**6, "prefill_tokens_per_s": 1e-3}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("memory", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("policy", ["drain", "keep_prefix", "continue"])
def test_new_weights_amid_overlap_and_swap(policy, memory: dict, overlap: bool) -> None:
    """Tokens carry the version that chose them: those of the old one, in flight at the commit
    included, are what an engine of old weights chooses, and with keep_prefix the rest is what one
    of new weights chooses from there."""

    async def main() -> None:
        bench, old, new = (
            Bench(shared=False, seed=seed, burst_steps=1, **memory, overlap=overlap)
            for seed in (1, 1, 2)
        )
        for each in (bench, old, new):
            await each.engine.start(dummy=False)
        requests = ask(4, max_tokens=40, chunk_tokens=1)
        of_old = tokens_of(await old.ask(4, max_tokens=40))
        streams = [bench.engine.submit(one) for one in requests]
        heads = [
            [await anext(stream) for _ in range(20 if place < 2 else 1)]
            for place, stream in enumerate(streams)
        ]
        await bench.publish(1, make_decoder(2), shared=False, policy=policy)
        rests = [[chunk async for chunk in stream] for stream in streams]
        results = [complete([*head, *rest]) for head, rest in zip(heads, rests, strict=True)]
        assert all(
            len(part.tokens) == 40 and (np.diff(part.versions) >= 0).all() for part in results
        )
        olds = [int((part.versions == 0).sum()) for part in results]
        assert all(
            part.tokens[:count].tolist() == of_old[i][:count]
            for i, (part, count) in enumerate(zip(results, olds, strict=True))
        )
        assert olds == [40] * 4 if policy == "drain" else max(olds) < 40
        if policy == "keep_prefix":
            streams = [
                new.engine.submit(begin(one, part, count))
                for one, part, count in zip(requests, results, olds, strict=True)
            ]
            for stream, part, count in zip(streams, results, olds, strict=True):
                assert (await collect(stream))[0].tokens.tolist() == part.tokens[count:].tolist()
        stats = await bench.engine.stats()
        assert (stats.swaps_out > 0) == (memory is TIGHT)
        assert stats.host_pages_used == stats.pages_used == stats.running == stats.waiting == 0
        bench.check()

    go(main)


def begin(request, part, count: int):
    """The request again, with the completion's first tokens given."""
    columns = {
        name: getattr(part, name)[:count]
        for name in ("tokens", "logprobs", "raw_logprobs", "versions")
    }
    return replace(request, chunk_tokens=0, partials=(Partial(index=0, **columns),))


def test_the_host_pool_is_a_component_and_can_go_and_come_back() -> None:
    async def main() -> None:
        bench, roomy = Bench(shared=True, **TIGHT), Bench(shared=True, **ROOMY)
        await roomy.engine.start(dummy=False)
        expected = tokens_of(await roomy.ask(4, max_tokens=40))
        await bench.engine.start(dummy=False)
        (component,) = [one for one in bench.engine.components() if one.name == "engine.kv_host"]
        assert component.tier == "host" and component.tiers == ("host", "none")
        assert bench.engine.measure()["engine.kv_host"].host_bytes == component.size_bytes > 900_000
        assert tokens_of(await bench.ask(4, max_tokens=40)) == expected
        swapped = (await bench.engine.stats()).swaps_out
        assert swapped > 0
        with pytest.raises(InputError, match="may not live on tier 'device'"):
            await bench.move(["engine.kv_host"], "device")
        streams = [bench.engine.submit(one) for one in ask(4, max_tokens=40)]
        while (await bench.engine.stats()).host_pages_used == 0:
            await asyncio.sleep(0)
        await bench.move(["engine.kv_host"], "none")
        assert bench.engine.measure()["engine.kv_host"].host_bytes == 0
        assert tokens_of([await collect(stream) for stream in streams]) == expected
        assert "engine.swap_voided" in bench.kinds()
        assert tokens_of(await bench.ask(4, max_tokens=40)) == expected
        whys = [fields["why"] for kind, fields in bench.events if kind == "engine.preempted"]
        assert "no host pool" in whys[-1]
        await bench.move(["engine.kv_host"], "host")
        before = (await bench.engine.stats()).swaps_out
        assert tokens_of(await bench.ask(4, max_tokens=40)) == expected
        assert (await bench.engine.stats()).swaps_out > before
        bench.check()
        await bench.engine.terminate()
        assert bench.engine.measure()["engine.kv_host"].host_bytes == 0

    go(main)


@pytest.mark.parametrize("tier", ["host", "none"])
def test_kv_leaves_amid_swap(tier) -> None:
    async def main() -> None:
        bench, roomy = Bench(shared=True, **TIGHT, overlap=True), Bench(shared=True, **ROOMY)
        await roomy.engine.start(dummy=False)
        await bench.engine.start(dummy=False)
        streams = [bench.engine.submit(one) for one in ask(4, max_tokens=40)]
        while (await bench.engine.stats()).host_pages_used == 0:
            await asyncio.sleep(0)
        await bench.move(["engine.kv"], tier)
        assert ("engine.swap_voided" in bench.kinds()) == (tier == "none")
        await bench.move(["engine.kv"], "device")
        got = tokens_of([await collect(stream) for stream in streams])
        assert got == tokens_of(await roomy.ask(4, max_tokens=40))
        bench.check()

    go(main)


def test_each_preemption_says_what_it_weighed() -> None:
    async def main() -> None:
        bench = Bench(shared=True, **TIGHT)
        await bench.engine.start(dummy=False)
        await bench.ask(4, max_tokens=40)
        fields = [fields for kind, fields in bench.events if kind == "engine.preempted"]
        assert fields and all(
            one["way"] == "swap" and one["swap_s"] < one["recompute_s"] for one in fields
        )
        page_bytes = bench.engine.worker.memory.page_bytes
        assert all(
            one["size_bytes"] == -(-one["computed_tokens"] // 4) * page_bytes for one in fields
        )
        assert {"request_id", "index", "reason", "why"} <= fields[0].keys()
        with pytest.raises(ConfigError, match="one KV page has"):
            Bench(shared=True, kv_host_bytes=10)

    go(main)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_soak_of_a_whole_engine_under_aborts(overlap: bool) -> None:
    """Readers come, read some and go away, or stay; who stays gets what an undisturbed engine
    gives."""

    async def main() -> None:
        bench, roomy = Bench(shared=True, **TIGHT, overlap=overlap), Bench(shared=True, **ROOMY)
        generator = np.random.default_rng(0)
        requests = [
            replace(one, chunk_tokens=1, priority=int(generator.integers(-1, 2)))
            for one in ask(150, max_tokens=40)
        ]
        await roomy.engine.start(dummy=False)
        expected = tokens_of(await roomy.ask(150, max_tokens=40))
        await bench.engine.start(dummy=False)
        stays = generator.random(len(requests)) < 0.6
        counts = generator.integers(0, 40, len(requests))

        async def read(place: int) -> list[int] | None:
            stream = bench.engine.submit(requests[place])
            if stays[place]:
                return (await collect(stream))[0].tokens.tolist()
            for _ in range(counts[place]):
                await anext(stream)
            await stream.aclose()
            return None

        for first in range(0, len(requests), 30):
            wave = range(first, first + 30)
            for place, got in zip(wave, await asyncio.gather(*map(read, wave)), strict=True):
                assert got is None or got == expected[place]
        await bench.engine.drain(deadline_s=30)
        stats = await bench.engine.stats()
        assert (
            stats.swaps_out > 10
            and stats.pages_used == stats.host_pages_used == stats.running == stats.waiting == 0
        )
        bench.check()

    go(main)
