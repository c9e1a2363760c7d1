"""Many streams at once. In: a server's URL, how many. Out: one JSON object: how many were open at
once, and how long any of them stood still. Caller: bench/serve.py --mode streams.

The streams are opened over OPEN_S seconds; the last one opens long before the first one ends.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from itertools import pairwise

from gyre.benchmark.client import Client, ClientSettings, first_model
from gyre.benchmark.connection import ConnectionPool, parse_url
from gyre.benchmark.records import RequestResult

OPEN_S, TOKENS, TIMEOUT_S = 10.0, 150, 300.0


async def main(url: str, streams: int) -> None:
    pool = ConnectionPool(parse_url(url), most=streams)
    client = Client(
        pool, ClientSettings(path="/chat/completions", stream=True, timeout_s=TIMEOUT_S)
    )
    model = await first_model(pool, api_key="")
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    begun_s, began_cpu_s = time.perf_counter(), time.process_time()

    async def ask(number: int) -> RequestResult:
        due_s = begun_s + OPEN_S * number / streams
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        return await client.ask(body, due_s)

    found = await asyncio.gather(*(ask(number) for number in range(streams)))
    wall_s, spent_s = time.perf_counter() - begun_s, time.process_time() - began_cpu_s
    pool.close()
    ok = [one for one in found if not one.failure]
    gaps = sorted(
        max(after - before for before, after in pairwise(times))
        for times in (one.text_times_s for one in ok)
    )
    print(
        json.dumps(
            {
                "longest_gap_ms": round(1000 * gaps[-1], 1),
                "longest_gap_of_the_median_stream_ms": round(1000 * statistics.median(gaps), 1),
                "longest_first_token_ms": round(
                    1000 * max(one.text_times_s[0] - one.due_s for one in ok), 1
                ),
                "open_at_once": most_open(ok),
                "failed": len(found) - len(ok),
                "failures": sorted({one.failure for one in found if one.failure}),
                "chunks_per_s": round(sum(len(one.text_times_s) for one in ok) / wall_s),
                "client_cpu_share": round(spent_s / wall_s, 3),
                "wall_s": round(wall_s, 1),
            }
        )
    )


def most_open(found: list[RequestResult]) -> int:
    """How many had begun and not ended, at the moment with most."""
    moments = [(one.sent_s, 1) for one in found] + [(one.ended_s, -1) for one in found]
    most = now = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
