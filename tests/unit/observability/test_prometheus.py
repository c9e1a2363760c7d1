"""The metrics of a training run: what a scrape says after known rows, over HTTP."""

from __future__ import annotations

import math
import socket
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gyre.core.errors import ConfigError
from gyre.observability.events import EventLog
from gyre.observability.prometheus import PrometheusSink, clean, place_curve
from scraped import Samples, read_samples


@pytest.fixture
def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=")
        return read_samples(answer.read().decode())


def emit_step(log: EventLog, step: int, **metrics: float) -> None:
    log.emit(
        "step.done",
        stage="main",
        step=step,
        version=step + 1,
        metrics=metrics,
        num_tokens=100,
        num_updates=1,
        seconds=0.5 * step,
    )


def test_a_scrape_has_the_newest_numbers_of_the_run(tmp_path: Path, port: int) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=2)
    sink = PrometheusSink(port, run="arith", attempt=2)
    log.subscribe(sink.write)
    try:
        assert scrape(port)["gyre_train_run_info", "attempt=2", "run=arith"] == 1
        log.emit("stage.started", stage="main", steps=2, step=0)
        for step, reward in ((1, 0.25), (2, 0.75)):
            for phase in ("rollout", "train"):
                log.emit("phase.ended", phase=phase, depth=0, seconds=1.5 * step, step=step)
            log.emit("phase.ended", phase="score/policy", depth=1, seconds=9.0, step=step)
            emit_step(
                log,
                step,
                **{
                    "reward": reward,
                    "reward/format": 1.0,
                    "loss": float("nan"),
                    "entropy": 2.5,
                    "tokens_per_second": 200.0,
                    "sent_bytes/all_gather": 64.0,
                },
            )
        log.emit("drop.truncated", step=2, count=3)
        found, main = scrape(port), "stage=main"
    finally:
        sink.close()
        sink.close()
        log.close()
    assert found["gyre_train_reward", main] == 0.75
    assert found["gyre_train_reward_part", "part=format", main] == 1.0
    assert found["gyre_train_entropy", main] == 2.5
    assert math.isnan(found["gyre_train_loss", main])
    assert found["gyre_train_tokens_per_second", main] == 200.0
    assert found["gyre_train_sent_bytes", "kind=all_gather", main] == 64.0
    assert found["gyre_train_step", main] == 2 and found["gyre_train_version", main] == 3
    assert found["gyre_train_step_seconds", main] == 1.0
    assert found["gyre_train_steps_total", main] == 2
    assert found["gyre_train_trained_tokens_total", main] == 200
    assert found["gyre_train_phase_seconds_total", "phase=rollout", main] == 4.5
    assert not any("score/policy" in label for key in found for label in key)
    assert found["gyre_train_events_total", "kind=drop.truncated"] == 3
    with pytest.raises(OSError):
        scrape(port)


def test_memory_and_evaluations_are_told_by_phase_and_measure(tmp_path: Path, port: int) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=1, check_schema=False)
    sink = PrometheusSink(port, run="arith", attempt=1)
    log.subscribe(sink.write)
    owners = {"engine.kv": {"device": 7, "host": 1, "disk": 0}}
    for worker in ("worker-0", "worker-1"):  # all workers do the same: the first is shown
        row = {"phase": "train", "left": "rollout", "owners": owners, "device_peak_bytes": 9}
        log.emit("memory", worker=worker, **row)
        owners = {"engine.kv": {"device": 70}}
    log.emit("eval.done", stage="main", name="held_out", accuracy=0.5, n=64, step=1)
    try:
        found = scrape(port)
    finally:
        sink.close()
        log.close()
    assert (
        found["gyre_train_device_memory_bytes", "owner=engine.kv", "phase=train", "stage=main"] == 7
    )
    assert found["gyre_train_device_memory_peak_bytes", "phase=rollout", "stage=main"] == 9
    assert found["gyre_train_eval", "measure=accuracy", "name=held_out", "stage=main"] == 0.5


def test_each_family_says_what_it_is(tmp_path: Path, port: int) -> None:
    sink = PrometheusSink(port, run="arith", attempt=1)
    row = {"kind": "step.done", "stage": "main", "step": 1, "version": 1, "num_tokens": 5}
    sink.write(row | {"seconds": 1.0, "metrics": {"entropy": 1.0, "odd": 2.0}})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    sink.close()
    told = {family.name: family.documentation for family in families}
    assert "Unit: nats" in told["gyre_train_entropy"]
    assert all(told.values()) and "gyre_train_odd" in told


def test_a_port_that_is_taken_is_refused_by_name(port: int) -> None:
    sink = PrometheusSink(port, run="a", attempt=1)
    try:
        with pytest.raises(ConfigError, match=f"observe.prometheus = {port}"):
            PrometheusSink(port, run="b", attempt=1)
    finally:
        sink.close()
    again = PrometheusSink(port, run="b", attempt=1)  # as after a restart in the same process
    again.close()


@given(st.text(min_size=1, max_size=30))
def test_any_name_of_a_metric_is_one_of_prometheus(name: str) -> None:
    family, labels = place_curve(name)
    assert family == clean(family)
    assert len(dict(labels)) == len(labels) and "stage" not in dict(labels)
