"""Alternatives are booked beside the tokens that they belong to: in chunks of any length, behind a
given beginning, and when the model breaks. The device tells ids that name the position, more of
them than were asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine_device import PAGE_TOKENS, FakeDevice, make_core
from gyre.core.records import Partial, Request, Sampling, TokenChunk
from gyre.engine.scheduler.state import SchedulerState
from gyre.engine.scheduler.swap import SwapRates

PROMPT, MOST, TOLD = 5, 7, 6  # tokens, tokens, alternatives that the device tells


class TellingDevice(FakeDevice):
    """Tells alternatives, and gives a NaN for the token at `breaks_at`."""

    def __init__(self, breaks_at: int | None) -> None:
        super().__init__(None)
        self.breaks_at = breaks_at

    def choose(self, step, rows, past):
        sampled = super().choose(step, rows, past)
        positions = step.sample_positions.tolist()
        told = {
            place: (position * 10 + np.arange(TOLD), -position - np.arange(TOLD) / 10)
            for place, (row, position) in enumerate(
                zip(step.sample_rows.tolist(), positions, strict=True)
            )
            if rows.num_top_R[row]
        }
        broken = [np.nan if position == self.breaks_at else 0.0 for position in positions]
        return replace(sampled, top_logprobs=told, raw_logprobs=np.asarray(broken, np.float32))


def run(requests: list[Request], breaks_at: int | None) -> list[TokenChunk]:
    device = TellingDevice(breaks_at)
    state = SchedulerState(
        max_running=4,
        num_pages=64,
        page_tokens=PAGE_TOKENS,
        prefix_cache=True,
        emit=lambda kind, **fields: None,
        num_slots=0,
        window=None,
        rates=SwapRates(page_bytes=1, swap_bytes_per_s=1.0, prefill_tokens_per_s=1.0),
    )
    core = make_core(state, device)
    for request in requests:
        core.add(request)
    chunks: list[TokenChunk] = []
    while not core.is_idle:
        chunks += core.step()
    return chunks


def make(name: str, best: int, chunk_tokens: int, given: int) -> Request:
    zeros = np.zeros(given, np.float32)
    begun = Partial(
        index=0,
        tokens=np.arange(given, dtype=np.int32),
        logprobs=zeros,
        raw_logprobs=zeros,
        versions=zeros.astype(np.int32),
    )
    return Request(
        request_id=name,
        tokens=np.arange(PROMPT, dtype=np.int32),
        sampling=Sampling(max_tokens=MOST, top_logprobs=best, n=1),
        chunk_tokens=chunk_tokens,
        partials=(begun,) if given else (),
    )


@pytest.mark.parametrize("given", [0, 1, 3])
@pytest.mark.parametrize("chunk_tokens", [0, 1, 2, 3])
@pytest.mark.parametrize("breaks_at", [None, PROMPT + 3, PROMPT + 5])
def test_alternatives_stand_beside_their_tokens(
    given: int, chunk_tokens: int, breaks_at: int | None
) -> None:
    asked = {"three": 3, "one": 1, "none": 0}
    chunks = run([make(name, best, chunk_tokens, given) for name, best in asked.items()], breaks_at)
    for name, best in asked.items():
        mine = [chunk for chunk in chunks if chunk.request_id == name]
        assert [chunk.finish for chunk in mine if chunk.finish] == [
            "length" if breaks_at is None else "abort"
        ]
        position = PROMPT + given
        for chunk in mine:
            positions = position + np.arange(len(chunk.tokens))[:, None]
            position += len(chunk.tokens)
            if best == 0:
                assert chunk.top_ids is None and chunk.top_logprobs is None
                continue
            assert chunk.top_ids is not None and chunk.top_logprobs is not None
            np.testing.assert_array_equal(chunk.top_ids, positions * 10 + np.arange(best))
            np.testing.assert_allclose(
                chunk.top_logprobs, -positions - np.arange(best) / 10, rtol=1e-6
            )
        assert position == (PROMPT + MOST if breaks_at is None else breaks_at)
