"""The native engine against transformers, and against itself: what else runs must not change a
request's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from gyre.core.chunks import collect
from gyre.core.records import Completion, Partial, Request, Support, TokenChunk
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.engine.scheduler.preemption import preempt
from gyre.models.hub.load import load_hub
from native_cases import (
    VOCAB,
    by_transformers,
    make_requests,
    prompts,
    run,
    run_with_stats,
    save_tiny,
    tokens_of,
)
from sampling_cases import CPU, with_engine

pytestmark = pytest.mark.usefixtures("both_kernels")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("qwen2", marks=pytest.mark.slow),
        "qwen3",
        "windows",
        pytest.param("all_windows", marks=pytest.mark.slow),
    ],
)
def hub_folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_only")
    save_tiny(folder, "qwen3")
    return folder


class Bytes:
    """A tokenizer of one character per token."""

    eos_ids = (100,)

    def decode(self, ids) -> str:
        return "".join(chr(32 + i) for i in ids)


def test_greedy_equals_transformers(hub_folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(hub_folder, dtype=torch.float32)
    requests = make_requests(6)
    assert tokens_of(run(hub_folder, requests)) == by_transformers(model, requests)


# Products of other shapes round otherwise, by some units in the last place; which ones depends on
# the processor.
CLOSE = {"rel": 1e-5, "abs": 1e-5}

MIXES: dict[str, Callable[[Path, list[Request]], list[tuple[Completion, ...]]]] = {
    "one at a time": lambda folder, requests: run(folder, requests, max_running=1),
    "in waves": lambda folder, requests: run(folder, requests, waves=3),
    "small prefill chunks": lambda folder, requests: run(folder, requests, token_budget=17),
    "page of one token": lambda folder, requests: run(
        folder, requests, page_tokens=1, num_pages=3000
    ),
    "large pages": lambda folder, requests: run(folder, requests, page_tokens=64, num_pages=100),
    "no prefix cache": lambda folder, requests: run(folder, requests, prefix_cache=False),
    "streamed": lambda folder, requests: run(
        folder, [replace(request, chunk_tokens=1) for request in requests]
    ),
    "chunks of five": lambda folder, requests: run(
        folder, [replace(request, chunk_tokens=5) for request in requests]
    ),
    "one step per burst": lambda folder, requests: run(folder, requests, burst_steps=1),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_tokens_do_not_depend_on_what_else_runs(qwen3: Path, mix: str, temperature: float) -> None:
    requests = make_requests(10, temperature=temperature, n=2 if temperature else 1)
    assert tokens_of(MIXES[mix](qwen3, requests)) == tokens_of(run(qwen3, requests))


@pytest.mark.parametrize(
    "rules",
    [
        {},
        pytest.param({"temperature": 1.0}, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.9, "top_p": 0.9}, marks=pytest.mark.slow),
    ],
)
def test_preemption_swap_chunks_and_overlap_do_not_change_tokens(qwen3: Path, rules: dict) -> None:
    requests = make_requests(8, max_tokens=60, **rules)
    expected = run(qwen3, requests)
    tight = {"num_pages": 22}
    swap = {"kv_host_bytes": 10**7, "prefill_tokens_per_s": 1e-3, **tight}
    cases = [
        {**tight, "prefix_cache": False},
        {**tight, "token_budget": 16, "overlap": True},
        swap,
        {**swap, "prefix_cache": False, "overlap": True},
        {**swap, "token_budget": 17, "overlap": True},
    ]
    for config in cases:
        results, stats = run_with_stats(qwen3, requests, **config)
        assert stats.preemptions > 0 and stats.host_pages_used == 0
        assert (stats.swaps_in == stats.swaps_out == stats.preemptions) == (
            "kv_host_bytes" in config
        )
        assert (stats.recomputed_tokens == 0) == ("kv_host_bytes" in config)
        assert tokens_of(results) == tokens_of(expected)
        for parts, others in zip(expected, results, strict=True):
            for part, other in zip(parts, others, strict=True):
                assert other.logprobs == pytest.approx(part.logprobs, **CLOSE)
                assert other.raw_logprobs == pytest.approx(part.raw_logprobs, **CLOSE)


def test_what_comes_back_from_host_memory_is_the_same_to_the_bit(qwen3: Path) -> None:
    """One request at a time, so that every step has the same shape: swapped out and in after each
    token, its tokens and log-probs are those of the undisturbed run, bit for bit, and the steps are
    as many."""
    request = make_requests(1, temperature=1.0, max_tokens=50)[0]
    config = {
        "num_pages": 60,
        "max_running": 2,
        "token_budget": 16,
        "burst_steps": 1,
        "prefix_cache": False,
    }
    config |= {"kv_host_bytes": 10**6, "prefill_tokens_per_s": 1e-3}

    async def answer(engine: NativeEngine):
        (part,) = await collect(engine.submit(request))
        return part, await engine.stats()

    async def answer_disturbed(engine: NativeEngine):
        core = engine.core
        assert core is not None
        step = core.step

        def swap_and_step():
            core.quiesce()
            for row in core.state.active_rows().tolist():
                preempt(core.state, row, reason="test", version=core.version)
            return step()

        core.step = swap_and_step  # type: ignore[method-assign]
        return await answer(engine)

    plain, before = with_engine(qwen3, answer, **config)
    disturbed, after = with_engine(qwen3, answer_disturbed, **config)
    assert after.swaps_out == after.swaps_in > 49 and before.swaps_out == 0
    assert after.steps == before.steps and after.recomputed_tokens == 0
    for name in ("tokens", "logprobs", "raw_logprobs"):
        assert getattr(plain, name).tolist() == getattr(disturbed, name).tolist()


def test_prefix_hits_do_not_change_tokens(qwen3: Path) -> None:
    beginning = prompts(1, seed=5, low=50, high=51)[0]
    requests = [
        replace(request, tokens=np.concatenate([beginning, request.tokens]))
        for request in make_requests(6, high=12)
    ]
    results, stats = run_with_stats(qwen3, requests, waves=3)
    assert stats.prefix_hit_tokens >= 4 * 48
    assert tokens_of(results) == tokens_of(run(qwen3, requests, prefix_cache=False))


def test_long_prompts_in_chunks_equal_short_steps(qwen3: Path) -> None:
    """Prompts long enough for the fused attention, whole, in chunks after a cached beginning, and
    in small steps."""
    requests = make_requests(3, seed=2, high=400, max_tokens=8)
    requests = [
        replace(request, tokens=np.resize(request.tokens, 300 + 20 * i))
        for i, request in enumerate(requests)
    ]
    whole = tokens_of(run(qwen3, requests, token_budget=1024))
    assert tokens_of(run(qwen3, requests, token_budget=200)) == whole
    assert tokens_of(run(qwen3, requests, token_budget=32)) == whole
    twice = [
        *requests,
        *(replace(request, request_id=f"again-{request.request_id}") for request in requests),
    ]
    again = tokens_of(run(qwen3, twice, waves=2, token_budget=1024))
    assert {name.removeprefix("again-"): tokens for name, tokens in again.items()} == whole


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}]
)
def test_logprobs_match_a_float64_pass(hub_folder: Path, sampling: dict) -> None:
    requests = make_requests(5, **{"temperature": 1.0, "n": 2, **sampling})
    model = transformers.AutoModelForCausalLM.from_pretrained(hub_folder, dtype=torch.float64)
    for request, parts in zip(requests, run(hub_folder, requests), strict=True):
        for part in parts:
            ids = torch.tensor(
                np.concatenate([request.tokens, part.tokens])[None], dtype=torch.int64
            )
            with torch.no_grad():
                logits = model(ids).logits[0, len(request.tokens) - 1 : -1]
            chosen = torch.tensor(part.tokens, dtype=torch.int64)[:, None]
            raw = logits.log_softmax(-1).gather(-1, chosen)[:, 0].numpy()
            assert part.raw_logprobs == pytest.approx(raw, abs=2e-4)
            scaled = logits / request.sampling.temperature
            if sampling:
                assert (
                    part.support is not None and len(part.support.offsets) == len(part.tokens) + 1
                )
                allowed = torch.zeros_like(scaled, dtype=torch.bool)
                for place, ids_kept in enumerate(
                    np.split(part.support.ids, part.support.offsets[1:-1])
                ):
                    assert (np.diff(ids_kept) > 0).all() and part.tokens[place] in ids_kept
                    assert 1 <= len(ids_kept) <= 20
                    allowed[place, torch.tensor(ids_kept, dtype=torch.int64)] = True
                scaled = scaled.masked_fill(~allowed, float("-inf"))
            else:
                assert part.support is None
            processed = scaled.log_softmax(-1).gather(-1, chosen)[:, 0].numpy()
            assert part.logprobs == pytest.approx(processed, abs=2e-4)
            assert (part.versions == 3).all()


def go_on(had: Partial | None, part: Completion | TokenChunk) -> Partial:
    """Join what a completion had and what came out after it."""
    assert part.support is not None
    offsets, ids = part.support.offsets, part.support.ids
    columns = [getattr(part, name) for name in ("tokens", "logprobs", "raw_logprobs", "versions")]
    if had is not None:
        assert had.support is not None
        offsets = np.concatenate([had.support.offsets, had.support.offsets[-1] + offsets[1:]])
        ids = np.concatenate([had.support.ids, ids])
        before = (had.tokens, had.logprobs, had.raw_logprobs, had.versions)
        columns = [np.concatenate(pair) for pair in zip(before, columns, strict=True)]
    tokens, logprobs, raw, versions = columns
    return Partial(
        index=part.index,
        tokens=tokens,
        logprobs=logprobs,
        raw_logprobs=raw,
        versions=versions,
        support=Support(offsets=offsets, ids=ids),
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_interrupted_completions_go_on_as_if_nothing_had_happened(
    qwen3: Path, overlap: bool
) -> None:
    """Interrupt again and again, and go on each time from what came back, until everything is
    whole."""
    rules = {"temperature": 0.9, "top_p": 0.95, "n": 2, "max_tokens": 40}
    requests = [replace(request, chunk_tokens=3) for request in make_requests(4, **rules)]
    whole = run(qwen3, requests)
    begun: dict[str, dict[int, Partial]] = {request.request_id: {} for request in requests}

    async def interrupt_all(engine: NativeEngine) -> int:
        interrupts = 0
        while True:
            streams = [
                engine.submit(replace(request, partials=tuple(begun[request.request_id].values())))
                for request in requests
            ]
            first = await anext(streams[0])
            partials = await engine.interrupt(deadline_s=10)
            interrupts += 1
            rests = [await collect(stream) for stream in streams]
            for part in (first, *(part for rest in rests for part in rest)):
                had = begun[part.request_id]
                had[part.index] = go_on(had.get(part.index), part)
                if part.finish == "interrupted":
                    (given,) = (
                        given for given in partials[part.request_id] if given.index == part.index
                    )
                    assert given.tokens.tolist() == had[part.index].tokens.tolist()
                    assert given.support is not None and had[part.index].support is not None
                    assert given.support.ids.tolist() == had[part.index].support.ids.tolist()
            if all(part.finish == "length" for rest in rests for part in rest):
                assert not partials
                return interrupts
            assert engine.core is not None
            engine.core.state.check()

    config = {"num_pages": 300, "max_running": 6, "token_budget": 64, "burst_steps": 1}
    assert with_engine(qwen3, interrupt_all, overlap=overlap, **config) > 5
    for parts in whole:
        for part in parts:
            had = begun[part.request_id][part.index]
            count = len(had.tokens)
            assert count == 40 and had.tokens.tolist() == part.tokens[:count].tolist()
            assert had.logprobs == pytest.approx(part.logprobs[:count], **CLOSE)
            assert had.support is not None and part.support is not None
            assert had.support.offsets.tolist() == part.support.offsets[: count + 1].tolist()


@pytest.mark.parametrize(
    "rules",
    [{}, pytest.param({"temperature": 0.9, "top_p": 0.9, "n": 3}, marks=pytest.mark.slow)],
)
def test_overlap_changes_no_token(qwen3: Path, rules: dict) -> None:
    """The same steps, booked one launch later. Stops come at different lengths, so surplus is
    dropped all the time."""

    class Ends(Bytes):
        eos_ids = (7, 11, 23, 60)

    requests = make_requests(14, max_tokens=40, **rules)
    for config in (
        {},
        {"token_budget": 20, "num_pages": 24, "max_running": 6, "prefix_cache": False},
    ):
        plain = run(qwen3, requests, tokenizer=Ends(), overlap=False, **config)
        overlapped = run(qwen3, requests, tokenizer=Ends(), overlap=True, **config)
        assert {part.finish for parts in plain for part in parts} == {"stop", "length"}
        assert tokens_of(plain) == tokens_of(overlapped)
        for parts, others in zip(plain, overlapped, strict=True):
            for part, other in zip(parts, others, strict=True):
                assert part.finish == other.finish
                assert other.logprobs == pytest.approx(part.logprobs, **CLOSE)


def test_a_partial_goes_on_with_the_draws_of_an_uninterrupted_run(qwen3: Path) -> None:
    requests = make_requests(4, temperature=1.0, n=3, max_tokens=30)
    whole = run(qwen3, requests)
    begun = [
        replace(
            request,
            partials=tuple(
                Partial(
                    index=part.index,
                    tokens=part.tokens[:cut],
                    logprobs=part.logprobs[:cut],
                    raw_logprobs=part.raw_logprobs[:cut],
                    versions=part.versions[:cut],
                )
                for part, cut in zip(parts[1:], (7, 30), strict=True)
            ),
        )
        for request, parts in zip(requests, whole, strict=True)
    ]
    for parts, rest in zip(whole, run(qwen3, begun), strict=True):
        assert rest[0].tokens.tolist() == parts[0].tokens.tolist()
        assert rest[1].tokens.tolist() == parts[1].tokens[7:].tolist()
        assert rest[2].tokens.tolist() == [] and rest[2].finish == parts[2].finish


def test_stops_end_with_the_token_that_completes_them(qwen3: Path) -> None:
    request = make_requests(1, temperature=1.0, max_tokens=60)[0]
    free = run(qwen3, [request])[0][0].tokens.tolist()
    by_id = replace(request, sampling=replace(request.sampling, stop_ids=(free[9],)))
    end = free.index(free[9]) + 1
    (part,) = run(qwen3, [by_id])[0]
    assert part.tokens.tolist() == free[:end] and part.finish == "stop"
    text = Bytes().decode(free[10:13])
    by_text = replace(
        request, sampling=replace(request.sampling, stop=("never", text), ignore_eos=True)
    )
    for config in ({}, {"token_budget": 16, "prefix_cache": False}):
        (part,) = run(qwen3, [by_text], tokenizer=Bytes(), **config)[0]
        found = Bytes().decode(free).index(text) + len(text)
        assert part.tokens.tolist() == free[:found] and part.finish == "stop"


def test_eos_stops_unless_ignored(qwen3: Path) -> None:
    requests = make_requests(12, temperature=1.5, max_tokens=60)
    free = run(qwen3, requests)
    # the model names no end token
    assert all(part.finish == "length" and len(part.tokens) == 60 for (part,) in free)

    class Ends(Bytes):
        eos_ids = (int(free[0][0].tokens[20]),)

    stopped = run(qwen3, requests, tokenizer=Ends())
    ignored = [
        replace(request, sampling=replace(request.sampling, ignore_eos=True))
        for request in requests
    ]
    assert tokens_of(run(qwen3, ignored, tokenizer=Ends())) == tokens_of(free)
    for (part,), (whole,) in zip(stopped, free, strict=True):
        tokens = whole.tokens.tolist()
        end = tokens.index(Ends.eos_ids[0]) + 1 if Ends.eos_ids[0] in tokens else 60
        assert part.tokens.tolist() == tokens[:end]
        assert part.finish == ("stop" if Ends.eos_ids[0] in tokens else "length")


def test_non_finite_logits_end_the_request_and_poison_nobody(qwen3: Path) -> None:
    """One token's embedding is NaN: whoever holds it is answered "abort"; others, before and after,
    are untouched."""
    _, decoder = load_hub(qwen3, device=CPU, dtype=torch.float32)
    bad = VOCAB - 1
    with torch.no_grad():
        decoder.embed.weight[bad] = float("nan")
    # The embedding is also the head here, so give the head a finite copy that never chooses the bad
    # token.
    head = decoder.embed.weight.detach().clone()
    head[bad] = 0.0

    def logits(hidden_NE: torch.Tensor) -> torch.Tensor:
        return (hidden_NE @ head.t()).index_fill(1, torch.tensor([bad]), -1e9)

    decoder.logits = logits  # type: ignore[method-assign]
    requests = make_requests(6)
    poisoned = replace(
        requests[2], tokens=np.concatenate([requests[2].tokens, [bad]]).astype(np.int32)
    )
    events: list[str] = []

    async def main(batch: list[Request], again: list[Request]):
        with ThreadPoolExecutor(1) as compute:
            config = EngineConfig(
                num_pages=60, page_tokens=8, max_running=6, token_budget=512, c_kernels=False
            )
            engine = NativeEngine(
                decoder,
                config,
                compute=compute,
                emit=lambda kind, **_: events.append(kind),
                device=CPU,
                dtype=torch.float32,
            )
            await engine.start(dummy=False)
            first = await asyncio.gather(*[collect(engine.submit(request)) for request in batch])
            second = await asyncio.gather(*[collect(engine.submit(request)) for request in again])
            assert engine.core is not None
            engine.core.state.check()
            return first, second

    clean_first, _ = asyncio.run(main(requests, []))
    assert "engine.nonfinite" not in events
    mixed, after = asyncio.run(main([*requests[:2], poisoned, *requests[3:]], requests))
    assert (
        mixed[2][0].finish == "abort"
        and "non-finite" in mixed[2][0].reason
        and "engine.nonfinite" in events
    )
    del mixed[2]
    assert tokens_of(mixed) == tokens_of([*clean_first[:2], *clean_first[3:]])
    assert tokens_of(after) == tokens_of(clean_first)


def test_windows_hold_in_long_prompts_however_they_are_cut(tmp_path: Path) -> None:
    """Whole prompts go through the fused attention, chunks through the products; transformers has
    the last word."""
    model = save_tiny(tmp_path, "windows", seed=1)
    requests = make_requests(2, seed=2, high=400, max_tokens=6)
    requests = [
        replace(request, tokens=np.resize(request.tokens, 200 + 20 * i))
        for i, request in enumerate(requests)
    ]
    expected = by_transformers(model, requests)
    for budget in (1024, 150, 32):
        assert tokens_of(run(tmp_path, requests, token_budget=budget)) == expected


def test_windows_decode_in_pages_that_were_given_back(tmp_path: Path) -> None:
    """Four sequences of up to 80 tokens, 80 pages at full length, run in 30: each gives back what
    it sees no more, and others write there meanwhile."""
    model = save_tiny(tmp_path, "all_windows", seed=1)
    requests = make_requests(4, high=20, max_tokens=60)
    expected = by_transformers(model, requests)
    for config in ({}, {"prefix_cache": False, "overlap": True}):
        results, stats = run_with_stats(
            tmp_path, requests, num_pages=30, page_tokens=4, token_budget=16, **config
        )
        assert stats.preemptions == 0 and tokens_of(results) == expected
