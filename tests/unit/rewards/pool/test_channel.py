"""The fork server's end: a wait for it has a deadline and says what was waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre.core.errors import DeadlineError
from gyre.rewards.config import RewardsConfig
from gyre.rewards.fork_server import client
from gyre.rewards.pool import channel
from gyre.rewards.pool.channel import WorkerForkServer
from gyre.rewards.score import RuleScorer
from rewards_cases import Events, rollout


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLOSE_S", "END_S"):
        monkeypatch.setattr(channel, name, 0.05)


@pytest.fixture
def stopped() -> Iterator[WorkerForkServer]:
    """One that hears nothing: it is stopped, and ends only when it is killed."""
    server = WorkerForkServer(())
    os.kill(server.process.pid, signal.SIGSTOP)
    yield server
    if server.process.exit_code is None:
        os.kill(server.process.pid, signal.SIGKILL)
    assert server.process.wait(10)


def spare(server: WorkerForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kills do not reach it, as none reaches a process that hangs within the kernel."""
    monkeypatch.setattr(client, "KILL_S", 0.05)
    monkeypatch.setattr(server.process, "kill", lambda: None)


def test_one_that_does_not_end_is_killed(stopped: WorkerForkServer) -> None:
    assert stopped.reap() == -signal.SIGKILL


def test_one_that_does_not_close_is_killed_and_that_is_told(stopped: WorkerForkServer) -> None:
    assert asyncio.run(stopped.close(idle=False)) is False
    assert stopped.process.exit_code == -signal.SIGKILL


def test_one_that_no_kill_ends_is_named(
    stopped: WorkerForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare(stopped, monkeypatch)
    with pytest.raises(
        DeadlineError, match=f"pid {stopped.process.pid}.* did not end within 0.05 s"
    ):
        stopped.reap()
    with pytest.raises(DeadlineError, match=f"pid {stopped.process.pid}"):
        asyncio.run(stopped.close(idle=False))


def test_calls_end_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()

    async def go() -> None:
        config = RewardsConfig.model_validate({"parts": [{"kind": "format"}], "workers": 1})
        scorer = RuleScorer(config, emit=events.emit, clock=time.monotonic)
        await scorer.score([rollout(0, "", {})], deadline_s=60.0)
        assert scorer.pool is not None
        server = scorer.pool.server
        pid = server.process.pid
        os.kill(pid, signal.SIGSTOP)
        spare(server, monkeypatch)
        scorer.pool.replace_server()
        try:
            with pytest.raises(DeadlineError, match=f"pid {pid}"):
                await scorer.score([rollout(1, "", {})], deadline_s=60.0)
        finally:
            os.kill(pid, signal.SIGKILL)
            await scorer.close()

    asyncio.run(go())
    assert "reward.fork_server_replaced" not in events.kinds()


def test_a_server_that_ends_as_the_scorer_leaves_is_reaped_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The supervisor learns of both in one poll: its own end tells the server's, not a traceback."""
    server = WorkerForkServer(())
    supervisor = server.process.pid
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children")
    assert look_for(lambda: children.read_text().strip())
    child = int(children.read_text())
    assert look_for(lambda: "poll" in Path(f"/proc/{supervisor}/wchan").read_text())
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(child, signal.SIGKILL)
    assert look_for(lambda: Path(f"/proc/{child}/stat").read_text().split()[2] == "Z")
    monkeypatch.setattr(channel, "CLOSE_S", 30.0)

    async def close() -> bool:
        closing = asyncio.create_task(server.close(idle=True))
        await asyncio.sleep(0)  # it has hung up
        os.kill(supervisor, signal.SIGCONT)
        return await closing

    assert asyncio.run(close())
    assert server.process.exit_code == -signal.SIGKILL
    assert "Traceback" not in capfd.readouterr().err


def look_for(seen: Callable[[], object]) -> bool:
    """Whether it is seen within 30 s."""
    end_s = time.monotonic() + 30
    while not seen():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True
