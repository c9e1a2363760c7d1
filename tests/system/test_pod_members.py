"""Members of a pod's run: engines of another host, here of another network namespace with a /dev/shm
of its own, join over TCP, take work, and are lost or leave. The run's numbers do not change."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from system_runs import Command, Fault, events_of, read_story, write_config

from gyre.cluster.members import AdmittedMember, MemberListener
from gyre.cluster.worker.link import LinkHandle
from gyre.core.records import RoleSpec
from member_network import DEADLINE_S, Network, member, network_namespace, until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]
STAY = """
import socket, sys, time
from gyre.cluster.worker.handshake import JoinRequest, ask_to_join
link = socket.create_connection((sys.argv[1], int(sys.argv[2])), 10)
ask_to_join(link, b"t" * 32, JoinRequest(name="a", place="there"), deadline_s=10)
time.sleep(300)
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with network_namespace() as made:
        yield made


def unread_bytes(pid: int) -> int:
    """What waits in the TCP sockets of a process' namespace to be read."""
    rows = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return sum(int(row.split()[4].split(":")[1], 16) for row in rows)


def settings(folder: Path, reward: str, **cluster: Any) -> Mapping[str, Any]:
    events = {"events": str(folder / "runs" / "tiny" / "events.jsonl")}
    options = events if reward == "varied_with_members" else {}
    part = {"kind": "function", "path": f"system_rewards:{reward}", "options": options}
    return {
        "cold_start": None,
        "trainer.steps": 5,
        "cluster": {
            "kind": "pod",
            "num_workers": 1,
            "engine_workers": 1,
            "progress_tokens": 2,
            **cluster,
        },
        "rewards": {"workers": 1, "parts": [{**part, "limit_s": DEADLINE_S}]},
        "rollout.max_tokens": 48,
        "rollout.ignore_eos": True,
    }


def test_members_come_work_are_lost_and_leave(tmp_path: Path, network: Network) -> None:
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    whole.mkdir()
    shared.mkdir()
    plain = Command(
        "train", write_config(whole, settings(whole, "varied")), "--plain", folder=whole
    ).wait()
    assert plain.code == 0, plain.err
    address = f"{network.address}:0"
    sets = settings(shared, "varied_with_members", members_address=address)
    stopped = Fault(
        point="event",
        match="phase.started rollout",
        number=2,
        action="stop_worker",
        worker="member-b",
    )
    run = shared / "runs" / "tiny"
    command = Command("train", write_config(shared, sets), "--plain", folder=shared, fault=stopped)

    def told(*kinds: str) -> list[Any]:
        return events_of(run, *kinds) if (run / "events.jsonl").exists() else []

    def tail() -> str:
        return f"{told()[-30:]}"

    try:
        listening = until(lambda: told("member.listening"), tail)[0]
        token = Path(listening["token_file"])
        assert token.stat().st_mode & 0o777 == 0o600
        with (
            member(network, listening["address"], token, "a") as first,
            member(network, listening["address"], token, "b") as second,
        ):
            until(lambda: len(told("step.done")) >= 1, tail)
            # it is stopped as rollouts begin, and has got requests that it never answers
            until(lambda: psutil.Process(second.pid).status() == psutil.STATUS_STOPPED, tail)
            until(lambda: unread_bytes(second.pid), tail)
            second.kill()
            until(lambda: len(told("step.done")) >= 2, tail)
            first.send_signal(signal.SIGTERM)
            assert first.wait(60) == 0, first.stderr and first.stderr.read()
            answer = command.wait()
    except BaseException:
        command.kill()
        raise
    assert answer.code == 0 and not answer.left_behind, answer.err
    assert read_story(run) == read_story(whole / "runs" / "tiny")
    (lost,) = told("engine.lost")
    assert lost["engine"] == "member-b" and lost["requests"] > 0
    assert len(told("retry.request_requeued")) >= lost["requests"]
    left = {row["member"]: row for row in told("member.left")}
    assert left["member-a"]["reason"] == "it was asked to" and left["member-a"]["requests"] > 0
    joined = {row["engine"]: row["version"] for row in told("engine.rejoined")}
    taken = [row["version"] for row in told("engine.committed") if row["worker"] == "member-a"]
    assert taken[0] == joined["member-a"] and taken == sorted(taken) and len(taken) >= 2
    assert token.read_text().strip() not in (run / "events.jsonl").read_text() + answer.err


def test_a_member_waits_for_rollouts_and_ends_with_the_run(
    tmp_path: Path, network: Network
) -> None:
    """A cold start has none. A stranger is refused meanwhile, and the run goes on. Two ranks that
    share layers train, and the member reads whole tensors."""
    sets = {
        **settings(tmp_path, "varied", members_address=f"{network.address}:0", num_workers=2),
        "parallel.tensor_ranks": 2,
        "cold_start": {"steps": 3, "examples_per_step": 8, "warmup_steps": 1},
        "rollout.max_tokens": 16,
    }
    events = str(tmp_path / "runs" / "tiny" / "events.jsonl")
    part = {"kind": "function", "path": "system_rewards:varied_once_joined", "limit_s": DEADLINE_S}
    sets["rewards"] = {"workers": 1, "parts": [{**part, "options": {"events": events}}]}
    run = tmp_path / "runs" / "tiny"
    command = Command("train", write_config(tmp_path, sets), "--plain", folder=tmp_path)

    def told(*kinds: str) -> list[Any]:
        return events_of(run, *kinds) if (run / "events.jsonl").exists() else []

    def tail() -> str:
        return f"{told()[-30:]}"

    try:
        listening = until(lambda: told("member.listening"), tail)[0]
        wrong = tmp_path / "wrong.token"
        wrong.write_text("0" * 64)
        wrong.chmod(0o600)
        words = ("sidecar", "join", listening["address"], "--token-file", wrong)
        stranger = Command(*words, folder=tmp_path).wait()
        assert stranger.code == 2 and "the token is not that of this run" in stranger.err
        with member(network, listening["address"], Path(listening["token_file"]), "a") as first:
            answer = command.wait()
            assert first.wait(30) == 0, tail()
    except BaseException:
        command.kill()
        raise
    assert answer.code == 0 and not answer.left_behind, answer.err
    assert [row["member"] for row in told("member.joined")] == ["member-a"]
    (joined,) = told("engine.rejoined")
    assert joined["engine"] == "member-a" and joined["version"] >= 3, "that of the cold start's end"
    assert not told("engine.lost") and len(told("member.refused")) == 1
    (left,) = told("member.left")
    assert left["reason"] == "the run has ended"


def test_a_network_that_falls_silent_is_noticed(network: Network) -> None:
    """Nobody hangs up, and nothing is asked of the member."""

    async def main() -> str:
        admitted: asyncio.Queue[AdmittedMember] = asyncio.Queue()
        listener = MemberListener(
            host=network.address,
            port=0,
            token=b"t" * 32,
            refuse=lambda request: None,
            on_admitted=admitted.put_nowait,
            emit=lambda kind, **fields: None,
            silence_s=2.0,
        )
        host, _, port = listener.place.rpartition(":")
        down = ("ip", "-n", network.name, "link", "set", network.there, "down")
        words = ("ip", "netns", "exec", network.name, sys.executable, "-c", STAY, host, port)
        stays = await asyncio.create_subprocess_exec(*words)
        try:
            async with asyncio.timeout(DEADLINE_S):
                one = await admitted.get()
                spec = RoleSpec(name="member-a", builder="x:y")
                handle = LinkHandle(spec, one.link, place="there", on_event=lambda *_, **__: None)
                subprocess.run(down, check=True)
                cause = await asyncio.wrap_future(handle.gone)
            assert stays.returncode is None
            return cause
        finally:
            stays.kill()
            await stays.wait()
            subprocess.run((*down[:-1], "up"), check=True)
            await listener.close()

    assert "silent" in asyncio.run(main())
