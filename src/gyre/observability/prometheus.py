"""Prometheus: the newest numbers of a training run, to be scraped on loopback. In: event rows. Out:
gauges and counters at http://127.0.0.1:PORT/metrics, in Prometheus' text format.

The curves are those of the other trackers (`scalars`). A metric of `step.done` is the gauge
`gyre_train_METRIC`; what stands behind a "/" in its name is a label.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gyre.core.errors import ConfigError
from gyre.observability.events import StageTracker, is_counted, weight_of
from gyre.observability.metric_catalog import place
from gyre.observability.trackers import scalars

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

ADDRESS = "127.0.0.1"
PREFIX = "gyre_train_"
Labels = tuple[tuple[str, str], ...]

# by what stands before the "/" of a curve: family and label of what stands behind it
_FAMILIES = {"reward": ("reward_part", "part"), "sent_bytes": ("sent_bytes", "kind")}
_HELP = {
    "step": "Newest step that has ended.",
    "version": "Version of the policy's weights after it.",
    "step_seconds": "Seconds of the newest step.",
    "steps": "Steps that have ended in this attempt.",
    "trained_tokens": "Tokens trained on in this attempt, padding not counted.",
    "phase_seconds": "Seconds spent in each phase in this attempt.",
    "eval": "Newest value of each measure of an evaluation.",
    "device_memory_bytes": "Bytes on the device by owner, at the beginning of a phase.",
    "device_memory_peak_bytes": "Most bytes on the device in a phase.",
    "events": "Fallbacks, drops, retries and warnings of this attempt, by kind.",
    "run_info": "1; which run and attempt it is.",
}


def place_curve(name: str) -> tuple[str, Labels]:
    """Return the family of a curve, without the prefix, and its labels beside the stage. Pure."""
    first, _, rest = name.partition("/")
    if not rest:
        return clean(first), ()
    if first == "eval":
        which, _, measure = rest.partition("/")
        return "eval", (("name", which), ("measure", measure))
    if first == "memory_bytes":
        phase, _, owner = rest.partition("/")
        if owner == "peak":
            return "device_memory_peak_bytes", (("phase", phase),)
        return "device_memory_bytes", (("phase", phase), ("owner", owner))
    family, label = _FAMILIES.get(first, (f"{clean(first)}_part", "part"))
    return family, ((label, rest),)


def describe_curve(name: str) -> str:
    """Return what a curve is, with its unit, as the report says it. Pure."""
    found = place(name)
    if found is None:
        return "Newest value of this metric of a step."
    panel = found[0]
    return panel.help if not panel.unit else f"{panel.help} Unit: {panel.unit}."


def clean(name: str) -> str:
    """Return a name that Prometheus takes. Pure."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


class RunMetrics:
    """What a scrape says: a collector of prometheus_client, kept up to date by event rows."""

    def __init__(self, *, run: str, attempt: int) -> None:
        self._lock = threading.Lock()  # rows come from one thread, scrapes from others
        self._stages = StageTracker()
        self._gauges: dict[str, dict[Labels, float]] = {
            "run_info": {(("run", run), ("attempt", str(attempt))): 1.0}
        }
        self._counters: dict[str, dict[Labels, float]] = {"events": {}}
        self._help = dict(_HELP)

    def write(self, row: Mapping[str, Any]) -> None:
        """Take one row of the log."""
        with self._lock:
            stage: Labels = (("stage", self._stages.stage(row)),)
            if row["kind"] == "phase.ended":
                if row.get("depth") == 0:
                    self._add("phase_seconds", (*stage, ("phase", row["phase"])), row["seconds"])
            else:
                for name, value in scalars(row).items():
                    family, labels = place_curve(name)
                    self._help.setdefault(family, describe_curve(name))
                    self._gauges.setdefault(family, {})[(*stage, *labels)] = value
            if row["kind"] == "step.done":
                for family, value in (
                    ("step", row["step"]),
                    ("version", row["version"]),
                    ("step_seconds", row["seconds"]),
                ):
                    self._gauges.setdefault(family, {})[stage] = float(value)
                self._add("steps", stage, 1)
                self._add("trained_tokens", stage, row["num_tokens"])
            if is_counted(row):
                self._add("events", (("kind", row["kind"]),), weight_of(row))

    def collect(self) -> Iterator[Metric]:
        """Yield every family, as prometheus_client asks for them."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            gauges = {name: dict(values) for name, values in self._gauges.items()}
            counters = {name: dict(values) for name, values in self._counters.items()}
        for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, values in families.items():
                labels = [label for label, _ in next(iter(values), ())]
                family = kind(PREFIX + name, self._help[name], labels=labels)
                for found, value in values.items():
                    family.add_metric([text for _, text in found], value)
                yield family

    def _add(self, name: str, labels: Labels, value: float) -> None:
        values = self._counters.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + value


class PrometheusSink:
    """Answers scrapes of one run, from a thread of its own."""

    def __init__(self, port: int, *, run: str, attempt: int) -> None:
        """Listen. ConfigError where the port cannot be had."""
        from prometheus_client import CollectorRegistry, start_http_server

        self._metrics = RunMetrics(run=run, attempt=attempt)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self._metrics)  # type: ignore[arg-type]
        try:
            self._server, self._thread = start_http_server(port, ADDRESS, registry)
        except OSError as error:
            raise ConfigError(
                f"observe.prometheus = {port}: cannot listen on {ADDRESS}: {error.strerror}",
                hint="another run may have it; choose another port, or 0 for none",
            ) from error
        self._is_open = True

    def write(self, row: Mapping[str, Any]) -> None:
        self._metrics.write(row)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._server.shutdown()
            self._server.server_close()
