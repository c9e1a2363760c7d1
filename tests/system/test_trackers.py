"""TensorBoard and W&B (offline) through the real run: their files hold the curves of events.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest
from system_runs import Fault, gyre, read_story, write_config


def test_tensorboard_has_the_curves(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    answer = gyre("train", write_config(tmp_path, {"observe.tensorboard": True}), "--plain", folder=tmp_path)
    assert answer.code == 0, answer.err
    run = tmp_path / "runs" / "tiny"
    curves = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    story = read_story(run)
    for stage, metric in (("cold_start", "loss"), ("main", "reward"), ("main", "grad_norm")):
        points = [(point.step, point.value) for point in curves.Scalars(f"{stage}/{metric}")]
        told = [(step["step"], step["metrics"][metric]) for step in story.steps if step["stage"] == stage]
        assert points == [(step, pytest.approx(value, rel=1e-6)) for step, value in told]
    accuracy = curves.Scalars("main/eval/accuracy/accuracy")
    assert [point.step for point in accuracy] == [0, 5]


@pytest.mark.slow
def test_tensorboard_of_a_resumed_run_tells_each_step_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = write_config(tmp_path, {"observe.tensorboard": True})
    killed = gyre(
        "train", config, "--plain", folder=tmp_path, fault=Fault(point="event", match="phase.started train", number=8)
    )
    assert killed.code == -9
    run = tmp_path / "runs" / "tiny"
    assert gyre("train", "--resume", run, "--plain", folder=tmp_path).code == 0
    curves = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    assert [point.step for point in curves.Scalars("main/reward")] == [1, 2, 3, 4, 5]
    assert [point.step for point in curves.Scalars("cold_start/loss")] == [1, 2, 3, 4]


def test_wandb_offline_keeps_a_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    config = write_config(tmp_path, {"observe.wandb": "offline"})
    answer = gyre("train", config, "--json", folder=tmp_path)
    assert answer.code == 0, answer.err
    assert answer.out.count("\n") == 1, "W&B prints nothing on stdout"
    assert not answer.left_behind
    files = list((tmp_path / "runs" / "tiny" / "wandb").rglob("*.wandb"))
    assert len(files) == 1
    store = DataStore()
    store.open_for_scan(str(files[0]))
    rewards = []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "main/reward" in items:
            rewards.append(float(items["main/reward"]))
    told = [s["metrics"]["reward"] for s in read_story(tmp_path / "runs" / "tiny").steps if s["stage"] == "main"]
    assert rewards == pytest.approx(told)
