"""gyre serve under clients that hang up, and under a mixed load with faults: nothing is left behind.
The long form of the second: python tests/system/system_soak.py --minutes 30 --output soak.json"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from system_models import save_changed, save_checkpoint
from system_soak import Secrets, Soak, SoakPlan, judge

from gyre.server.gateway.keys import create_key
from gyre.server.gateway.limits import KeyLimits
from hang_ups import MOMENTS, hang_up_often
from served import Served, serving
from served_account import Account, look_when_idle

pytestmark = pytest.mark.slow  # `make test` has the servers of test_serve.py

AT_ONCE, MOST = 24, 64  # clients that hang up; requests that their key may have at once
WARM_UP = 400  # hang-ups until buffers and pools have their size
HEADROOM_BYTES = 12 << 20
# what is written when a request or an engine is lost
LOSSES = ("serve.request_failed", "serve.usage_incomplete", "engine.lost", "retry.request_requeued")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "qwen", "qwen3")


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def secrets(keys) -> Secrets:
    return Secrets.make(keys)


@pytest.fixture(scope="module")
def secret(keys) -> str:
    """Of a key that may have MOST requests at once."""
    return create_key(keys, name="", role="user", limits=KeyLimits(concurrent_requests=MOST))[1]


@pytest.fixture(scope="module")
def served(folder, keys, secret, secrets, tmp_path_factory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("log") / "stderr"
    options = ["--replicas", "2", "--set", "run.threads=1", "--keys", str(keys), "--access-log"]
    with serving(folder, log, *options) as found:
        yield found


def ask(served: Served, secret: str) -> str:
    """A greedy answer."""
    body = {"model": served.model, "prompt": "How many", "max_tokens": 12, "temperature": 0}
    headers = {"authorization": f"Bearer {secret}"}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=60)
    return answer.json()["choices"][0]["text"]


async def count_admitted(served: Served, secret: str, asked: int) -> int:
    """How many of so many long streams run at the same time."""
    body = {
        "model": served.model,
        "prompt": "How many",
        "max_tokens": 240,
        "n": 2,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {secret}"}
    limits = httpx.Limits(max_connections=None)
    async with AsyncExitStack() as held, httpx.AsyncClient(limits=limits, timeout=60) as client:
        answers = await asyncio.gather(
            *(
                held.enter_async_context(
                    client.stream(
                        "POST", f"{served.url}/v1/completions", json=body, headers=headers
                    )
                )
                for _ in range(asked)
            )
        )
        return sum(answer.status_code == 200 for answer in answers)


def check_same(before: Account, after: Account) -> None:
    """The processes are those of before, and hold what they held."""
    for one in before.processes:
        now = after.of(one.pid)
        assert now is not None, f"the {one.role} {one.pid} is gone"
        assert now.handles == one.handles
        assert now.rss_bytes < one.rss_bytes + HEADROOM_BYTES


@pytest.mark.parametrize("times", [10_000])
def test_clients_that_hang_up_leave_nothing_behind(served, secret, times) -> None:
    """No request, KV page or open file; nothing of the key's limits, which are given back with the
    same call as its tokens; no memory."""
    expected = ask(served, secret)
    asyncio.run(
        hang_up_often(served.url, served.model, secret, times=WARM_UP, at_once=AT_ONCE, seed=0)
    )
    before = look_when_idle(served, secret)
    said = served.log.stat().st_size
    counts = asyncio.run(
        hang_up_often(served.url, served.model, secret, times=times, at_once=AT_ONCE, seed=1)
    )
    assert sum(counts.values()) == times and counts.keys() == set(MOMENTS)
    after = look_when_idle(served, secret)
    check_same(before, after)
    gone = ("gyre_disconnects_total",)
    assert after.samples[gone] - before.samples[gone] > times / 10, "they hung up too late"
    assert asyncio.run(count_admitted(served, secret, MOST + 4)) == MOST
    look_when_idle(served, secret)
    assert ask(served, secret) == expected
    rows = [json.loads(line) for line in served.log.read_text()[said:].splitlines()]
    assert not [row for row in rows if row["kind"] in LOSSES]


@pytest.mark.slow
def test_a_mixed_load_with_changes_and_a_kill_leaves_nothing_behind(
    served, folder, secrets, tmp_path
) -> None:
    """Three rounds of load, with two changes of the weights and a kill of an engine between them.
    Every answer is as it should be; between the rounds no handle is more than before."""
    other = save_changed(folder, tmp_path / "other")
    said = served.log.stat().st_size
    plan = SoakPlan(rounds=3, round_s=3.0, requests_per_s=15)
    found = Soak(served, secrets, [folder, other], plan).run()
    assert judge(found, served.log.read_text()[said:]) == []
    assert (found.kills, found.changes, len(found.texts)) == (1, 2, 2)
    assert found.answers["stream 200"] and found.answers["limited 429"]
    for before, after in zip(found.accounts, found.accounts[1:], strict=False):
        for one in after.processes:
            assert (old := before.of(one.pid)) is None or one.handles == old.handles
