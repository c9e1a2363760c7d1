"""A run in a pod whose engine is vLLM, with a real etcd: the ring turns, versions arrive in vLLM's
process, and the log-probs that it reports are those that the trainer computes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from system_runs import events_of, gyre, read_story, write_config

from etcd_process import EtcdProcess
from gyre.observability.events import read_events
from gyre.observability.report.pod import pod_steps, pod_timeline
from gyre.observability.report.story import tell
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


def test_a_policy_learns_from_rollouts_of_vllm(tmp_path: Path) -> None:
    """Its log-probs are those of its own kernels: the gap is small, and not zero."""
    with closing(EtcdProcess(tmp_path / "etcd")) as etcd:
        rendezvous = {"kind": "etcd", "endpoints": [etcd.url], "lease_s": 10.0}
        config = write_config(tmp_path, settings(rendezvous=rendezvous))
        answer = gyre("train", config, "--plain", folder=tmp_path)
    run = tmp_path / "runs" / "tiny"
    assert answer.code == 0 and not answer.left_behind, f"{answer.err}\n{events_of(run)[-20:]}"
    steps = read_story(run).steps
    assert max(step["metrics"]["logprob_gap_max"] for step in steps) < 1e-2, steps
    rewards = [step["metrics"]["reward"] for step in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
    versions = [row["version"] for row in events_of(run, "weights.published")]
    assert versions == list(range(STEPS + 1))
    assert [row["store"] for row in events_of(run, "rendezvous.opened")] == ["etcd"]
    look_at_timeline(run)


def look_at_timeline(run: Path) -> None:
    """vLLM's process tells what it does as a native engine does; what it has not is said by name."""
    story = tell(read_events(run / "events.jsonl"))
    steps, data = pod_steps(story), pod_timeline(story)
    assert len(steps) == STEPS and data is not None
    for step in steps:
        told = {"train", "convert", "register", "update", "rollout", "wait_rollout"}
        assert set(step.activities) - {"score"} == told
        assert step.activities["update"].worker == "engine-0"
        assert step.activities["update"].size_bytes
        busy_s = sum(piece.end_s - piece.start_s for piece in step.lanes[0].pieces)
        assert step.seconds / 10 < busy_s <= step.seconds * 1.001
    rows = {row["activity"]: row for row in data["rows"]}
    # imports and the start are before the first step: vLLM keeps its memory
    assert rows["dummy_start"]["outside_s"] > 1.0
    assert rows["dummy_start"]["absent"] == "outside of steps only"
    assert rows["terminate"]["absent"] == "engines keep their processes and their memory"
