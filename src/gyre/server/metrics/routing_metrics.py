"""Routing metrics: what the router gives to each engine. In: the status of each engine, before a
scrape. Out: metric families. The router's own counts are known of every engine, lost or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gyre.core.records import ReplicaStatus, RoutingStats

Family = CounterMetricFamily | GaugeMetricFamily
Source = TypeVar("Source")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNumber(Generic[Source]):
    """One metric of an engine, from its stats or from what it was given."""

    name: str
    text: str
    value: Callable[[Source], float]


COUNTERS: tuple[EngineNumber[RoutingStats], ...] = (
    EngineNumber(
        name="gyre_engine_routed_requests",
        text="Requests that were given to the engine.",
        value=lambda stats: stats.requests,
    ),
    EngineNumber(
        name="gyre_engine_believed_hit_tokens",
        text="Prompt tokens that the router believed cached, those of siblings included.",
        value=lambda stats: stats.believed_hit_tokens,
    ),
    EngineNumber(
        name="gyre_engine_sessions_kept",
        text="Requests that went to the engine which served their session last.",
        value=lambda stats: stats.sessions_kept,
    ),
    EngineNumber(
        name="gyre_engine_sessions_moved",
        text="Requests of a session that another engine had served last.",
        value=lambda stats: stats.sessions_moved,
    ),
    EngineNumber(
        name="gyre_engine_ejections",
        text="How often the engine was ejected: it stood still, or was lost.",
        value=lambda stats: stats.ejections,
    ),
)


def routing_families(model_name: str, replicas: Sequence[ReplicaStatus]) -> list[Family]:
    """Return the metrics of the engines, each labeled by its place."""
    labels = ["model_name", "engine"]
    share = GaugeMetricFamily(
        "gyre_engine_routing_share",
        "Of new requests that the engine may have; 0 while it is ejected.",
        labels=labels,
    )
    load = GaugeMetricFamily(
        "gyre_engine_routing_load",
        "What its requests have still to compute by estimate, in tokens of a prompt.",
        labels=labels,
    )
    pages = GaugeMetricFamily(
        "gyre_engine_routing_prefix_pages",
        "Pages that the router believes in the engine's prefix cache.",
        labels=labels,
    )
    counters = [CounterMetricFamily(one.name, one.text, labels=labels) for one in COUNTERS]
    for place, replica in enumerate(replicas):
        values = [model_name, str(place)]
        share.add_metric(values, replica.routing.share)
        load.add_metric(values, replica.routing.load)
        pages.add_metric(values, replica.routing.believed_pages)
        for family, one in zip(counters, COUNTERS, strict=True):
            family.add_metric(values, one.value(replica.routing))
    sessions = GaugeMetricFamily(
        "gyre_routing_sessions", "Sessions whose engine is known.", labels=["model_name"]
    )
    known = max((replica.routing.sessions for replica in replicas), default=0)
    sessions.add_metric([model_name], known)
    return [*counters, share, load, pages, sessions]
