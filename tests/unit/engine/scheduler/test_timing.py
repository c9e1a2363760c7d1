"""When a completion began: its marks, by a clock that the test sets, a second for each step."""

from __future__ import annotations

import numpy as np
import pytest

from engine_device import PAGE_TOKENS, FakeDevice, make_core
from gyre.core.chunks import join_chunks
from gyre.core.records import Partial, PrefillTiming, Request, Sampling, Timing, TokenChunk
from gyre.engine.scheduler.preemption import preempt
from gyre.engine.scheduler.state import SchedulerState


def make(
    name: str,
    *,
    prompt_tokens: int = 6,
    n: int = 1,
    chunk_tokens: int = 1,
    partials=(),
    traced: bool = False,
):
    return Request(
        request_id=name,
        tokens=np.arange(prompt_tokens, dtype=np.int32) % 5,
        sampling=Sampling(max_tokens=6, ignore_eos=True, n=n),
        chunk_tokens=chunk_tokens,
        partials=partials,
        traced=traced,
    )


class Bench:
    def __init__(
        self, *requests: Request, max_running: int = 3, budget: int = 64, depth: int = 0
    ) -> None:
        self.now_s = 0.0
        self.state = SchedulerState(
            max_running=max_running,
            num_pages=20,
            page_tokens=PAGE_TOKENS,
            prefix_cache=False,
            emit=lambda kind, **fields: None,
            clock=lambda: self.now_s,
        )
        self.core = make_core(self.state, FakeDevice(), budget=budget, depth=depth)
        self.chunks: list[TokenChunk] = []
        for request in requests:
            self.core.add(request)

    def step(self) -> None:
        self.now_s += 1.0
        self.chunks += self.core.step()

    def finish(self) -> dict[tuple[str, int], list[TokenChunk]]:
        while not self.core.is_idle:
            self.step()
        found: dict[tuple[str, int], list[TokenChunk]] = {}
        for chunk in self.chunks:
            found.setdefault((chunk.request_id, chunk.index), []).append(chunk)
        return found


@pytest.mark.parametrize("chunk_tokens", [0, 1, 4])
def test_the_first_chunk_alone_has_the_marks(chunk_tokens: int) -> None:
    """A prompt of 6 tokens with 4 a step: it is begun in the first, and answered in the second."""
    found = Bench(make("a", chunk_tokens=chunk_tokens), budget=4).finish()
    first, *rest = found["a", 0]
    assert first.timing == Timing(started_s=1.0, first_token_s=2.0)
    assert all(chunk.timing is None for chunk in rest)
    assert join_chunks([first, *rest]).timing == first.timing


def test_one_that_waits_for_a_row_starts_when_it_has_it() -> None:
    found = Bench(make("a"), make("b"), max_running=1).finish()
    assert found["a", 0][0].timing == Timing(started_s=1.0, first_token_s=1.0)
    assert found["b", 0][0].timing == Timing(started_s=7.0, first_token_s=7.0)


def test_siblings_start_with_the_prompt_that_they_share() -> None:
    found = Bench(make("a", n=2), budget=4).finish()
    assert {chunks[0].timing for chunks in found.values()} == {
        Timing(started_s=1.0, first_token_s=2.0)
    }


def test_a_preemption_changes_no_mark() -> None:
    bench = Bench(make("a", chunk_tokens=0))
    bench.step()
    bench.step()
    preempt(bench.state, 0, reason="a test", version=0)
    (chunk,) = bench.finish()["a", 0]
    assert chunk.timing == Timing(started_s=1.0, first_token_s=1.0)


def test_one_that_goes_on_from_a_beginning_has_no_marks() -> None:
    """Whoever gave the beginning has had them with its first token."""
    begun = Bench(make("a")).finish()["a", 0][:2]
    partial = Partial(
        index=0,
        tokens=np.concatenate([chunk.tokens for chunk in begun]),
        logprobs=np.zeros(2, np.float32),
        raw_logprobs=np.zeros(2, np.float32),
        versions=np.zeros(2, np.int32),
    )
    found = Bench(make("a", partials=(partial,))).finish()["a", 0]
    assert len(found) == 4 and all(chunk.timing is None for chunk in found)


def pieces(chunks: list[TokenChunk]) -> list[tuple[int, int, float, float]]:
    return [
        (piece.start, piece.num_tokens, piece.launched_s, piece.ended_s)
        for chunk in chunks
        for piece in chunk.prefills
    ]


@pytest.mark.parametrize(("depth", "late_s"), [(0, 0.0), (1, 1.0)])
@pytest.mark.parametrize("chunk_tokens", [0, 1])
def test_a_traced_request_tells_each_piece_of_its_prompt_once(depth, late_s, chunk_tokens) -> None:
    """With a step in flight, results are there one step after the launch."""
    bench = Bench(make("a", traced=True, chunk_tokens=chunk_tokens), budget=4, depth=depth)
    chunks = bench.finish()["a", 0]
    assert pieces(chunks) == [(0, 4, 1.0, 1.0 + late_s), (4, 2, 2.0, 2.0 + late_s)]
    assert pieces([join_chunks(chunks)]) == pieces(chunks)
    first = chunks[0]
    assert first.timing is not None and first.timing.first_token_s == first.prefills[-1].ended_s


def test_one_that_is_not_traced_tells_no_piece() -> None:
    found = Bench(make("a"), make("b", traced=True), budget=4).finish()
    assert pieces(found["a", 0]) == [] and sum(piece[1] for piece in pieces(found["b", 0])) == 6


def test_what_a_preemption_computes_again_is_told_with_the_next_chunk() -> None:
    bench = Bench(make("a", traced=True))
    bench.step()
    bench.step()
    preempt(bench.state, 0, reason="a test", version=0)
    chunks = bench.finish()["a", 0]
    # 6 of the prompt, then these and the 2 chosen ones
    assert pieces(chunks) == [(0, 6, 1.0, 1.0), (0, 8, 3.0, 3.0)]
    assert [len(chunk.prefills) for chunk in chunks] == [1, 0, 1, 0, 0, 0]


def test_siblings_tell_the_pieces_of_their_prompt_once() -> None:
    found = Bench(make("a", n=2, traced=True), budget=4).finish()
    assert [pieces(found["a", index]) for index in (0, 1)] == [
        [(0, 4, 1.0, 1.0), (4, 2, 2.0, 2.0)],
        [],
    ]


def test_one_that_ends_within_its_prompt_tells_what_was_computed() -> None:
    bench = Bench(make("a", traced=True), budget=4)
    bench.step()
    (chunk,) = bench.core.abort(["a"], "a test")
    assert chunk.prefills == (PrefillTiming(start=0, num_tokens=4, launched_s=1.0, ended_s=1.0),)
