"""Three ways to batch, on the same engine, arrivals and requests. In: nothing. Out: tokens per
second and seconds from arrival to answer, for continuous, static and dynamic batching. Run: python
bench/batching.py [--record].

Requests of 8 to 128 tokens arrive at random moments (Poisson), so many that the engine is busy.
Continuous: each enters when it comes. Static: BATCH requests are collected, run to the end of the
longest, then the next. Dynamic: the same, but a batch goes off when it is full or its oldest
request has waited WINDOW_S. The baselines live here and nowhere else: they are the engine, fed that
way.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from engine_cpu import SPECS
from gyre.core.chunks import collect
from gyre.core.records import Request, Sampling
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.kernels.cpu.process import keep_freed_memory
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from record import parser, say

REQUESTS, BATCH, WINDOW_S, RATE_PER_S = 400, 16, 0.02, 220.0
WAYS = ("continuous", "static", "dynamic")


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    keep_freed_memory()
    found = {way: asyncio.run(measure(way)) for way in WAYS}
    say(
        args,
        name="batching",
        unit="s, median from arrival to answer, continuous",
        ours=found["continuous"]["latency_p50_s"],
        peer={"name": "static batching, same engine", "value": found["static"]["latency_p50_s"]},
        limit=None,
        settings={
            "requests": REQUESTS,
            "batch": BATCH,
            "window_s": WINDOW_S,
            "rate_per_s": RATE_PER_S,
        },
        detail=found,
    )


def make_requests() -> tuple[list[Request], np.ndarray]:
    rng = np.random.default_rng(0)
    requests = [
        Request(
            request_id=str(index),
            tokens=rng.integers(2, 512, rng.integers(8, 64)).astype(np.int32),
            sampling=Sampling(
                temperature=1.0, max_tokens=int(rng.integers(8, 129)), ignore_eos=True
            ),
            seed=index,
            chunk_tokens=0,
        )
        for index in range(REQUESTS)
    ]
    return requests, np.cumsum(rng.exponential(1 / RATE_PER_S, REQUESTS))


async def measure(way: str) -> dict[str, float]:
    decoder = Decoder(SPECS["3m"], device=torch.device("cpu"), dtype=torch.bfloat16)
    init_weights(decoder, 0)
    with ThreadPoolExecutor(1) as compute:
        engine = NativeEngine(
            decoder,
            EngineConfig(num_pages=2048),
            compute=compute,
            emit=lambda kind, **fields: None,
            device=torch.device("cpu"),
            dtype=torch.bfloat16,
        )
        await engine.start(dummy=False)
        requests, arrivals = make_requests()
        # warm
        await asyncio.gather(*[collect(engine.submit(request)) for request in requests[:BATCH]])
        waits = np.zeros(REQUESTS)
        begun_s = time.perf_counter()
        arrived: asyncio.Queue[int] = asyncio.Queue(REQUESTS)

        async def arrive() -> None:
            for index, at in enumerate(arrivals):
                await asyncio.sleep(max(0.0, at - (time.perf_counter() - begun_s)))
                arrived.put_nowait(index)

        async def run(indices: list[int]) -> None:
            async def one(index: int) -> None:
                await collect(engine.submit(requests[index]))
                waits[index] = time.perf_counter() - begun_s - arrivals[index]

            await asyncio.gather(*[one(index) for index in indices])

        arriving = asyncio.ensure_future(arrive())
        await (continuous(arrived, run) if way == "continuous" else batches(arrived, run, way))
        await arriving
        wall_s = time.perf_counter() - begun_s
        await engine.terminate()
    tokens = sum(request.sampling.max_tokens for request in requests)
    return {
        "tokens_per_s": round(tokens / wall_s),
        "latency_p50_s": round(float(np.percentile(waits, 50)), 4),
        "latency_p99_s": round(float(np.percentile(waits, 99)), 4),
    }


async def continuous(arrived: asyncio.Queue[int], run: Any) -> None:
    running = [asyncio.ensure_future(run([await arrived.get()])) for _ in range(REQUESTS)]
    await asyncio.gather(*running)


async def batches(arrived: asyncio.Queue[int], run: Any, way: str) -> None:
    done = 0
    while done < REQUESTS:
        batch = [await arrived.get()]
        closes_s = time.perf_counter() + (WINDOW_S if way == "dynamic" else float("inf"))
        while len(batch) < min(BATCH, REQUESTS - done) and time.perf_counter() < closes_s:
            left_s = min(1.0, max(0.0, closes_s - time.perf_counter()))
            try:
                batch.append(await asyncio.wait_for(arrived.get(), left_s))
            except TimeoutError:
                continue  # the window closed, or it is time to look at the clock again
        await run(batch)
        done += len(batch)


if __name__ == "__main__":
    main()
