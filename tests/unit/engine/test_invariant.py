"""Batch-invariant mode on a CPU: one answer to the bit, whatever shares the batch and whatever it
asks for; and the torch path, which finds several answers in the same trials, refuses the mode."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch

from engine_cases import Bench, go
from gyre.core.chunks import collect
from gyre.core.errors import InputError
from gyre.core.records import Request, Sampling
from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.cpu.library import load_decoder

TRIALS = 50
SETTINGS = [
    {},
    {"token_budget": 8},
    {"prefix_cache": False, "num_pages": 40},
    {"num_pages": 64, "token_budget": 19, "kv_host_bytes": 2**20, "swap_bytes_per_s": 1e12},
    {"max_running": 3},
]
# in some of the trials
HAPPEN = ("preemptions", "swaps_in", "recomputed_tokens", "prefix_hit_tokens")
ASKS = [
    {},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.05, "prompt_logprobs": 2},
    {"prompt_logprobs": 0},
]


def watched(temperature: float) -> Request:
    tokens = np.random.default_rng(7).integers(0, 60, 40).astype(np.int32)
    return Request(
        request_id="watched",
        tokens=tokens,
        sampling=Sampling(temperature=temperature, max_tokens=60),
        seed=3,
    )


def others(trial: int) -> list[Request]:
    """Neighbors with rules of their own; some begin as the watched one does."""
    rng = np.random.default_rng(trial)
    shared = watched(1.0).tokens[: 8 * (trial % 4)]
    return [
        Request(
            request_id=f"other{i}",
            tokens=np.concatenate([shared, rng.integers(0, 60, rng.integers(1, 50))]).astype(
                np.int32
            ),
            sampling=Sampling(
                temperature=float(rng.choice([0.0, 0.7, 1.0])),
                max_tokens=int(rng.integers(1, 60)),
                **ASKS[rng.integers(len(ASKS))],
            ),
            seed=i,
        )
        for i in range([0, 1, 3, 9][trial % 4])
    ]


async def one_trial(bench: Bench, trial: int, temperature: float) -> bytes:
    beside = others(trial)
    place = trial % (len(beside) + 1)
    requests = [*beside[:place], watched(temperature), *beside[place:]]
    answers = await asyncio.gather(*[collect(bench.engine.submit(request)) for request in requests])
    (part,) = answers[place]
    assert len(part.tokens) == 60
    return part.tokens.tobytes() + part.logprobs.tobytes() + part.raw_logprobs.tobytes()


def run_trials(temperature: float, **changes: object) -> tuple[set[bytes], Counter[str]]:
    """Spread the trials over the settings, until two answers differ. Return the answers, and what
    happened meanwhile."""
    answers: set[bytes] = set()
    happened: Counter[str] = Counter()
    each = TRIALS // len(SETTINGS)

    async def under(bench: Bench, trials: range) -> None:
        await bench.engine.start(dummy=False)
        for trial in trials:
            if len(answers) < 2:
                answers.add(await one_trial(bench, trial, temperature))
        bench.check()
        stats = await bench.engine.stats()
        happened.update({name: getattr(stats, name) for name in HAPPEN})
        await bench.engine.terminate()

    for place, setting in enumerate(SETTINGS):
        bench = Bench(shared=False, **{"num_pages": 200, **setting, **changes})
        go(lambda bench=bench, place=place: under(bench, range(place * each, (place + 1) * each)))
        bench.compute.shutdown()
    return answers, happened


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_fifty_trials_one_answer(temperature: float) -> None:
    if isinstance(library := load_decoder(torch.float32), Unavailable):
        pytest.skip(library.reason)
    answers, happened = run_trials(temperature, batch_invariant=True)
    assert len(answers) == 1
    assert all(happened[name] > 0 for name in HAPPEN), happened


def test_the_torch_path_finds_several_answers_in_these_trials() -> None:
    answers, _ = run_trials(1.0, c_kernels=False)
    assert len(answers) > 1


def test_the_torch_path_refuses_the_mode() -> None:
    bench = Bench(shared=False, batch_invariant=True, c_kernels=False)
    with pytest.raises(InputError, match=r"engine\.batch_invariant.*c_kernels = false") as caught:
        go(lambda: bench.engine.start(dummy=False))
    assert "batch_invariant = false" in caught.value.hint
