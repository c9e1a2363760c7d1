"""Reward functions that fork, write to their channel, leak, print without end or leave daemons;
workers killed from outside. Each costs at most the check that did it, is labeled, and leaves no
process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from gyre.rewards.config import RewardsConfig
from gyre.rewards.score import RuleScorer
from rewards_cases import Events, rollout

MODULE = """
import os, signal, socket, struct, subprocess, sys, threading, time

held = []

def channels():
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield int(name)
        except OSError:
            pass

def hostile(task, completion, *, mark=""):
    if "fork" in completion:
        os.fork()
    if "swarm" in completion:
        for _ in range(5):
            if os.fork() == 0:
                raise SystemExit(0)
    if "forge" in completion:
        from gyre.rewards.messages import CheckResult, frame
        for fd in channels():
            for index in (0, 1, 2, 7, -1):
                os.write(fd, frame(CheckResult(index=index, value=9.0, reason="forged")))
    if "huge" in completion:
        for fd in channels():
            os.write(fd, struct.pack("<I", 3 << 30) + b"x" * 100)
    if "garbage" in completion:
        for fd in channels():
            os.write(fd, b"\\x03\\x00\\x00\\x00abc")
    if "flood" in completion:
        while True:
            for fd in channels():
                os.write(fd, b"\\x05\\x00\\x00\\x00abcde" * 5000)
    if "close" in completion:
        os.closerange(3, 1000)
    if "leak" in completion:
        held.append(bytearray(40 << 20))
    if "print" in completion:
        print("begin of what it says")
        while True:
            print("x" * 10_000, file=sys.stderr)
    if "say" in completion:
        print("it said", completion)
    if "daemon" in completion:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve(sys.executable, [sys.executable, "-c", f"import time; time.sleep(1000)  # {mark}"], {})
            os._exit(0)
        os.wait()
    if "hang" in completion:
        time.sleep(1000)
    if "once" in completion:
        if not os.path.exists(mark):
            open(mark, "w").write(str(os.getpid()))
            time.sleep(1000)
    return 0.5
"""


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_hostile.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


class Case:
    """A scorer with one function part, in a loop whose unhandled errors are kept."""

    def __init__(
        self,
        *,
        workers: int = 1,
        limit_s: float = 30.0,
        mark: str = "",
        log: Path | None = None,
        **settings,
    ):
        part = {
            "kind": "function",
            "path": "my_hostile:hostile",
            "limit_s": limit_s,
            "options": {"mark": mark},
        }
        config = RewardsConfig.model_validate({"parts": [part], "workers": workers, **settings})
        self.events, self.errors, self.reasons = Events(), [], []
        self.scorer = RuleScorer(config, emit=self.events.emit, clock=time.monotonic, log=log)

    async def __aenter__(self) -> Case:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self.errors.append(context)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.scorer.close()
        assert not self.errors, self.errors

    async def outcomes(self, *texts: str) -> list[str]:
        scores = await self.scorer.score(
            [rollout(n, t, {}) for n, t in enumerate(texts)], deadline_s=60.0
        )
        for score in scores:
            assert score.value == (0.5 if score.parts[0].outcome == "ok" else 0.0)
        self.reasons = [score.parts[0].reason for score in scores]
        return [score.parts[0].outcome for score in scores]

    @property
    def supervisor(self) -> psutil.Process:
        assert self.scorer.pool is not None
        return psutil.Process(self.scorer.pool.server.process.pid)


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def daemons(mark: str) -> list[int]:
    """Processes with this mark on their command line, which no environment gave away."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


async def appeared(mark: str) -> bool:
    """Whether it is there: a fork bears its own name only once it runs another program."""
    end_s = time.monotonic() + 20.0
    while not daemons(mark) and time.monotonic() < end_s:
        await asyncio.sleep(0.02)
    return len(daemons(mark)) == 1


async def ended(mark: str, *, within_s: float = 20.0) -> bool:
    end_s = time.monotonic() + within_s
    while left := daemons(mark):
        if time.monotonic() > end_s:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return False
        await asyncio.sleep(0.05)
    return True


@pytest.mark.parametrize("way", ["forge", "huge", "garbage", "flood", "close"])
def test_what_is_written_to_the_channel_is_blamed_on_its_writer(way: str) -> None:
    async def go() -> None:
        async with Case() as case:
            assert await case.outcomes("a", way, "b", "c", "d") == ["ok", "error", "ok", "ok", "ok"]
            assert ("channel" in case.reasons[1]) == (way != "close"), case.reasons[1]
            assert case.events.kinds().count("reward.worker_replaced") == 1

    asyncio.run(go())


@pytest.mark.parametrize("way", ["fork", "swarm"])
def test_a_copy_of_a_worker_answers_nothing(way: str) -> None:
    async def go() -> None:
        async with Case() as case:
            before = {child.pid for child in psutil.Process().children(recursive=True)}
            assert await case.outcomes(*[way] * 6, "a") == ["ok"] * 7

            def running() -> list[psutil.Process]:
                new = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
                return [c for c in new if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]

            until_s = time.monotonic() + 20.0
            # copies that end by themselves
            while len(running()) > 2 and time.monotonic() < until_s:
                await asyncio.sleep(0.05)
            assert len(running()) <= 2, "supervisor, fork server, one worker"

    asyncio.run(go())


def test_a_worker_in_which_processes_pile_up_is_replaced() -> None:
    async def go() -> None:
        async with Case() as case:
            assert await case.outcomes(*["swarm"] * 20) == ["ok"] * 20
            reasons = [
                fields["reason"] for kind, fields in case.events if kind == "reward.worker_replaced"
            ]
            assert len(reasons) == 1 and "processes behind" in reasons[0]

    asyncio.run(go())


def test_a_worker_whose_rewards_leak_is_replaced_before_its_limit() -> None:
    async def go() -> None:
        async with Case(worker_memory_mib=512) as case:
            assert await case.outcomes(*["leak"] * 9, "a") == ["ok"] * 10
            reasons = [
                fields["reason"] for kind, fields in case.events if kind == "reward.worker_replaced"
            ]
            assert 1 <= len(reasons) <= 5 and all(
                "MiB more than at its start" in reason for reason in reasons
            )

    asyncio.run(go())


def test_what_rewards_print_goes_to_a_log_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "rewards.log"

    async def go() -> None:
        async with Case(log=log, limit_s=2.0) as case:
            assert await case.outcomes("say a", "print", "say b") == ["ok", "timeout", "ok"]
            assert case.events.kinds().count("reward.output_dropped") == 1

    asyncio.run(go())
    text = log.read_text()
    assert text.startswith("it said say a\n") and "begin of what it says" in text
    assert (1 << 20) <= len(text) <= (
        1 << 20
    ) + 200 and "more bytes were printed and dropped]" in text
    assert capfd.readouterr() == ("", "")


def test_without_a_log_it_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    async def go() -> None:
        async with Case() as case:
            assert await case.outcomes("say it") == ["ok"]

    asyncio.run(go())
    assert capfd.readouterr() == ("", "it said say it\n")


def test_a_worker_killed_from_outside_costs_no_check(mark: str, tmp_path: Path) -> None:
    place = tmp_path / mark

    async def go() -> None:
        async with Case(mark=str(place)) as case:
            scored = asyncio.create_task(case.outcomes("a", "once", "b"))
            while not (place.exists() and place.read_text()):
                await asyncio.sleep(0.01)
            os.kill(int(place.read_text()), signal.SIGKILL)
            assert await scored == ["ok", "ok", "ok"]
            assert case.events.kinds() == ["reward.retried", "reward.worker_replaced"]
            assert (
                case.events[0][1]["part"] == "function"
                and "signal 9" in case.events[0][1]["reason"]
            )

    asyncio.run(go())


@pytest.mark.parametrize("end", ["worker", "fork server", "supervisor", "closed"])
def test_a_daemon_ends_with_its_worker(end: str, mark: str) -> None:
    async def go() -> None:
        async with Case(mark=mark, limit_s=3.0) as case:
            assert await case.outcomes("daemon") == ["ok"]
            assert await appeared(mark)
            server = case.supervisor.children()[0]
            if end == "worker":
                assert await case.outcomes("hang") == ["timeout"]
            elif end == "fork server":
                server.kill()
            elif end == "supervisor":
                case.supervisor.kill()
            else:
                await case.scorer.close()
            assert await ended(mark), f"it outlived its {end}"
            if end != "closed":
                assert await case.outcomes("a", "b") == ["ok", "ok"]

    asyncio.run(go())
