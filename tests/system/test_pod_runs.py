"""Runs in a pod: trainer ranks and engines in processes of their own give what one process gives,
with weights in shared memory; a process that is killed costs what the others can't carry."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from link_audit import audited, check_audit
from system_runs import Answer, Fault, Story, events_of, gyre, read_story, write_config

from etcd_process import EtcdProcess
from gyre.launch.placement.worker_placement import name_run
from gyre.observability.events import read_events
from gyre.observability.report.pod import PodStep, pod_steps
from gyre.observability.report.story import tell
from vllm_sidecar import environment

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory is a folder on Linux"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

IN_POD: Mapping[str, Any] = {
    "cold_start": None,
    "trainer.steps": 4,
    "snapshot.every_steps": 1,
    "cluster": {"kind": "pod", "num_workers": 1, "engine_workers": 1, "progress_tokens": 2},
}


def run(folder: Path, sets: Mapping[str, Any], *, code: int = 0, **options: Any) -> Answer:
    folder.mkdir(exist_ok=True)
    answer = gyre("train", write_config(folder, sets), "--plain", folder=folder, **options)
    told = f"{answer.err}\n{events_of(folder / 'runs' / 'tiny')[-40:]}"
    assert not answer.left_behind, told
    assert answer.code == code, told
    return answer


def finished(folder: Path, sets: Mapping[str, Any], **options: Any) -> Story:
    run(folder, sets, **options)
    return read_story(folder / "runs" / "tiny")


def segments(folder: Path) -> list[str]:
    """What a run has in shared memory."""
    run_id = name_run(folder / "runs" / "tiny")
    return [path.name for path in Path("/dev/shm").glob(f"gyre-{run_id}-*")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Story:
    return audited_run(tmp_path_factory.mktemp("whole"), IN_POD)


def audited_run(folder: Path, sets: Mapping[str, Any]) -> Story:
    """Run to the end, and look that only addresses of weights crossed its links."""
    story = finished(folder, sets, **audited(folder))
    assert not segments(folder), "a run that has ended leaves no shared memory"
    cluster = sets["cluster"]
    check_audit(
        folder,
        (folder / "runs" / "tiny" / "export" / "model.safetensors").stat().st_size,
        handovers=sets["trainer.steps"] + 1,
        processes=1 + cluster["num_workers"] + cluster["engine_workers"],
    )
    return story


def test_a_pod_gives_what_one_process_gives(tmp_path: Path, undisturbed: Story) -> None:
    alone = finished(tmp_path, {**IN_POD, "cluster": None})
    assert undisturbed == alone


def test_weights_go_from_the_ranks_to_the_engines_by_broadcast(
    tmp_path: Path, undisturbed: Story
) -> None:
    sets = {**IN_POD, "cluster": {**IN_POD["cluster"], "weight_transport": "nccl"}}
    assert finished(tmp_path, sets) == undisturbed
    run = tmp_path / "runs" / "tiny"
    reads = events_of(run, "weights.read")
    assert [row["transport"] for row in reads] == ["gloo"] * 5
    assert not events_of(run, "weights.slot_used")


def test_the_config_of_the_pod_runs(tmp_path: Path) -> None:
    vllm = f'engine.vllm.environment="{environment()}"'
    sets = ["trainer.steps=2", "cold_start.steps=10", "eval.num_problems=16"]
    sets += ["data.num_problems=2400", vllm]
    argv = [part for one in [f"run.folder={tmp_path / 'runs'}", *sets] for part in ("--set", one)]
    config = Path(__file__).parents[2] / "configs" / "arith_grpo_pod.toml"
    answer = gyre("train", config, "--plain", *argv, folder=tmp_path)
    assert answer.code == 0 and not answer.left_behind, answer.err
    run = tmp_path / "runs" / "arith_grpo_pod"
    published = [row["version"] for row in events_of(run, "weights.published")]
    assert len(published) == 3 and published[0] == 10 and published == sorted(published)
    (opened,) = events_of(run, "rendezvous.opened")
    assert opened["store"] == "store" and opened["place"].startswith("127.0.0.1:")
    assert "rendezvous.opened: store=store" in answer.err
    (loaded,) = events_of(run, "engine.loaded")
    assert loaded["load_format"] == "vllm"


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.variant), 3])
def test_ranks_and_engines_in_any_numbers(tmp_path: Path, undisturbed: Story, zero: int) -> None:
    cluster = {**IN_POD["cluster"], "num_workers": 2, "engine_workers": 1 + zero // 3}
    residency = "phase" if zero == 3 else "auto"
    sets = {**IN_POD, "cluster": cluster, "parallel.zero": zero, "memory.residency": residency}
    story = audited_run(tmp_path, sets)
    steps = pod_steps(tell(read_events(tmp_path / "runs" / "tiny" / "events.jsonl")))
    look_at_activities(steps, moves=zero == 3, num_engines=cluster["engine_workers"])
    look_close(story, undisturbed)


def look_close(story: Story, undisturbed: Story) -> None:
    """The same steps, within rounding."""
    assert len(story.steps) == len(undisturbed.steps)
    for here, there in zip(story.steps, undisturbed.steps, strict=True):
        assert here["num_tokens"] == there["num_tokens"]
        for name in ("loss", "grad_norm", "reward", "length", "entropy"):
            assert here["metrics"][name] == pytest.approx(
                there["metrics"][name], rel=1e-3, abs=1e-4
            ), name
        assert here["metrics"]["logprob_gap_max"] < 1e-4


def look_at_activities(steps: tuple[PodStep, ...], *, moves: bool, num_engines: int) -> None:
    """Each step has what the drawing has, with bytes, in lanes of all processes. What no activity
    takes is the driver's part, its messages, and phases that move nothing: a rank's lane is filled
    to a tenth at least, and never past the step."""
    kept = {"train", "convert", "register", "wait_rollout", "rollout", "update"}
    moved = {"offload", "onload", "wake", "park"} if moves else set()
    assert len(steps) == 4
    for step in steps:
        assert set(step.activities) - {"start", "score"} == kept | moved
        assert all(time.seconds > 0 for time in step.activities.values())
        sized = {name for name, time in step.activities.items() if time.size_bytes}
        assert sized - {"start"} == {"register", "update"} | moved
        update, register = step.activities["update"], step.activities["register"]
        # parts are rounded up to whole lines of the cache
        assert update.size_bytes == pytest.approx(
            num_engines * (register.size_bytes or 0), rel=0.01
        )
        names = [lane.worker for lane in step.lanes]
        assert names == ["worker-0", "worker-1", *(f"engine-{at}" for at in range(num_engines))]
        for lane in step.lanes:
            busy_s = sum(piece.end_s - piece.start_s for piece in lane.pieces)
            least_s = step.seconds / 10 if lane.role == "trainer" else 0.0
            assert least_s < busy_s <= step.seconds * 1.001, (lane, step.seconds)


def test_ranks_that_share_layers_train_what_one_process_trains(
    tmp_path: Path, undisturbed: Story
) -> None:
    """Each broadcasts its part of every tensor; an engine of whole tensors reads them all. The run
    ends with an export. Its snapshots, written beside it, are those of any layout."""
    cluster = {**IN_POD["cluster"], "num_workers": 2, "weight_transport": "nccl"}
    sets = {
        **IN_POD,
        "cluster": cluster,
        "parallel.tensor_ranks": 2,
        "snapshot.background": True,
        "trainer.trace_steps": [3],
    }
    look_close(finished(tmp_path, sets), undisturbed)
    run = tmp_path / "runs" / "tiny"
    assert events_of(run, "export.verified")
    assert [row["transport"] for row in events_of(run, "weights.read")] == ["gloo"] * 5
    assert not events_of(run, "weights.slot_used")
    begun, saved = events_of(run, "snapshot.begun"), events_of(run, "snapshot.saved")
    assert begun and [row["step"] for row in begun] == [row["step"] for row in saved]
    (trace,) = events_of(run, "trace.written")
    assert trace["step"] == 3


@pytest.mark.parametrize("phase", ["train", pytest.param("handover", marks=pytest.mark.variant)])
def test_a_killed_trainer_costs_a_restart_and_nothing_else(
    tmp_path: Path, undisturbed: Story, phase: str
) -> None:
    fault = Fault(
        point="event",
        match=f"phase.started {phase}",
        number=3,
        action="kill_worker",
        worker="worker-0",
    )
    story = finished(tmp_path, IN_POD, fault=fault)
    assert story == undisturbed and story.num_attempts == 2
    assert not segments(tmp_path)


def test_a_killed_engine_costs_its_rollouts_only_and_comes_back(tmp_path: Path) -> None:
    """Scores of the step in which it is lost wait until it is back."""
    cluster = {**IN_POD["cluster"], "engine_workers": 2}
    part = {
        "kind": "function",
        "path": "system_rewards:varied_once_back",
        "options": {"events": str(tmp_path / "runs" / "tiny" / "events.jsonl")},
        "limit_s": 100.0,
    }
    sets = {
        **IN_POD,
        "cluster": cluster,
        "rewards": {"workers": 1, "parts": [part]},
        "rollout.max_tokens": 64,
        "rollout.ignore_eos": True,
    }
    fault = Fault(
        point="event",
        match="phase.started rollout",
        number=2,
        action="kill_worker",
        worker="engine-0",
    )
    story = finished(tmp_path, sets, fault=fault)
    folder = tmp_path / "runs" / "tiny"
    assert story.num_attempts == 1 and len(story.steps) == 4
    (lost,) = events_of(folder, "engine.lost")
    assert lost["engine"] == "engine-0"
    (back,) = events_of(folder, "engine.rejoined")
    assert back["engine"] == "engine-0"
    assert all(step["metrics"]["logprob_gap_max"] < 1e-4 for step in story.steps), story.steps
    assert not events_of(folder, "retry.run_restarted")


def test_ctrl_c_leaves_nothing_behind_and_the_run_goes_on(
    tmp_path: Path, undisturbed: Story
) -> None:
    fault = Fault(point="event", match="phase.started rollout", number=3, action="interrupt_group")
    run(tmp_path, IN_POD, fault=fault, code=130)
    assert not segments(tmp_path)
    answer = gyre("train", "--resume", tmp_path / "runs" / "tiny", "--plain", folder=tmp_path)
    assert answer.code == 0, answer.err
    assert read_story(tmp_path / "runs" / "tiny") == undisturbed


APART = [
    # weights whole on one rank, or in parts on two; engines have devices of their own
    pytest.param("drain", {}, 1, 1, id="one-rank", marks=pytest.mark.variant),
    pytest.param("drain", {"zero": 2}, 2, 1, id="zero-2"),
    pytest.param("drain", {"zero": 3}, 2, 2, id="zero-3"),
    pytest.param("continue", {"tensor_ranks": 2}, 2, 1, id="tensor-ranks"),
]


@pytest.mark.parametrize(("update", "parallel", "ranks", "engines"), APART)
def test_rollouts_run_while_the_policy_trains(
    tmp_path: Path, update: str, parallel: dict[str, int], ranks: int, engines: int
) -> None:
    """Each batch is at most one version behind; with `continue` a completion may have two."""
    apart = {"num_workers": ranks, "engine_workers": engines, "colocated": False}
    sets = {
        **IN_POD,
        "trainer.steps": 6,
        "rollout.max_staleness": 1,
        "rollout.weight_update": update,
        "rollout.ignore_eos": True,
        "parallel": parallel,
        "cluster": {**IN_POD["cluster"], **apart},
    }
    story = finished(tmp_path, sets)
    assert len(story.steps) == 6
    stale = [step["metrics"]["staleness_max"] for step in story.steps]
    assert max(stale) == 1.0 and min(stale) >= 0.0, stale
    overlapped = events_of(tmp_path / "runs" / "tiny", "weights.published")
    assert [row["version"] for row in overlapped] == list(range(7))
    answer = gyre("report", tmp_path / "runs" / "tiny", "--json", folder=tmp_path)
    pod = answer.json["pod"]
    told = {row["activity"]: row for row in pod["rows"]}
    assert told["rollout"]["steps"] > 0 and told["rollout"]["median_s"] > 0
    assert told["offload"]["absent"] == "what the trainers have stays on their devices"
    assert told["terminate"]["absent"] == "engines keep their processes and their memory"
    assert [line.split()[0] for line in pod["drawing"][1:3]] == ["worker-0", "engine-0"]
    reads = {row["worker"] for row in events_of(tmp_path / "runs" / "tiny", "weights.read")}
    assert reads == {f"engine-{number}" for number in range(engines)}
    assert answer.json["report"].endswith("report.html")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    (tmp_path / "etcd").mkdir()
    process = EtcdProcess(tmp_path / "etcd")
    yield process
    process.close()


def at_etcd(etcd: EtcdProcess) -> dict[str, Any]:
    rendezvous = {"kind": "etcd", "endpoints": [etcd.url], "lease_s": 2.0}
    return {**IN_POD, "cluster": {**IN_POD["cluster"], "rendezvous": rendezvous}}


def test_versions_and_leases_are_in_etcd(
    tmp_path: Path, undisturbed: Story, etcd: EtcdProcess
) -> None:
    folder = tmp_path / "run"
    assert finished(folder, at_etcd(etcd)) == undisturbed
    prefix = f"/gyre/{name_run(folder / 'runs' / 'tiny')}/"
    last, newest = etcd.ask(0)
    assert all(key.startswith(prefix[:-1]) for key in last)
    versions = [
        json.loads(value) for key, (value, _) in sorted(last.items()) if "/versions/" in key
    ]
    assert [row["version"] for row in versions] == [0, 1, 2, 3, 4]
    assert {(row["epoch"], row["state"]) for row in versions} == {(1, "committed")}
    members: dict[str, str] = {}
    for revision in range(2, newest + 1):
        found, _ = etcd.ask(revision)
        for key, (value, lease) in found.items():
            if "/members/" in key:
                assert lease > 0, "a member is there as long as its lease"
                record = json.loads(value)
                members[record["name"]] = record["role"]
    assert members == {"driver": "driver", "worker-0": "trainer", "engine-0": "engine"}


def test_an_etcd_that_is_killed_and_comes_back_costs_no_step(
    tmp_path: Path, undisturbed: Story, etcd: EtcdProcess
) -> None:
    folder = tmp_path / "run"
    events = folder / "runs" / "tiny" / "events.jsonl"

    def kill_and_start() -> None:
        wait_until(lambda: events.exists() and b"step.done" in events.read_bytes(), 120.0)
        etcd.kill()
        wait_until(lambda: b"rendezvous.lost" in events.read_bytes(), 60.0)
        etcd.start()

    with ThreadPoolExecutor(1) as threads:
        fault = threads.submit(kill_and_start)
        story = finished(folder, at_etcd(etcd))
        fault.result(10.0)
    assert story == undisturbed
    assert events_of(folder / "runs" / "tiny", "rendezvous.back")
    last, _ = etcd.ask(0)
    states = [json.loads(value) for key, (value, _) in last.items() if "/versions/" in key]
    assert {(row["version"], row["state"]) for row in states} >= {(4, "committed")}


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "not in time"
        time.sleep(0.02)
