"""Drills: processes of a run are killed at random moments, from outside, and its end is bit for bit
the same. The moments follow from a seed; what the run was doing then does not. Ranks have theirs in
test_cluster_runs."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from system_runs import Command, Story, gyre, read_story, write_config

SETS = {
    "trainer.steps": 8,
    "snapshot.every_steps": 2,
    "eval.num_problems": 4,
    "cold_start.steps": 2,
}
KILLS = 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("whole")
    answer = gyre("train", write_config(folder, SETS), "--plain", folder=folder)
    assert answer.code == 0, answer.err
    return read_story(folder / "runs" / "tiny")


def reward_processes(command: Command) -> dict[str, list[psutil.Process]]:
    """The supervisor of the rewards' workers, their fork server, and the workers, as far as they
    are there."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(command.process.pid).children()
        name = "gyre.rewards.pool.supervisor"
        supervisors = [child for child in children if name in child.cmdline()]
        servers = [child for supervisor in supervisors for child in supervisor.children()]
        return {
            "supervisor": supervisors,
            "fork server": servers,
            "worker": [child for server in servers for child in server.children()],
        }
    return {}


@pytest.mark.slow
def test_the_ring_and_the_rewards_processes_are_killed_at_random(
    tmp_path: Path, whole: Story
) -> None:
    draws, run = random.Random(14), tmp_path / "runs" / "tiny"
    command, killed = (
        Command("train", write_config(tmp_path, SETS), "--plain", folder=tmp_path),
        Counter[str](),
    )
    while killed.total() < KILLS and command.process.exitcode is None:
        time.sleep(draws.uniform(0.1, 1.0))
        victim = draws.choice(["ring", "supervisor", "fork server", "worker"])
        for process in reward_processes(command).get(victim, [])[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself meanwhile
                process.kill()
                killed[victim] += 1
        if victim == "ring" and command.process.exitcode is None and (run / "config.toml").exists():
            command.kill()
            answer = command.wait()
            assert answer.code == -9 and not answer.left_behind, answer.err
            killed[victim] += 1
            command = Command("train", "--resume", run, "--plain", folder=tmp_path)
    answer = command.wait()
    assert answer.code == 0 and not answer.left_behind, answer.err
    assert killed.total() > 0
    assert read_story(run) == whole
