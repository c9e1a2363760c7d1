"""What the router gives to each engine, as a scrape tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gyre.core.records import ReplicaStatus, RoutingStats
from gyre.server.metrics.server_metrics import ServerMetrics
from scraped import read_samples

GIVEN = RoutingStats(
    requests=5, believed_hit_tokens=64, sessions_kept=2, sessions_moved=1, ejections=3, share=0.5,
    load=90, believed_pages=11, sessions=7,
)  # fmt: skip


def test_each_engine_has_the_routers_numbers_also_while_it_does_not_answer() -> None:
    async def work() -> None:
        is_late = False

        async def inspect() -> Sequence[ReplicaStatus]:
            if is_late:
                raise TimeoutError
            return [
                ReplicaStatus(name="engine-0", state="ready"),
                ReplicaStatus(name="engine-1", state="lost", routing=GIVEN),
            ]

        metrics = ServerMetrics("m", context_tokens=64, inspect=inspect)
        first = read_samples((await metrics.expose()).decode())
        is_late = True
        second = read_samples((await metrics.expose()).decode())
        names = ("gyre_engine_", "gyre_routing_")
        for found in (first, second):
            told = {
                key[0]: value
                for key, value in found.items()
                if key[0].startswith(names) and "engine=0" not in key
            }
            assert told.pop("gyre_engine_up") == told.pop("gyre_engine_outstanding_tokens") == 0
            assert told == {
                "gyre_engine_routed_requests_total": 5,
                "gyre_engine_believed_hit_tokens_total": 64,
                "gyre_engine_sessions_kept_total": 2,
                "gyre_engine_sessions_moved_total": 1,
                "gyre_engine_ejections_total": 3,
                "gyre_engine_routing_share": 0.5,
                "gyre_engine_routing_load": 90,
                "gyre_engine_routing_prefix_pages": 11,
                "gyre_routing_sessions": 7,
            }
        assert first["gyre_engine_routing_share", "engine=0"] == 1
        assert first["gyre_engine_routed_requests_total", "engine=0"] == 0

    asyncio.run(work())
