"""Summary: outcomes of a level to its numbers. In: outcomes. Out: a `LevelSummary`. Pure.

ITL is the gap between two chunks of one stream that carry text, and gaps of all streams are pooled.
A chunk of several tokens counts as one gap, so ITL is what a reader sees, not the engine's step.
TPOT corrects for it: (E2E - TTFT) / (tokens - 1) of each answer, with tokens from its usage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from gyre.benchmark.records import Level, LevelSummary, Percentiles, RequestResult

ITL_DEFINITION = (
    "gap between consecutive chunks of a stream that carry text, all gaps pooled; a chunk of "
    "several tokens is one gap, and chunks read at once have gaps of 0"
)


def summarize(
    level: Level,
    outcomes: Sequence[RequestResult],
    *,
    failed_warm_up: int,
    unfinished: int,
    client_cpu_s: float,
) -> LevelSummary:
    """Return a level's numbers. Latencies are of whole answers alone."""
    ok = [outcome for outcome in outcomes if not outcome.failure]
    failed = [outcome for outcome in outcomes if outcome.failure]
    counted = [outcome.usage for outcome in ok if outcome.usage is not None]
    begun_s = min((outcome.due_s for outcome in outcomes), default=0.0)
    wall_s = max((outcome.ended_s for outcome in outcomes), default=0.0) - begun_s
    prompt_tokens = sum(usage.prompt_tokens for usage in counted)
    completion_tokens = sum(usage.completion_tokens for usage in counted)
    per_s = 1.0 / wall_s if wall_s > 0.0 else 0.0
    return LevelSummary(
        name=level.name,
        concurrency=level.concurrency,
        rate_per_s=level.rate_per_s,
        wall_s=wall_s,
        ok=len(ok),
        failed=len(failed),
        failures=dict(Counter(outcome.failure for outcome in failed).most_common()),
        failure_details={outcome.failure: outcome.detail for outcome in reversed(failed)},
        failed_warm_up=failed_warm_up,
        unfinished=unfinished,
        without_usage=len(ok) - len(counted),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=sum(usage.cached_tokens for usage in counted),
        chunks=sum(len(outcome.text_times_s) for outcome in ok),
        requests_per_s=len(ok) * per_s,
        output_tokens_per_s=completion_tokens * per_s,
        total_tokens_per_s=(prompt_tokens + completion_tokens) * per_s,
        ttft=percentiles(
            outcome.text_times_s[0] - outcome.due_s for outcome in ok if outcome.text_times_s
        ),
        itl=percentiles(gap for outcome in ok for gap in np.diff(outcome.text_times_s).tolist()),
        tpot=percentiles(value for outcome in ok for value in _tpot_s(outcome)),
        e2e=percentiles(outcome.ended_s - outcome.due_s for outcome in ok),
        send_delay=percentiles(
            outcome.sent_s - outcome.due_s for outcome in outcomes if outcome.sent_s
        ),
        client_cpu_share=client_cpu_s * per_s,
    )


def percentiles(values_s: Iterable[float]) -> Percentiles:
    """Return the percentiles of seconds, interpolated linearly."""
    values = np.fromiter(values_s, np.float64)
    if not len(values):
        return Percentiles(count=0, p50_ms=0.0, p90_ms=0.0, p99_ms=0.0)
    p50, p90, p99 = (1000.0 * np.percentile(values, (50, 90, 99))).tolist()
    return Percentiles(count=len(values), p50_ms=p50, p90_ms=p90, p99_ms=p99)


def _tpot_s(outcome: RequestResult) -> Iterable[float]:
    """Yield seconds per token after the first, where the answer has them."""
    if outcome.text_times_s and outcome.usage is not None and outcome.usage.completion_tokens > 1:
        after_first_s = outcome.ended_s - outcome.text_times_s[0]
        yield after_first_s / (outcome.usage.completion_tokens - 1)
