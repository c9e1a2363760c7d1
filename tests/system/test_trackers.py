"""TensorBoard, W&B (offline), Prometheus and a collector of traces through the real run: each has
what events.jsonl has."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from system_runs import Fault, gyre, read_story, write_config

from otlp_collector import collecting
from scraped import Samples, read_samples

pytestmark = pytest.mark.slow


def test_tensorboard_has_the_curves(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    answer = gyre(
        "train", write_config(tmp_path, {"observe.tensorboard": True}), "--plain", folder=tmp_path
    )
    assert answer.code == 0, answer.err
    run = tmp_path / "runs" / "tiny"
    stages = ("cold_start", "main")
    curves = {
        stage: accumulator.EventAccumulator(str(run / "tensorboard" / stage)).Reload()
        for stage in stages
    }
    story = read_story(run)
    for stage, metric in (("cold_start", "loss"), ("main", "reward"), ("main", "grad_norm")):
        points = [(point.step, point.value) for point in curves[stage].Scalars(metric)]
        told = [
            (step["step"], step["metrics"][metric])
            for step in story.steps
            if step["stage"] == stage
        ]
        assert points == [(step, pytest.approx(value, rel=1e-6)) for step, value in told]
    accuracy = curves["main"].Scalars("eval/accuracy/accuracy")
    assert [point.step for point in accuracy] == [0, 5]


def test_tensorboard_of_a_resumed_run_tells_each_step_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = write_config(tmp_path, {"observe.tensorboard": True})
    killed = gyre(
        "train",
        config,
        "--plain",
        folder=tmp_path,
        fault=Fault(point="event", match="phase.started train", number=8),
    )
    assert killed.code == -9
    run = tmp_path / "runs" / "tiny"
    assert gyre("train", "--resume", run, "--plain", folder=tmp_path).code == 0
    for stage, metric, steps in (
        ("main", "reward", [1, 2, 3, 4, 5]),
        ("cold_start", "loss", [1, 2, 3, 4]),
    ):
        curves = accumulator.EventAccumulator(str(run / "tensorboard" / stage)).Reload()
        assert [point.step for point in curves.Scalars(metric)] == steps


def test_wandb_offline_keeps_the_curves(tmp_path: Path) -> None:
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    home = {
        name: str(tmp_path / "home")
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")
    }
    config = write_config(tmp_path, {"observe.wandb": "offline"})
    answer = gyre("train", config, "--json", folder=tmp_path, env=home)
    assert answer.code == 0, answer.err
    assert answer.out.count("\n") == 1, "W&B prints nothing on stdout"
    assert not answer.left_behind
    files = list((tmp_path / "runs" / "tiny" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1
    rewards = []
    for body in read_wandb(files[0].read_bytes()):
        record = records.Record()
        record.ParseFromString(body)
        items = {
            item.key or ".".join(item.nested_key): item.value_json for item in record.history.item
        }
        if "main/reward" in items:
            rewards.append(float(items["main/reward"]))
    told = [
        s["metrics"]["reward"]
        for s in read_story(tmp_path / "runs" / "tiny").steps
        if s["stage"] == "main"
    ]
    assert rewards == pytest.approx(told)


def read_wandb(data: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format behind seven bytes of W&B's own."""
    block_size, at, parts = 32768, 7, b""
    while at + 7 <= len(data):
        if block_size - at % block_size < 7:  # a header is never split
            at += block_size - at % block_size
            continue
        _, size, part = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""


def scrape_while(run: Future[Any], port: int) -> list[Samples]:
    """What was answered until the run had ended."""
    found = []
    while not run.done():
        with contextlib.suppress(httpx.TransportError):
            found.append(read_samples(httpx.get(f"http://127.0.0.1:{port}/metrics").text))
        time.sleep(0.02)
    return found


def test_prometheus_and_a_collector_have_the_steps(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with collecting(tmp_path / "collector") as collector, ThreadPoolExecutor(1) as threads:
        settings = {"observe.prometheus": port, "observe.otlp_endpoint": collector.url}
        config = write_config(tmp_path, settings)
        run = threads.submit(gyre, "train", config, "--plain", folder=tmp_path)
        scrapes = scrape_while(run, port)
        assert run.result().code == 0, run.result().err
        traces = list(collector.traces().values())
    story = read_story(tmp_path / "runs" / "tiny")
    told = {(step["stage"], step["step"]): step["metrics"] for step in story.steps}
    seen = 0
    for samples in scrapes:
        for stage in ("cold_start", "main"):
            label = f"stage={stage}"
            if (step := samples.get(("gyre_train_step", label))) is None:
                continue
            metrics, seen = told[stage, int(step)], seen + 1
            assert samples["gyre_train_loss", label] == metrics["loss"]
            assert samples["gyre_train_steps_total", label] == step
    assert seen and scrapes[-1]["gyre_train_run_info", "attempt=1", "run=tiny"] == 1

    steps = [tree for tree in traces if tree.root.name == "train_step"]
    keys = [(t.root.attributes["gyre.stage"], t.root.attributes["gyre.step"]) for t in steps]
    assert sorted(keys) == sorted(told)
    for key, tree in zip(keys, steps, strict=True):
        names = [span.name for span in tree.children(tree.root)]
        expected = ["rollout", "score", "train", "handover"] if key[0] == "main" else ["train"]
        assert names == expected
    others = {tree.root.name for tree in traces} - {"train_step"}
    assert {"evaluate", "snapshot", "export"} <= others
    assert {span.resource["service.name"] for tree in traces for span in tree.spans} == {
        "gyre-train"
    }
    assert {span.resource["gyre.run"] for tree in traces for span in tree.spans} == {"tiny"}
