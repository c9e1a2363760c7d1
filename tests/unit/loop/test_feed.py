"""Many completions a step: the loop asks an engine for what it takes, in order, and the engine
refuses in one line."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.scorer import TableScorer
from gyre.core.errors import EngineRefused
from gyre.core.records import Request, Sampling
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.launch.factories import engine_window
from gyre.loop.collect import (
    Collector,
    InFlightGroup,
    RequestRules,
    SubmittedRequest,
    Window,
    cut_to_window,
    open_groups,
    requests_for,
)
from gyre.loop.config import EvalConfig
from gyre.loop.scoring import Scoring
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.objectives.config import GrpoConfig
from gyre.observability.refusals import Refusals
from loop_cases import GROUPS_OF_4, HELD_OUT, TRAIN, Bench, digit_share, digits_script, run, turn
from trainer_cases import CPU
from unit.loop.test_native import SPEC, TOKENIZER, silent

GROUP = InFlightGroup(group_id="g", prompt=TRAIN[0], seed=1, rollouts={}, scores={}, partials={})


def asked(n: int, tokens: int) -> SubmittedRequest:
    request = Request(request_id="r", tokens=np.zeros(tokens, np.int32), sampling=Sampling(n=n))
    return SubmittedRequest(group=GROUP, request=request, samples=tuple(range(n)))


@given(
    st.lists(st.builds(asked, st.integers(1, 9), st.integers(1, 30)), max_size=30),
    st.integers(1, 20),
    st.integers(1, 60),
)
def test_requests_are_cut_in_order_into_parts_that_fit(requests, completions, tokens):
    parts = list(cut_to_window(requests, Window(completions=completions, tokens=tokens)))
    assert [one for part in parts for one in part] == requests and all(parts)

    def size(part):
        return sum(one.request.sampling.n for one in part), sum(
            len(one.request.tokens) for one in part
        )

    for part, after in zip_longest(parts, parts[1:]):
        held = size(part)
        assert len(part) == 1 or (held[0] <= completions and held[1] <= tokens)
        if after is not None:
            more = size([*part, after[0]])
            assert more[0] > completions or more[1] > tokens, "the next one had room"
    assert list(cut_to_window(requests, None)) == ([requests] if requests else [])


def test_a_group_beyond_one_request_is_asked_for_one_by_one():
    whole = requests_for(GROUP, RequestRules(sampling=Sampling(n=8)), most=8)
    single = requests_for(GROUP, RequestRules(sampling=Sampling(n=8)), most=7)
    assert [one.samples for one in whole] == [tuple(range(8))]
    assert [one.samples for one in single] == [(i,) for i in range(8)]
    assert len({one.request.seed for one in single} | {whole[0].request.seed}) == 9


@pytest.mark.parametrize("cap", [0, 3])
def test_a_narrow_window_gives_the_same_run_in_more_parts(tmp_path, cap):
    rollout = GROUPS_OF_4.model_copy(update={"max_tokens_per_iteration": cap})
    settings = {
        "rollout": rollout,
        "script": digits_script,
        "table": digit_share,
        "objective": GrpoConfig(),
        "steps": 3,
        "evaluation": EvalConfig(num_problems=len(HELD_OUT)),
    }
    wide = Bench(tmp_path / "wide", **settings)
    turn(wide)
    narrow = Bench(tmp_path / "narrow", window=Window(completions=4, tokens=10_000), **settings)
    most = watch(narrow)
    turn(narrow)
    assert narrow.steps() == wide.steps() and narrow.sample_rows() == wide.sample_rows()
    assert [row["accuracy"] for row in narrow.rows("eval.done")] == [
        row["accuracy"] for row in wide.rows("eval.done")
    ]
    assert max(most) <= 4


def watch(bench: Bench) -> list[int]:
    """Completions that the engine holds, after each request."""
    held, submit = [], bench.engine.submit

    def noting(request):
        stream = submit(request)
        held.append(len(bench.engine.live))
        return stream

    bench.engine.submit = noting
    return held


def collect(config: EngineConfig, window: Window | None, *, n: int, num_prompts: int = 12):
    """(groups, events, most completions that waited or ran) of one real engine."""
    events: list[tuple[str, dict]] = []

    async def go() -> list[InFlightGroup]:
        await engine.start(dummy=False)
        groups = open_groups(TRAIN[:num_prompts], run_seed=5, step=1)
        async with Scoring(
            TableScorer(lambda rollout: 1.0, emit=silent), deadline_s=20.0
        ) as scoring:
            collector = Collector(
                engine,
                scoring,
                TOKENIZER,
                RequestRules(sampling=Sampling(n=n, max_tokens=6)),
                deadline_s=60.0,
                emit=silent,
                window=window,
            )
            try:
                await collector.run(groups)
            finally:
                await asyncio.sleep(0)
                await engine.terminate()
            await scoring.finish()
        return groups

    decoder = Decoder(SPEC, device=CPU, dtype=torch.float32)
    init_weights(decoder, 3)
    with ThreadPoolExecutor(1) as compute:
        engine = NativeEngine(
            decoder,
            config,
            TOKENIZER,
            compute=compute,
            emit=lambda kind, **f: events.append((kind, f)),
            device=CPU,
            dtype=torch.float32,
        )
        try:
            return run(go()), events
        except EngineRefused:
            return None, events


@pytest.mark.parametrize(("n", "more"), [(3, {}), (9, {}), (2, {"max_queued_tokens": 20})])
def test_the_loop_s_requests_are_never_refused(n, more):
    """More completions than wait and run, more of one prompt than one request may ask for, more
    tokens than may wait."""
    config = EngineConfig(num_pages=200, max_running=3, **{"max_queued": 4, **more})
    found, events = collect(config, engine_window(config), n=n)
    assert [len(group.rollouts) for group in found] == [n] * 12
    assert not [kind for kind, _ in events if kind == "engine.refused"]
    again, _ = collect(config, engine_window(config), n=n)
    for one, other in zip(found, again, strict=True):
        for sample in range(n):
            assert one.rollouts[sample].tokens.tolist() == other.rollouts[sample].tokens.tolist()
            np.testing.assert_array_equal(
                one.rollouts[sample].logprobs, other.rollouts[sample].logprobs
            )


def test_a_refusal_is_one_event_per_kind_with_a_count():
    found, events = collect(
        EngineConfig(num_pages=200, max_running=3, max_queued=4), None, n=1, num_prompts=30
    )
    refused = [fields for kind, fields in events if kind == "engine.refused"]
    assert found is None and len(refused) == 1 and refused[0]["count"] == 23
    assert (
        refused[0]["request_id"] == "1.7"
        and "the queue is full: 7 completions" in refused[0]["reason"]
    )


def test_kinds_of_refusals_differ_by_more_than_numbers_and_turns():
    told = []

    async def go() -> None:
        refusals = Refusals(
            lambda kind, **fields: told.append((kind, fields["request_id"], fields["count"]))
        )
        for i in range(1000):
            refusals.note(f"a{i}", f"prompt of {i} tokens: the context is 9")
        refusals.note("b", "no engine takes work")
        await asyncio.sleep(0)
        refusals.note("c", "no engine takes work")
        assert refusals.total == 1002
        await asyncio.sleep(0)

    run(go())
    assert told == [
        ("engine.refused", "a0", 1000),
        ("engine.refused", "b", 1),
        ("engine.refused", "c", 1),
    ]
