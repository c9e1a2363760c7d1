"""Metrics: what the server counts and times of each request. In: requests, their chunks, errors,
responses. Out: counters and histograms in a registry of their own, in Prometheus' text format.

Names and buckets are those of vLLM where the number is the same. A completion is what vLLM calls a
request: n = 2 counts as two. Numbers that only the engines know are in `engine_metrics.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gyre.core.contracts import RolloutEngine
from gyre.core.records import ReplicaStatus, Request, Timing, TokenChunk
from gyre.server.bodies.schema import ApiError
from gyre.server.metrics.engine_metrics import EngineMetrics

Inspect = Callable[[], Awaitable[Sequence[ReplicaStatus]]]

SCRAPE_S = 5.0  # longest wait for the engines' numbers

# vLLM's bucket boundaries
# fmt: off
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
LATENCY_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
PARAMS_N = (1, 2, 5, 10, 20)
ANSWERED = ("stop", "length")
FINISHED_REASONS = (*ANSWERED, "abort", "error")


class ServerMetrics:
    """All metrics of one server. `inspect` returns the state of each engine by its deadline."""

    def __init__(
        self,
        model_name: str,
        *,
        context_tokens: int,
        inspect: Inspect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry()
        self._inspect = inspect
        self.clock = clock
        self._model = {"model_name": model_name}
        tokens = token_buckets(context_tokens)
        success = self._counter(
            "vllm:request_success", "Completions that ended, by why.", "finished_reason"
        )
        self.success = {
            reason: success.labels(**self._model, finished_reason=reason)
            for reason in FINISHED_REASONS
        }
        self.first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Seconds to the first token.", FIRST_TOKEN_S
        )
        self.between_tokens = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Seconds between two chunks of a streamed completion.",
            BETWEEN_TOKENS_S,
        )
        self.latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Seconds to the end of a completion.", LATENCY_S
        )
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "Seconds until a step first ran it.", LATENCY_S
        )
        self.prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds",
            "Seconds from the step that first ran a completion to its first token.",
            LATENCY_S,
        )
        self.decode_time = self._histogram(
            "vllm:request_decode_time_seconds",
            "Seconds from the first token of a completion to its last.",
            LATENCY_S,
        )
        self.inference_time = self._histogram(
            "vllm:request_inference_time_seconds",
            "Seconds from the step that first ran a completion to its last token.",
            LATENCY_S,
        )
        self.token_time = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Seconds of a completion's decoding for each token after its first.",
            BETWEEN_TOKENS_S,
        )
        self.prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a completion.", tokens
        )
        self.generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens of a completion.", tokens
        )
        self.longest_tokens = self._histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens of the longest completion of a request.",
            tokens,
        )
        self.params_n = self._histogram(
            "vllm:request_params_n", "Completions asked for by a request.", PARAMS_N
        )
        self.params_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "Tokens that a completion may have at most.", tokens
        )
        self.responses = self._counter(
            "gyre_http_responses", "HTTP responses; 499: the client hung up first.", "route status"
        )
        self.errors = self._counter(
            "gyre_request_errors", "Refused and failed requests, by the error's code.", "code"
        )
        self.disconnects = self._counter(
            "gyre_disconnects", "Requests that were aborted since the client hung up."
        ).labels(**self._model)
        self.in_flight = Gauge(
            "gyre_requests_in_flight",
            "Requests that are not answered yet.",
            ["model_name"],
            registry=self.registry,
        ).labels(**self._model)
        self.engines = EngineMetrics(model_name, clock=clock)
        self.registry.register(self.engines)

    def follow(self, request: Request) -> FollowedRequest:
        """Return what counts and times the request, as a context that lasts as long as it."""
        return FollowedRequest(self, request)

    def count_error(self, code: str) -> None:
        self.errors.labels(**self._model, code=code).inc()

    def count_response(self, route: str, status: int) -> None:
        self.responses.labels(**self._model, route=route, status=str(status)).inc()

    async def expose(self) -> bytes:
        """Return all metrics as text. Where the engines are late, with what is known of them."""
        try:
            self.engines.update(await asyncio.wait_for(self._inspect(), SCRAPE_S))
        except TimeoutError:
            self.engines.miss()
        return generate_latest(_WithoutCreated(self.registry))

    def _counter(self, name: str, text: str, labels: str = "") -> Counter:
        return Counter(name, text, ["model_name", *labels.split()], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        labels = ["model_name"]
        histogram = Histogram(name, text, labels, registry=self.registry, buckets=buckets)
        return histogram.labels(**self._model)


class FollowedRequest:
    """One request, from its submit to its end."""

    def __init__(self, metrics: ServerMetrics, request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._open = set(range(request.sampling.n))
        self._tokens = dict.fromkeys(self._open, 0)
        self._last_s: dict[int, float] = {}  # of each completion's newest chunk
        self._timings: dict[int, Timing] = {}
        self._submitted_s = 0.0

    def __enter__(self) -> FollowedRequest:
        self._submitted_s = self._metrics.clock()
        self._metrics.in_flight.inc()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        metrics = self._metrics
        metrics.in_flight.dec()
        if error is None:
            return
        has_left = isinstance(error, asyncio.CancelledError | GeneratorExit)
        if has_left:
            metrics.disconnects.inc()
        elif isinstance(error, ApiError):
            metrics.count_error(error.code)
        if isinstance(error, ApiError) and error.status == 429 and not self._last_s:
            return  # no engine took it
        metrics.success["abort" if has_left else "error"].inc(len(self._open))

    async def watch(self, stream: AsyncIterator[TokenChunk]) -> AsyncIterator[TokenChunk]:
        """Pass the chunks on."""
        async for chunk in stream:
            self._observe(chunk)
            yield chunk

    def _observe(self, chunk: TokenChunk) -> None:
        metrics, now_s = self._metrics, self._metrics.clock()
        if len(chunk.tokens):
            self._tokens[chunk.index] += len(chunk.tokens)
            if (last_s := self._last_s.get(chunk.index)) is not None:
                metrics.between_tokens.observe(now_s - last_s)
            self._last_s[chunk.index] = now_s
        if (timing := chunk.timing) is not None:
            self._timings[chunk.index] = timing
            metrics.queue_time.observe(timing.started_s - self._submitted_s)
            metrics.first_token.observe(timing.first_token_s - self._submitted_s)
        if chunk.finish in ANSWERED:
            self._open.remove(chunk.index)
            metrics.success[chunk.finish].inc()
            metrics.latency.observe(now_s - self._submitted_s)
            metrics.prompt_tokens.observe(len(self._request.tokens))
            metrics.generation_tokens.observe(self._tokens[chunk.index])
            metrics.params_max_tokens.observe(self._request.sampling.max_tokens)
            self._observe_parts(chunk.index)
            if not self._open:
                metrics.params_n.observe(self._request.sampling.n)
                metrics.longest_tokens.observe(max(self._tokens.values()))

    def _observe_parts(self, index: int) -> None:
        """Time the parts of a completion; of one without a token there are none."""
        if (timing := self._timings.get(index)) is None:
            return
        metrics, num_tokens = self._metrics, self._tokens[index]
        decode_s = self._last_s[index] - timing.first_token_s
        metrics.prefill_time.observe(timing.first_token_s - timing.started_s)
        metrics.decode_time.observe(decode_s)
        metrics.inference_time.observe(timing.first_token_s - timing.started_s + decode_s)
        if num_tokens > 1:
            metrics.token_time.observe(decode_s / (num_tokens - 1))


class _WithoutCreated(Collector):
    """A registry without the time at which each series began, which doubles the series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family


def token_buckets(most: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, … up to `most`: vLLM's buckets of token counts. Pure."""
    found = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > most:
                return found
            found.append(step * scale)
        scale *= 10


def inspect_one(engine: RolloutEngine) -> Inspect:
    """Return the inspection of a single engine in this process."""

    async def inspect() -> Sequence[ReplicaStatus]:
        health, stats = await asyncio.gather(engine.health(), engine.stats())
        state = "ready" if health.ok else "unwell"
        return [ReplicaStatus(name="engine-0", state=state, reason=health.reason, stats=stats)]

    return inspect
