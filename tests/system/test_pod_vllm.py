"""A run in a pod whose engine is vLLM, with a real etcd, and members of another network namespace: the
ring turns, versions arrive in all of them, and the log-probs that they report are those that the trainer
computes."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from system_runs import Answer, Command, events_of, read_story, write_config

from etcd_process import EtcdProcess
from gyre.observability.events import read_events
from gyre.observability.report.pod import pod_steps, pod_timeline
from gyre.observability.report.story import tell
from member_network import Network, member, network_namespace, until
from vllm_sidecar import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 14


def settings(**cluster: Any) -> dict[str, Any]:
    part = {"kind": "function", "path": "system_rewards:digit_share"}
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
        "rollout.prompts_per_step": 8,
        "rollout.completions_per_prompt": 8,
        "rewards": {"workers": 1, "parts": [part]},
        "engine": {"kind": "vllm", "max_running": 64, "vllm": vllm},
        "cluster": {
            "kind": "pod",
            "num_workers": 1,
            "engine_workers": 1,
            "hang_s": 120.0,
            **cluster,
        },
    }


def test_a_policy_learns_from_rollouts_of_vllm_and_of_members(tmp_path: Path) -> None:
    """Their log-probs are those of their own kernels: the gap is small, and not zero."""
    run = tmp_path / "runs" / "tiny"
    with ExitStack() as stack:
        etcd = EtcdProcess(tmp_path / "etcd")
        stack.callback(etcd.close)
        network = stack.enter_context(network_namespace())
        rendezvous = {"kind": "etcd", "endpoints": [etcd.url], "lease_s": 10.0}
        sets = settings(rendezvous=rendezvous, members_address=f"{network.address}:0")
        command = Command("train", write_config(tmp_path, sets), "--plain", folder=tmp_path)
        try:
            answer = with_two_members(command, network, run)
        except BaseException:
            command.kill()
            raise
    assert answer.code == 0 and not answer.left_behind, f"{answer.err}\n{events_of(run)[-20:]}"
    steps = read_story(run).steps
    assert max(step["metrics"]["logprob_gap_max"] for step in steps) < 1e-2, steps
    rewards = [step["metrics"]["reward"] for step in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    versions = [row["version"] for row in events_of(run, "weights.published")]
    assert versions == list(range(STEPS + 1))
    assert [row["store"] for row in events_of(run, "rendezvous.opened")] == ["etcd"]
    taken = {row["worker"]: row["version"] for row in events_of(run, "engine.committed")}
    assert taken == dict.fromkeys(("engine-0", "member-a", "member-b"), STEPS)
    look_at_timeline(run)


def with_two_members(command: Command, network: Network, run: Path) -> Answer:
    """Let two members join before the first rollout, and stay until the run's end."""

    def told(kind: str) -> list[Any]:
        return events_of(run, kind) if (run / "events.jsonl").exists() else []

    listening = until(lambda: told("member.listening"), lambda: "nobody listens")[0]
    join = (network, listening["address"], Path(listening["token_file"]))
    with member(*join, "a") as first, member(*join, "b") as second:
        answer = command.wait()
        assert first.wait(30) == 0 and second.wait(30) == 0
    return answer


def look_at_timeline(run: Path) -> None:
    """vLLM's process tells what it does as a native engine does; what it has not is said by name."""
    story = tell(read_events(run / "events.jsonl"))
    steps, data = pod_steps(story), pod_timeline(story)
    assert len(steps) == STEPS and data is not None
    for step in steps:
        told = {"train", "convert", "register", "update", "rollout", "wait_rollout"}
        assert set(step.activities) - {"score"} == told
        assert step.activities["update"].worker in {"engine-0", "member-a", "member-b"}
        assert step.activities["update"].size_bytes
        busy_s = sum(piece.end_s - piece.start_s for piece in step.lanes[0].pieces)
        assert step.seconds / 10 < busy_s <= step.seconds * 1.001
    rows = {row["activity"]: row for row in data["rows"]}
    # imports and the start are before the first step: vLLM keeps its memory
    assert rows["dummy_start"]["outside_s"] > 1.0
    assert rows["dummy_start"]["absent"] == "outside of steps only"
    assert rows["terminate"]["absent"] == "engines keep their processes and their memory"
