"""The nursery's end: a wait for it has a deadline and says what was waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from gyre.core.errors import DeadlineError
from gyre.rewards.config import RewardsConfig
from gyre.rewards.pool import channel
from gyre.rewards.pool.channel import Nursery
from gyre.rewards.pool.worker import tell_gone
from gyre.rewards.score import RuleScorer
from rewards_cases import Events, rollout


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CLOSE_S", "_END_S"):
        monkeypatch.setattr(channel, name, 0.05)


@pytest.fixture
def stopped() -> Iterator[Nursery]:
    """One that hears nothing: it is stopped, and ends only when it is killed."""
    nursery = Nursery(())
    os.kill(nursery._process.pid, signal.SIGSTOP)
    yield nursery
    os.kill(nursery._process.pid, signal.SIGKILL) if nursery._process.poll() is None else None
    nursery._process.wait(10)


def spare(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kills do not reach it, as none reaches a process that hangs within the kernel."""
    monkeypatch.setattr(channel, "_KILL_S", 0.05)
    monkeypatch.setattr(nursery._process, "kill", lambda: None)


def test_one_that_does_not_end_is_killed(stopped: Nursery) -> None:
    assert stopped.bury() == -signal.SIGKILL


def test_one_that_does_not_close_is_killed_and_that_is_told(stopped: Nursery) -> None:
    assert asyncio.run(stopped.close(idle=False)) is False
    assert stopped._process.poll() == -signal.SIGKILL


def test_one_that_no_kill_ends_is_named(stopped: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    spare(stopped, monkeypatch)
    with pytest.raises(
        DeadlineError, match=f"pid {stopped._process.pid}.* did not end within 0.05 s"
    ):
        stopped.bury()
    with pytest.raises(DeadlineError, match=f"pid {stopped._process.pid}"):
        asyncio.run(stopped.close(idle=False))


def test_calls_end_with_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()

    async def go() -> None:
        config = RewardsConfig.model_validate({"parts": [{"kind": "format"}], "workers": 1})
        scorer = RuleScorer(config, emit=events.emit, clock=time.monotonic)
        await scorer.score([rollout(0, "", {})], deadline_s=60.0)
        nursery = scorer._pool._nursery
        pid = nursery._process.pid
        os.kill(pid, signal.SIGSTOP)
        spare(nursery, monkeypatch)
        scorer._pool._nursery_died()
        try:
            with pytest.raises(DeadlineError, match=f"pid {pid}"):
                await scorer.score([rollout(1, "", {})], deadline_s=60.0)
        finally:
            os.kill(pid, signal.SIGKILL)
            await scorer.close()

    asyncio.run(go())
    assert "reward.nursery_replaced" not in events.kinds()


@pytest.mark.parametrize("news", [0, 1, 2])
def test_a_worker_that_ends_as_the_scorer_leaves_is_no_traceback(news: int) -> None:
    """With news unread the socket is reset, without it is broken."""
    scorer, nursery = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with nursery:
        for name in range(news):
            tell_gone(nursery, str(name), 0)
        scorer.close()
        tell_gone(nursery, "9", 9)
        tell_gone(nursery, "10", 0)
