"""The alert rules, the dashboard and the page: each names only metrics that a server has."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy_files import ROOT, asked_for, panel_queries, read_board, read_rules, variable_queries
from gyre.core.records import EngineStats, ReplicaStatus
from gyre.server.metrics.server_metrics import FINISHED_REASONS, ServerMetrics

STATS = EngineStats(
    running=0, waiting=0, prompt_tokens=0, prefix_hit_tokens=0, generated_tokens=0, preemptions=0,
    refused=0, steps=0, pages_used=0, pages_total=8, version=0,
)  # fmt: skip


def families() -> dict[str, Any]:
    """All that a scrape has, by name."""

    async def inspect() -> list[ReplicaStatus]:
        return [ReplicaStatus(name="engine-0", state="ready", stats=STATS)]

    metrics = ServerMetrics("m", context_tokens=64, inspect=inspect)
    metrics.count_response("/v1/completions", 200)
    metrics.count_error("queue_full")
    text = asyncio.run(metrics.expose()).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def series() -> dict[str, set[str]]:
    """The labels of each series name that a query may ask for."""
    found: dict[str, set[str]] = {}
    for family in families().values():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


QUERIES = [
    *(rule["expr"] for rule in read_rules()),
    *(name for name, _ in variable_queries()),
    *(one.query for one in panel_queries()),
]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_what_a_scrape_has(query: str) -> None:
    has, names = series(), asked_for(query)
    assert names, query
    for name, labels in names:
        assert name in has, f"{name} is no metric of /metrics"
        assert labels <= has[name] | {"le"}, (name, labels)


def test_a_name_that_no_scrape_has_is_found() -> None:
    query = 'sum by (le) (rate(vllm:gone_bucket{a="up{x}", le!="1"}[5m])) > 0 and gyre_replicas'
    assert asked_for(query) == [("vllm:gone_bucket", {"a", "le"}), ("gyre_replicas", set())]


def test_each_rule_says_how_bad_it_is_and_what_to_do() -> None:
    rules = read_rules()
    names = [rule["alert"] for rule in rules]
    assert len(set(names)) == len(names)
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket") and rule["for"]
        assert rule["annotations"]["summary"] and rule["annotations"]["action"]


def test_each_panel_has_a_place_of_its_own() -> None:
    panels = read_board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def test_the_page_lists_each_metric_and_no_other() -> None:
    text = (ROOT / "docs/serving.md").read_text(encoding="utf-8").split("## Metrics and health")[1]
    told = set(re.findall(r"`((?:vllm:|gyre_)\w+)[`{]", text.split("\n## ")[0]))
    has = {
        name + "_total" if family.type == "counter" else name for name, family in families().items()
    }
    assert told == has
    assert all(f"`{reason}`" in text for reason in FINISHED_REASONS)
