"""A run in a pod whose engine is vLLM, with a real etcd, shared memory, and two members in network
namespaces that run the native engine and read versions by TCP. Two ranks that share layers learn
from the rollouts of both kinds of engines; the loss of a member costs its rollouts alone. Without
root it has no members."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from link_audit import audited, check_audit
from system_runs import Answer, Command, Fault, events_of, read_story, write_config

from etcd_process import EtcdProcess
from gyre.launch.placement.worker_placement import name_run
from gyre.observability.events import read_events
from gyre.observability.report.pod import pod_steps, pod_timeline
from gyre.observability.report.story import tell
from member_network import DEADLINE_S, Network, member, network_namespace, until
from vllm_sidecar import START_S, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 14
LOST_IN = 5  # step in whose rollouts member b is lost
ROLLOUTS = 64  # of a step


def settings(reward: str, options: dict[str, Any], **cluster: Any) -> dict[str, Any]:
    part = {"kind": "function", "path": f"system_rewards:{reward}", "options": options}
    vllm = {
        "environment": str(environment()),
        "kv_bytes": 64 << 20,
        "enforce_eager": True,
        "during_training": "keep",
    }
    return {
        "cold_start": None,
        "trainer.steps": STEPS,
        "trainer.learning_rate": 1e-2,
        "model.shape.head_dim": 32,
        "snapshot.every_steps": 0,
        "eval.num_problems": 0,
        "rollout.prompts_per_step": 8,
        "rollout.completions_per_prompt": 8,
        # vLLM tells the log-prob after temperature alone: that which the trainer compares with
        "rollout.temperature": 0.9,
        "parallel.tensor_ranks": 2,
        "rewards": {"workers": 1, "parts": [{**part, "limit_s": DEADLINE_S}]},
        "engine": {"kind": "vllm", "max_running": 64, "vllm": vllm},
        "cluster": {
            "kind": "pod",
            "num_workers": 2,
            "engine_workers": 1,
            "hang_s": 120.0,
            "progress_tokens": 2,
            **cluster,
        },
    }


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What the run left."""

    run: Path
    answer: Answer
    first_code: int | None  # with which the member that stayed ended
    keys: list[dict[str, tuple[str, int]]]  # values and leases at etcd, at each revision
    why_no_members: str


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learned]:
    environment()
    folder, why_not = tmp_path_factory.mktemp("learned"), ""
    with ExitStack() as stack:
        etcd = stack.enter_context(closing(EtcdProcess(folder / "etcd")))
        networks: list[Network] = []
        try:
            networks.append(stack.enter_context(network_namespace()))
            networks.append(stack.enter_context(network_namespace(beside=networks[0])))
        except pytest.skip.Exception as reason:
            why_not, networks = str(reason), []
        answer, first_code = learn(folder, etcd, networks)
        _, newest = etcd.ask()
        keys = [etcd.ask(revision)[0] for revision in range(2, newest + 1)]
    run = folder / "runs" / "tiny"
    yield Learned(run=run, answer=answer, first_code=first_code, keys=keys, why_no_members=why_not)


def learn(folder: Path, etcd: EtcdProcess, networks: list[Network]) -> tuple[Answer, int | None]:
    """Run to the end. Of the two members b is lost, and a stays."""
    run, fault = folder / "runs" / "tiny", None
    rendezvous = {"kind": "etcd", "endpoints": [etcd.url], "lease_s": 10.0}
    given: dict[str, Any] = {"rendezvous": rendezvous}
    reward, options = "digit_share", {}
    if networks:
        given["members_address"] = f"{networks[0].address}:0"
        reward, options = "digit_share_with_members", {"events": str(run / "events.jsonl")}
        fault = Fault(
            point="event",
            match="phase.started rollout",
            number=LOST_IN,
            action="stop_worker",
            worker="member-b",
        )
    config = write_config(folder, settings(reward, options, **given))
    command = Command("train", config, "--plain", folder=folder, fault=fault, **audited(folder))
    try:
        if not networks:
            return command.wait(), None
        with ExitStack() as stack:
            first, second = join_both(stack, run, networks)
            process = psutil.Process(second.pid)
            is_stopped = lambda: process.status() == psutil.STATUS_STOPPED  # noqa: E731
            until(is_stopped, lambda: f"{events_of(run)[-20:]}", deadline_s=START_S + DEADLINE_S)
            second.kill()
            answer = command.wait()
            return answer, first.wait(30)
    except BaseException:
        command.kill()
        raise


def join_both(stack: ExitStack, run: Path, networks: list[Network]) -> list[subprocess.Popen[str]]:
    def told() -> list[Any]:
        return events_of(run, "member.listening") if (run / "events.jsonl").exists() else []

    listening = until(told, lambda: f"{run} does not listen")[0]
    address, token = listening["address"], Path(listening["token_file"])
    return [
        stack.enter_context(member(network, address, token, name))
        for network, name in zip(networks, "ab", strict=True)
    ]


def test_a_policy_learns_from_rollouts_of_vllm(learned: Learned) -> None:
    """Its log-probs are those of its own kernels: the gap is small, and not zero."""
    run, answer = learned.run, learned.answer
    assert answer.code == 0 and not answer.left_behind, f"{answer.err}\n{events_of(run)[-20:]}"
    story = read_story(run)
    steps = story.steps
    assert {row["logprob_kind"] for row in story.samples} == {"processed"}
    assert max(step["metrics"]["logprob_gap_max"] for step in steps) < 1e-2, steps
    rewards = [step["metrics"]["reward"] for step in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    versions = [row["version"] for row in events_of(run, "weights.published")]
    assert versions == list(range(STEPS + 1))
    look_at_timeline(run)


def test_no_weights_cross_a_link_or_a_pickle(learned: Learned) -> None:
    """vLLM's own processes pickle what they tell each other; they are looked at for Ray alone."""
    weights = learned.run / "export" / "model.safetensors"
    check_audit(learned.run.parents[1], weights.stat().st_size, handovers=STEPS + 1, processes=3)


def test_versions_and_leases_are_in_etcd(learned: Learned) -> None:
    assert [row["store"] for row in events_of(learned.run, "rendezvous.opened")] == ["etcd"]
    prefix = f"/gyre/{name_run(learned.run)}/"
    assert all(key.startswith(prefix[:-1]) for keys in learned.keys for key in keys)
    last = learned.keys[-1]
    rows = [json.loads(value) for key, (value, _) in sorted(last.items()) if "/versions/" in key]
    assert sorted(row["version"] for row in rows) == list(range(STEPS + 1))
    assert {(row["epoch"], row["state"]) for row in rows} == {(1, "committed")}
    roles = {"driver": "driver", "worker-0": "trainer", "worker-1": "trainer"}
    if not learned.why_no_members:
        roles |= {"member-a": "member", "member-b": "member"}
    found: dict[str, str] = {}
    together = []  # who is there with whom
    for keys in learned.keys:
        there = [value for key, value in keys.items() if "/members/" in key]
        assert all(lease > 0 for _, lease in there), "a member is there as long as its lease"
        records = [json.loads(value) for value, _ in there]
        found |= {record["name"]: record["role"] for record in records}
        together.append({record["name"] for record in records})
    assert found == roles
    if not learned.why_no_members:
        assert set(roles) in together, "both members at once"
        assert set(roles) - {"member-b"} in together[together.index(set(roles)) :]


def test_members_work_beside_vllm(learned: Learned) -> None:
    if learned.why_no_members:
        pytest.skip(learned.why_no_members)
    run = learned.run

    # every rollout of a step is trained on, and each kind of engine has part of them
    answered: dict[int, dict[str, int]] = {}
    for row in events_of(run, "engine.answered"):
        answered.setdefault(row["version"], {})[row["engine"]] = row["completions"]
    assert [sum(answered[version].values()) for version in range(STEPS)] == [ROLLOUTS] * STEPS
    by_engine = Counter[str]()
    for counts in answered.values():
        by_engine.update(counts)
    assert set(by_engine) == {"engine-0", "member-a", "member-b"}
    shared = [counts for counts in answered.values() if {"engine-0", "member-a"} <= counts.keys()]
    assert len(shared) > STEPS / 2, answered

    # each version that a member serves came over TCP, in order
    reads = [row for row in events_of(run, "weights.read") if row["worker"].startswith("member-")]
    assert {row["transport"] for row in reads} == {"tcp"}
    by_worker = {
        name: [
            row["version"] for row in events_of(run, "engine.committed") if row["worker"] == name
        ]
        for name in by_engine
    }
    assert by_worker["engine-0"] == list(range(STEPS + 1))
    assert by_worker["member-a"] == list(range(by_worker["member-a"][0], STEPS + 1))

    # the loss of one costs its rollouts alone, which go on elsewhere from what had come of them
    (lost,) = events_of(run, "engine.lost")
    assert lost["engine"] == "member-b" and lost["requests"] > 0
    requeued = events_of(run, "retry.request_requeued")
    assert len(requeued) == lost["requests"]
    left = {row["member"]: row["reason"] for row in events_of(run, "member.left")}
    assert set(left) == {"member-a", "member-b"} and left["member-a"] == "the run has ended"
    assert learned.first_code == 0


def look_at_timeline(run: Path) -> None:
    """vLLM's process tells what it does as a native engine does; what it has not is said by name."""
    story = tell(read_events(run / "events.jsonl"))
    steps, data = pod_steps(story), pod_timeline(story)
    assert len(steps) == STEPS and data is not None
    for step in steps:
        told = {"train", "convert", "register", "update", "rollout", "wait_rollout"}
        assert set(step.activities) - {"score", "dummy_start"} == told
        assert step.activities["update"].size_bytes
        busy_s = sum(piece.end_s - piece.start_s for piece in step.lanes[0].pieces)
        assert step.seconds / 10 < busy_s <= step.seconds * 1.001
    rows = {row["activity"]: row for row in data["rows"]}
    # imports and the start are before the first step: vLLM keeps its memory
    assert rows["dummy_start"]["outside_s"] > 1.0
    # a member may come within the first one
    assert rows["dummy_start"]["absent"] in ("outside of steps only", "")
    assert rows["terminate"]["absent"] == "engines keep their processes and their memory"
