"""Runs on Ray: two trainer ranks and two engines give what one process gives; a worker that is
killed or hangs costs a restart and nothing else; an engine that is killed costs its rollouts;
several nodes on one machine."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from system_runs import (
    LEARNS,
    Answer,
    Fault,
    Story,
    check_learned,
    events_of,
    gyre,
    read_story,
    tell_cluster_run,
    write_config,
)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
ON_RAY: Mapping[str, Any] = {
    "cold_start": None,
    "trainer.steps": 4,
    "snapshot.every_steps": 1,
    "cluster": {
        "kind": "ray",
        "num_workers": 2,
        "cpus_per_worker": 0.5,
        "object_store_bytes": 200 << 20,
        "progress_tokens": 2,
    },
}


def run(folder: Path, sets: Mapping[str, Any], *, code: int = 0, **options: Any) -> Answer:
    folder.mkdir(exist_ok=True)
    # sockets: short
    with tempfile.TemporaryDirectory(prefix="gyre-ray-", ignore_cleanup_errors=True) as ray_folder:
        env = {"RAY_TMPDIR": ray_folder, **options.pop("env", {})}
        answer = gyre(
            "train", write_config(folder, sets), "--plain", folder=folder, env=env, **options
        )
        told = tell_cluster_run(answer, folder / "runs" / "tiny", Path(ray_folder))
    assert not answer.left_behind, told
    assert answer.code == code, told
    return answer


def finished(folder: Path, sets: Mapping[str, Any], **options: Any) -> Story:
    run(folder, sets, **options)
    return read_story(folder / "runs" / "tiny")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Story:
    folder = tmp_path_factory.mktemp("whole")
    answer = run(folder, ON_RAY)
    assert "(raylet)" not in answer.out + answer.err, "Ray warns of workers that died"
    return read_story(folder / "runs" / "tiny")


def test_two_workers_give_what_one_process_gives(tmp_path: Path, undisturbed: Story) -> None:
    alone = finished(tmp_path, {**ON_RAY, "cluster": None})
    assert len(alone.steps) == len(undisturbed.steps) == 4
    for here, there in zip(undisturbed.steps, alone.steps, strict=True):
        assert (here["step"], here["version"], here["num_tokens"]) == (
            there["step"],
            there["version"],
            there["num_tokens"],
        )
        for name in ("loss", "grad_norm", "reward", "length", "entropy"):
            assert here["metrics"][name] == pytest.approx(
                there["metrics"][name], rel=1e-3, abs=1e-4
            ), name
        assert here["metrics"]["logprob_gap_max"] < 1e-4


def test_two_workers_learn(tmp_path: Path) -> None:
    check_learned(finished(tmp_path, {**ON_RAY, **LEARNS, "trainer.steps": 30}))


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.variant), 3])
def test_an_export_between_the_steps_is_the_model(tmp_path: Path, zero: int) -> None:
    """The last one is the export at the end, to the bit, also of shards."""
    sets = {**ON_RAY, "trainer.steps": 2, "parallel.zero": zero, "snapshot.export_every_steps": 1}
    run(tmp_path, sets)
    folder = tmp_path / "runs" / "tiny"
    first, last = sorted((folder / "exports").iterdir())
    assert (last / "model.safetensors").read_bytes() == (
        folder / "export" / "model.safetensors"
    ).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (last / "model.safetensors").read_bytes()
    verified = [row["folder"] for row in events_of(folder, "export.verified")]
    assert verified == [f"exports/{first.name}", f"exports/{last.name}", "export"]


@pytest.mark.parametrize(
    ("phase", "background"),
    [pytest.param("train", True, marks=pytest.mark.variant), ("snapshot", False)],
)
def test_a_killed_worker_costs_a_restart_and_nothing_else(
    tmp_path: Path, undisturbed: Story, phase: str, background: bool
) -> None:
    fault = Fault(
        point="event",
        match=f"phase.started {phase}",
        number=3,
        action="kill_worker",
        worker="worker-1",
    )
    story = finished(tmp_path, {**ON_RAY, "snapshot.background": background}, fault=fault)
    assert story == undisturbed
    assert story.num_attempts == 2
    (restart,) = events_of(tmp_path / "runs" / "tiny", "retry.run_restarted")
    assert "worker-1" in restart["error"]


@pytest.mark.parametrize(
    ("phase", "at"),
    [
        ("train", "step_now"),
        pytest.param("handover", "fault-board", marks=pytest.mark.variant),
        pytest.param("snapshot", "saver.py", marks=pytest.mark.variant),
    ],
)
def test_a_worker_that_hangs_is_noticed_and_costs_a_restart(
    tmp_path: Path, undisturbed: Story, phase: str, at: str
) -> None:
    """Wherever it stops: within hang_s, with what the other one was at."""
    fault = Fault(
        point="event",
        match=f"phase.started {phase}",
        number=2,
        action="stop_worker",
        worker="worker-0",
    )
    sets = {**ON_RAY, "cluster": {**ON_RAY["cluster"], "hang_s": 6.0}}
    story = finished(tmp_path, sets, fault=fault)
    assert story == undisturbed
    (restart,) = events_of(tmp_path / "runs" / "tiny", "retry.run_restarted")
    error = restart["error"]
    assert (
        "hangs" in error
        and "worker-0 answers nothing" in error
        and "== worker-1" in error
        and at in error
    )


@pytest.mark.variant
def test_a_rank_killed_at_a_random_moment_changes_nothing(
    tmp_path: Path, undisturbed: Story
) -> None:
    """At some event of the run, as a seed has it."""
    number = random.Random(14).randrange(1, 60)
    fault = Fault(
        point="event",
        match="phase|step|memory",
        number=number,
        action="kill_worker",
        worker="worker-1",
    )
    story = finished(tmp_path, ON_RAY, fault=fault)
    assert story == undisturbed and story.num_attempts == 2


def test_restarts_are_bounded_and_the_last_error_names_the_worker(tmp_path: Path) -> None:
    fault = Fault(
        point="event",
        match="phase.started rollout",
        number=2,
        action="kill_worker",
        worker="worker-0",
    )
    answer = run(
        tmp_path,
        {**ON_RAY, "cluster": {**ON_RAY["cluster"], "max_restarts": 0}},
        fault=fault,
        code=2,
    )
    assert "worker-0" in answer.err and "Traceback" not in answer.err


def test_a_killed_engine_costs_its_rollouts_only_and_comes_back(tmp_path: Path) -> None:
    """Scores of the step in which it is lost wait until it is back, so the steps after that have
    it."""
    folder = tmp_path / "runs" / "tiny"
    options = {"events": str(folder / "events.jsonl")}
    part = {
        "kind": "function",
        "path": "system_rewards:varied_once_back",
        "options": options,
        "limit_s": 100.0,
    }
    sets = {
        **ON_RAY,
        "trainer.steps": 5,
        "rewards": {"workers": 1, "parts": [part]},
        "rollout.max_tokens": 64,
        "rollout.ignore_eos": True,
        "cluster": {**ON_RAY["cluster"], "num_workers": 1, "engine_workers": 1},
    }
    fault = Fault(
        point="event",
        match="phase.started rollout",
        number=2,
        action="kill_worker",
        worker="engine-0",
    )
    story = finished(tmp_path, sets, fault=fault)
    assert story.num_attempts == 1 and len(story.steps) == 5
    (lost,) = events_of(folder, "engine.lost")
    assert lost["engine"] == "engine-0"
    again = events_of(folder, "retry.request_requeued")
    assert len(again) == lost["requests"] > 0
    (back,) = events_of(folder, "engine.rejoined")
    assert (back["engine"], back["version"]) == ("engine-0", 1)
    taken = [
        row["version"]
        for row in events_of(folder, "engine.committed")
        if row.get("worker") == "engine-0"
    ]
    assert taken == [0, 1, 1, 2, 3, 4, 5], "versions before and after it was lost"
    assert all(step["metrics"]["logprob_gap_max"] < 1e-4 for step in story.steps), story.steps
    assert not events_of(folder, "retry.run_restarted")


def test_ctrl_c_leaves_nothing_behind_and_the_run_goes_on(
    tmp_path: Path, undisturbed: Story
) -> None:
    fault = Fault(point="event", match="phase.started rollout", number=3, action="interrupt_group")
    run(tmp_path, ON_RAY, fault=fault, code=130)
    answer = gyre("train", "--resume", tmp_path / "runs" / "tiny", "--plain", folder=tmp_path)
    assert answer.code == 0, answer.err
    assert read_story(tmp_path / "runs" / "tiny") == undisturbed


def test_a_lost_raylet_costs_a_restart_and_nothing_else(tmp_path: Path, undisturbed: Story) -> None:
    fault = Fault(point="event", match="phase.started train", number=3, action="kill_raylet")
    answer = run(tmp_path, ON_RAY, fault=fault)
    assert read_story(tmp_path / "runs" / "tiny") == undisturbed
    (restart,) = events_of(tmp_path / "runs" / "tiny", "retry.run_restarted")
    assert (
        "raylet" in restart["error"] and answer.err.count("retry.run_restarted: number=1") == 1
    ), answer.err
    assert "Traceback" not in answer.err, answer.err


@pytest.mark.variant
def test_a_raylet_lost_once_too_often_ends_with_one_message(tmp_path: Path) -> None:
    fault = Fault(point="event", match="phase.started rollout", number=2, action="kill_raylet")
    answer = run(
        tmp_path,
        {**ON_RAY, "cluster": {**ON_RAY["cluster"], "max_restarts": 0}},
        fault=fault,
        code=2,
    )
    assert answer.err.count("error: Ray ended the driver") == 1 and "--resume" in answer.err, (
        answer.err
    )


def test_a_killed_driver_leaves_nothing_behind(tmp_path: Path) -> None:
    fault = Fault(point="event", match="phase.started rollout", number=2)
    answer = run(tmp_path, ON_RAY, fault=fault, code=2)
    assert "ended by signal 9" in answer.err and "--resume" in answer.err, answer.err
    assert not events_of(tmp_path / "runs" / "tiny", "retry.run_restarted"), (
        "somebody wanted it gone"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace of one's own takes root")
def test_a_killed_command_leaves_nothing_behind_where_no_init_reaps(tmp_path: Path) -> None:
    """The first process of the namespace is one that never waits for a child."""
    config, mark = write_config(tmp_path, {**ON_RAY, "trainer.steps": 5000}), uuid.uuid4().hex
    events = tmp_path / "runs" / "tiny" / "events.jsonl"
    command = f"{sys.executable} -c 'from gyre.cli.main import main; main()' train {config} --plain"
    with tempfile.TemporaryDirectory(prefix="gyre-ray-", ignore_cleanup_errors=True) as ray_folder:
        env = {**os.environ, "RAY_TMPDIR": ray_folder, "GYRE_SYSTEM_TEST": mark}
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        script = f"{command} & echo $! > {tmp_path}/pid; exec sleep 1000"
        shell = ["unshare", "--pid", "--fork", "--mount-proc", "bash", "-c", script]
        outer = subprocess.Popen(
            shell, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until(lambda: events.exists() and b'"phase":"train"' in events.read_bytes(), 120.0)
            init = psutil.Process(outer.pid).children()[0]
            assert init.name() == "sleep"
            (front,) = init.children()
            assert len(front.children(recursive=True)) > 4, (
                "guard, driver, Ray's processes, workers"
            )
            front.kill()
            wait_until(lambda: not alive_below(init), 20.0)
        finally:
            for process in psutil.Process(outer.pid).children():
                process.kill()
            outer.wait()


def alive_below(init: psutil.Process) -> list[str]:
    """What still runs there, and holds something: a zombie that nobody reaps holds nothing."""
    alive = []
    for process in init.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends while it is looked at
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process.name())
    return alive


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.05)


def test_a_cluster_that_is_too_small_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    answer = run(tmp_path, {**ON_RAY, "cluster": {**ON_RAY["cluster"], "num_workers": 900}}, code=2)
    assert "900 workers need 450 cores" in answer.err, answer.err
    assert not (tmp_path / "runs").exists()


def test_shards_and_engines_alone_are_refused(tmp_path: Path) -> None:
    sets = {**ON_RAY, "parallel.zero": 2, "cluster": {**ON_RAY["cluster"], "engine_workers": 1}}
    answer = run(tmp_path, sets, code=2)
    assert "shards reach only engines beside a trainer rank" in answer.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("own", "killed"),
    [
        pytest.param({"zero": 2}, False, marks=pytest.mark.variant),
        ({"zero": 3}, True),
        pytest.param({"tensor_ranks": 2}, True, marks=pytest.mark.variant),
    ],
    ids=["zero 2", "zero 3", "parts"],
)
def test_weights_go_from_shards_into_the_engines(
    tmp_path: Path, undisturbed: Story, own: Mapping[str, int], killed: bool
) -> None:
    """Sharded weights are float32 masters here, so that the numbers are those of the other runs;
    also where phases take turns, and a restarted trainer begins with blank models that are
    parked."""
    sets, fault = {**ON_RAY, "parallel": own}, None
    if killed:
        sets["memory.residency"] = "phase"
        fault = Fault(
            point="event",
            match="phase.started train",
            number=3,
            action="kill_worker",
            worker="worker-1",
        )
    story = finished(tmp_path, sets, fault=fault)
    gathered = events_of(tmp_path / "runs" / "tiny", "weights.gathered")
    assert {row["worker"] for row in gathered} == {"worker-0", "worker-1"}
    for here, there in zip(story.steps, undisturbed.steps, strict=True):
        assert here["version"] == there["version"]
        for name in ("loss", "grad_norm", "reward", "length"):
            assert here["metrics"][name] == pytest.approx(
                there["metrics"][name], rel=1e-3, abs=1e-4
            ), name
        assert here["metrics"]["logprob_gap_max"] < 1e-4


@pytest.mark.parametrize(
    ("own", "alike"),
    [
        ({"parallel.zero": 3}, True),
        pytest.param(
            {"parallel.zero": 3, "parallel.reference": {"zero": 0}},
            False,
            marks=pytest.mark.variant,
        ),
        pytest.param({"parallel.tensor_ranks": 2}, False, marks=pytest.mark.variant),
    ],
    ids=["shards", "other shards", "parts"],
)
def test_a_second_stage_begins_with_the_shards_of_the_first(
    tmp_path: Path, own: Mapping[str, Any], alike: bool
) -> None:
    """No rank has the model whole between two stages, unless a reference is cut in another way or
    ranks share layers."""
    sets = {
        **ON_RAY,
        "cold_start.steps": 3,
        "trainer.steps": 2,
        "objective.kl_coef": 0.1,
        "snapshot.every_steps": 0,
    }
    del sets["cold_start"]
    alone = finished(tmp_path / "alone", {**sets, "cluster": None})
    story = finished(tmp_path / "shards", {**sets, **own})
    left = events_of(tmp_path / "shards" / "runs" / "tiny", "policy.left")
    assert [row["in_shards"] for row in left] == [alike, alike], "of each rank, once"
    assert len(story.steps) == len(alone.steps) == 5
    for here, there in zip(story.steps, alone.steps, strict=True):
        for name in set(here["metrics"]) & {"loss", "grad_norm", "reward", "kl_reference"}:
            assert here["metrics"][name] == pytest.approx(
                there["metrics"][name], rel=1e-3, abs=1e-4
            ), name


def test_several_nodes(tmp_path: Path, undisturbed: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LOOPBACK.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    nodes = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=nodes)
    try:
        cluster.add_node(**nodes)
        settings = {**ON_RAY["cluster"], "address": cluster.address, "cpus_per_worker": 1.0}
        story = finished(tmp_path, {**ON_RAY, "cluster": settings}, env=LOOPBACK)
    finally:
        cluster.shutdown()
    assert story == undisturbed
