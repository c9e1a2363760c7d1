"""Metrics named after vLLM's, beside the source of the vLLM that the sidecar's environment has: names,
kinds, labels and buckets. Its text is read; vLLM is not imported."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from gyre.core.records import EngineStats, ReplicaStatus
from gyre.server.metrics.server_metrics import ServerMetrics
from vllm_sidecar import environment

CONTEXT = 5000  # no bound of a bucket family, so that the cap is seen
KINDS = {"_gauge_cls": "gauge", "_counter_cls": "counter", "_histogram_cls": "histogram"}
OWN_LABELS = {"vllm:cache_config_info": {"model_name"}}  # vLLM's has the cache's settings alone


@dataclass(frozen=True)
class TheirMetric:
    kind: str
    labels: frozenset[str]
    family: str  # of its buckets; "" of none


@pytest.fixture(scope="module")
def source() -> Path:
    (found,) = environment().glob("lib/python3*/site-packages/vllm")
    return found


@pytest.fixture(scope="module")
def theirs(source) -> dict[str, TheirMetric]:
    return read_metrics(ast.parse((source / "v1/metrics/loggers.py").read_text()))


@pytest.fixture(scope="module")
def ours() -> dict[str, Metric]:
    """Every family of a server with one engine that has told its numbers."""

    async def inspect() -> list[ReplicaStatus]:
        return []

    metrics = ServerMetrics("m", context_tokens=CONTEXT, inspect=inspect)
    stats = EngineStats(**{part.name: 1 for part in fields(EngineStats)})
    metrics.engines.update([ReplicaStatus(name="engine-0", state="ready", stats=stats)])
    return {one.name: one for one in metrics.registry.collect() if one.name.startswith("vllm:")}


def read_metrics(module: ast.Module) -> dict[str, TheirMetric]:
    """The metrics that a module makes by calls with a literal name."""
    found: dict[str, TheirMetric] = {}
    families: dict[str, str] = {}  # of a variable that holds buckets
    for node in ast.walk(module):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=variable)],
                value=ast.Call(
                    func=ast.Name(id="histogram_buckets"), args=[ast.Constant(value=str(family))]
                ),
            ):
                families[variable] = family
    common = literal_of(module, "labelnames")
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Attribute(attr=maker)) if maker in KINDS:
                given = {one.arg: one.value for one in node.keywords}
                match given:
                    case {"name": ast.Constant(value=str(name)), "labelnames": labels}:
                        buckets = given.get("buckets")
                        found[name] = TheirMetric(
                            kind=KINDS[maker],
                            labels=frozenset(labels_of(labels, common)),
                            family=families[buckets.id] if isinstance(buckets, ast.Name) else "",
                        )
    return found


def literal_of(module: ast.Module, name: str) -> list[str]:
    """What a variable is first set to."""
    for node in ast.walk(module):
        match node:
            case ast.Assign(targets=[ast.Name(id=variable)], value=ast.List() as value):
                if variable == name:
                    return ast.literal_eval(value)
    raise AssertionError(f"no list {name}")


def labels_of(node: ast.expr, common: list[str]) -> list[str]:
    match node:
        case ast.Name(id="labelnames"):
            return common
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [*labels_of(left, common), *labels_of(right, common)]
        case ast.List(elts=parts):
            return [part.value for part in parts if isinstance(part, ast.Constant)]
    raise AssertionError(ast.unparse(node))


def cache_settings(source: Path) -> Iterator[str]:
    """Fields of its CacheConfig, which are the labels of its cache_config_info."""
    for node in ast.walk(ast.parse((source / "config/cache.py").read_text())):
        if isinstance(node, ast.ClassDef) and node.name == "CacheConfig":
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    yield part.target.id


def labels_told(metric: Metric) -> set[str]:
    return {label for sample in metric.samples for label in sample.labels} - {"le"}


def test_each_name_is_one_of_vllms_with_its_kind_and_labels(source, theirs, ours) -> None:
    assert len(theirs) > 30 and len(ours) > 20
    assert '"vllm:cache_config_info"' in (source / "v1/metrics/loggers.py").read_text()
    labels = frozenset({"engine", *cache_settings(source)})
    known = theirs | {"vllm:cache_config_info": TheirMetric("gauge", labels, "")}
    assert ours.keys() - known.keys() == set()
    for name, metric in ours.items():
        assert metric.type == known[name].kind, name
        extra = labels_told(metric) - known[name].labels
        assert extra == OWN_LABELS.get(name, set()), name


def test_each_histogram_has_vllms_buckets(source, theirs, ours) -> None:
    bounds: Callable[..., list[float]]
    bounds = runpy.run_path(str(source / "v1/metrics/buckets.py"))["histogram_buckets"]
    histograms = [metric for metric in ours.values() if metric.type == "histogram"]
    assert len(histograms) > 10
    for metric in histograms:
        told = [sample.labels["le"] for sample in metric.samples if "le" in sample.labels]
        expected = bounds(theirs[metric.name].family, max_model_len=CONTEXT)
        assert [float(one) for one in told] == [*expected, float("inf")], metric.name
