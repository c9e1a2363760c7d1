"""Engine metrics: the engines' own counters and gauges. In: the status of each engine, before a
scrape. Out: metric families. The label `engine` is an engine's place among the replicas.

Of an engine that did not answer, its last numbers are exposed, with their age. Of a lost one its
counters stay, and its gauges go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gyre.core.records import EngineStats, ReplicaStatus
from gyre.server.metrics.routing_metrics import EngineNumber, routing_families

STATES = ("ready", "starting", "unwell", "lost")


COUNTERS: tuple[EngineNumber[EngineStats], ...] = (
    EngineNumber(
        name="vllm:prefix_cache_queries",
        text="Prompt tokens of completions that began, of which hits are a part.",
        value=lambda stats: stats.prompt_tokens,
    ),
    EngineNumber(
        name="vllm:prefix_cache_hits",
        text="Prompt tokens whose KV was there, that of a sibling completion included.",
        value=lambda stats: stats.prefix_hit_tokens,
    ),
    EngineNumber(
        name="vllm:num_preemptions",
        text="Completions that gave their KV pages up to others.",
        value=lambda stats: stats.preemptions,
    ),
    EngineNumber(
        name="vllm:prompt_tokens",
        text="Prompt tokens of completions that began.",
        value=lambda stats: stats.prompt_tokens,
    ),
    EngineNumber(
        name="vllm:generation_tokens",
        text="Tokens that were chosen.",
        value=lambda stats: stats.generated_tokens,
    ),
    EngineNumber(
        name="gyre_engine_steps", text="Steps of the engine.", value=lambda stats: stats.steps
    ),
    EngineNumber(
        name="gyre_engine_recomputed_tokens",
        text="Tokens computed a second time after a preemption.",
        value=lambda stats: stats.recomputed_tokens,
    ),
)
GAUGES: tuple[EngineNumber[EngineStats], ...] = (
    EngineNumber(
        name="vllm:num_requests_running",
        text="Completions in the running batch.",
        value=lambda stats: stats.running,
    ),
    EngineNumber(
        name="vllm:num_requests_waiting",
        text="Completions that wait for a place in it.",
        value=lambda stats: stats.waiting,
    ),
    EngineNumber(
        name="vllm:kv_cache_usage_perc",
        text="Share of the KV pages in use; 1 is full.",
        value=lambda stats: stats.pages_used / max(1, stats.pages_total),
    ),
    EngineNumber(
        name="gyre_weights_version",
        text="Version of the weights that the engine answers with.",
        value=lambda stats: stats.version,
    ),
)
CACHE = "vllm:cache_config_info"
UP, AGE = "gyre_engine_up", "gyre_engine_stats_age_seconds"
OUTSTANDING, REPLICAS = "gyre_engine_outstanding_tokens", "gyre_replicas"


class EngineMetrics(Collector):
    """What is known of the engines."""

    def __init__(self, model_name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model_name
        self._clock = clock
        self._replicas: Sequence[ReplicaStatus] = ()
        self._known: dict[str, tuple[EngineStats, float]] = {}  # newest stats, and when they came

    def update(self, replicas: Sequence[ReplicaStatus]) -> None:
        """Take the status of all engines, always in the same order."""
        self._replicas, now_s = replicas, self._clock()
        for replica in replicas:
            if replica.stats is not None:
                self._known[replica.name] = replica.stats, now_s

    def miss(self) -> None:
        """Note that no engine answered in time."""
        self._replicas = [
            replace(
                one,
                state="lost" if one.state == "lost" else "unwell",
                reason="",
                stats=None,
                outstanding_tokens=0,
            )
            for one in self._replicas
        ]

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        now_s, labels = self._clock(), ["model_name", "engine"]
        up = GaugeMetricFamily(UP, "1 where the engine is ready.", labels=labels)
        age = GaugeMetricFamily(AGE, "Seconds since the engine told its numbers.", labels=labels)
        outstanding = GaugeMetricFamily(
            OUTSTANDING, "Tokens of its requests still to be computed at most.",
            labels=labels,
        )  # fmt: skip
        cache = GaugeMetricFamily(
            CACHE,
            "1, with labels of the KV cache: tokens of a page, pages, whether prompts share them.",
            labels=[*labels, "block_size", "num_gpu_blocks", "enable_prefix_caching"],
        )
        counters = [CounterMetricFamily(one.name, one.text, labels=labels) for one in COUNTERS]
        gauges = [GaugeMetricFamily(one.name, one.text, labels=labels) for one in GAUGES]
        for place, replica in enumerate(self._replicas):
            values = [self._model, str(place)]
            up.add_metric(values, float(replica.state == "ready"))
            outstanding.add_metric(values, replica.outstanding_tokens)
            if (known := self._known.get(replica.name)) is None:
                continue
            stats, told_s = known
            age.add_metric(values, now_s - told_s)
            for family, one in zip(counters, COUNTERS, strict=True):
                family.add_metric(values, one.value(stats))
            if replica.state != "lost":
                cache.add_metric([*values, *_describe_cache(stats)], 1)
                for family, one in zip(gauges, GAUGES, strict=True):
                    family.add_metric(values, one.value(stats))
        states = [replica.state for replica in self._replicas]
        replicas = GaugeMetricFamily(
            REPLICAS, "Engines in each state.", labels=["model_name", "state"]
        )
        for state in STATES:
            replicas.add_metric([self._model, state], states.count(state))
        yield from (*counters, *gauges, cache, up, age, outstanding, replicas)
        yield from routing_families(self._model, self._replicas)


def _describe_cache(stats: EngineStats) -> tuple[str, str, str]:
    has_cache = stats.prefix_page_tokens > 0
    return str(stats.page_tokens), str(stats.pages_total), str(has_cache)
