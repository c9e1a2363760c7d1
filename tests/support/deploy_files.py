"""The alert rules and the dashboard of deploy/, as queries. In: nothing. Out: each query, and the
metrics and labels that it asks for. Callers: tests of the files, without a Prometheus and with one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
RULES = PROMETHEUS / "gyre.rules.yml"
DASHBOARD = ROOT / "deploy/grafana/gyre.json"
KEYWORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "bool", "offset"}


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One line of a panel."""

    title: str  # of the panel
    query: str  # with Grafana's variables


def asked_for(query: str) -> list[tuple[str, set[str]]]:
    """The metrics that a query names, and the labels by which it chooses of each."""
    query = re.sub(r"\b(by|without)\s*\([^)]*\)", "", query)
    query = re.sub(r"\[[^\]]*\]", "", query)
    found = re.findall(r"([A-Za-z_:][\w:]*)\s*(\{[^}]*\}|\()?", re.sub(r'"[^"]*"', '""', query))
    return [
        (name, set(re.findall(r"(\w+)\s*[=!]", chosen)))
        for name, chosen in found
        if chosen != "(" and name not in KEYWORDS
    ]


def read_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def read_board() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def panel_queries() -> list[PanelQuery]:
    return [
        PanelQuery(panel["title"], target["expr"])
        for panel in read_board()["panels"]
        for target in panel.get("targets", ())
    ]


def variable_queries() -> list[tuple[str, str]]:
    """The metric and the label from which each of the dashboard's variables takes its values."""
    found = [
        re.fullmatch(r"label_values\((\w+), (\w+)\)", one["definition"])
        for one in read_board()["templating"]["list"]
        if "definition" in one
    ]
    assert found and all(found)
    return [(one[1], one[2]) for one in found if one]


def filled_in(query: str, *, window: str) -> str:
    """The query as Grafana sends it, with all models chosen and rates over `window`."""
    query = query.replace("$__rate_interval", window).replace("$model_name", ".+")
    assert "$" not in query, f"a variable that is not known: {query}"
    return query
