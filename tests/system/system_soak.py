"""A soak: mixed load on `gyre serve`, and what it holds whenever it is idle.

    python tests/system/system_soak.py --minutes 30 --output soak.json

One round after another: requests of every kind, some by clients that hang up, while weights change
or an engine is killed; then silence, and an account of requests, KV pages, open handles and memory
of each process. In: how long. Out: the accounts, what answered as it should not have, events of
loss; exit code 1 where something was lost, wrong or grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from system_models import save_changed, save_checkpoint

from gyre.server.gateway.keys import create_key
from gyre.server.gateway.limits import KeyLimits
from hang_ups import MOMENTS, hang_up, make_request
from served import Served, serving
from served_account import Account, engines_of, look_when_idle

GROWTH_BYTES = 12 << 20  # that the medians of two thirds of a soak may differ by
REJOIN_S = 60.0
LOSSES = (
    "serve.request_failed",
    "serve.usage_incomplete",
    "serve.keys_unreadable",
    "serve.weights_refused",
    "engine.restart_failed",
    "engine.restarts_exhausted",
)


@dataclass(frozen=True, kw_only=True)
class SoakPlan:
    rounds: int
    round_s: float  # of load, before the silence
    requests_per_s: float
    change_every: int = 2  # rounds between two changes of the weights
    kill_every: int = 5  # rounds between two kills of an engine; 120 s at least, for the restarts
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Secrets:
    user: str
    limited: str  # of a key with six requests a minute
    admin: str

    @classmethod
    def make(cls, keys: Path) -> Secrets:
        def make(name: str, **limits: int) -> str:
            role = "admin" if name == "admin" else "user"
            return create_key(keys, name=name, role=role, limits=KeyLimits(**limits))[1]

        return cls(
            user=make("user"), limited=make("limited", requests_per_minute=6), admin=make("admin")
        )


@dataclass
class Found:
    """What a soak has seen."""

    accounts: list[Account] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)  # by "kind outcome"
    faults: list[str] = field(default_factory=list)
    kills: int = 0
    changes: int = 0
    texts: dict[int, set[str]] = field(
        default_factory=dict
    )  # greedy ones, by the folder in service


class Soak:
    """The clients of one server. `folders` are two checkpoints of its model; it began with the first."""

    def __init__(
        self, served: Served, secrets: Secrets, folders: Sequence[Path], plan: SoakPlan
    ) -> None:
        self._served, self._secrets, self._folders, self._plan = served, secrets, folders, plan
        self._draws = random.Random(plan.seed)
        self.found = Found()

    def run(self) -> Found:
        for number in range(self._plan.rounds):
            asyncio.run(self._round(number))
            self._until_ready()
            self.found.accounts.append(look_when_idle(self._served, self._secrets.user))
        return self.found

    async def _round(self, number: int) -> None:
        plan, ends = self._plan, time.monotonic() + self._plan.round_s
        tasks: list[asyncio.Task[None]] = []
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(
            base_url=self._served.url, timeout=120, limits=limits
        ) as client:
            disturbed = asyncio.create_task(self._disturb(client, number))
            while time.monotonic() < ends:
                tasks.append(asyncio.create_task(self._ask(client, self._draws.choice(KINDS))))
                await asyncio.sleep(self._draws.expovariate(plan.requests_per_s))
            await asyncio.gather(disturbed, *tasks)

    async def _disturb(self, client: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(self._plan.round_s / 3)
        if number % self._plan.kill_every == 1:
            self._draws.choice(engines_of(self._served)).kill()
            self.found.kills += 1
        elif number % self._plan.change_every == 0:
            await self._change(client)

    async def _change(self, client: httpx.AsyncClient) -> None:
        folder = self._folders[(self.found.changes + 1) % 2]
        policy = self._draws.choice(["drain", "continue"])
        answer = await client.post(
            "/admin/weights",
            json={"path": str(folder), "policy": policy},
            headers=bearer(self._secrets.admin),
        )
        self.found.changes += 1
        if answer.status_code != 200 or answer.json()["version"] != self.found.changes:
            self.found.faults.append(
                f"change {self.found.changes}: {answer.status_code} {answer.text}"
            )

    async def _ask(self, client: httpx.AsyncClient, kind: str) -> None:
        """Ask once. What is no answer of this kind is a fault."""
        try:
            outcome = await getattr(self, f"_{kind}")(client)
        except httpx.HTTPError as error:
            outcome = f"fault: {error!r}"
        self.found.answers[f"{kind} {outcome[:60]}"] += 1
        if outcome.startswith("fault"):
            self.found.faults.append(f"{kind} {outcome}")

    async def _post(
        self, client: httpx.AsyncClient, path: str, secret: str, **body: Any
    ) -> httpx.Response:
        return await client.post(path, json=body, headers=bearer(secret))

    async def _greedy(self, client: httpx.AsyncClient) -> str:
        answer = await self._post(
            client, "/v1/completions", self._secrets.user,
            model=self._served.model, prompt="How many", max_tokens=16, temperature=0,
        )  # fmt: skip
        if answer.status_code != 200:
            return f"fault: {answer.status_code} {answer.text}"
        said = answer.json()
        versions = said["system_fingerprint"].removeprefix("version-")
        if "," not in versions:
            texts = self.found.texts.setdefault(int(versions) % 2, set())
            texts.add(said["choices"][0]["text"])
        return "200"

    async def _whole(self, client: httpx.AsyncClient) -> str:
        answer = await self._post(
            client, "/v1/chat/completions", self._secrets.user, model=self._served.model,
            messages=[{"role": "user", "content": "How many apples?"}], max_tokens=40, n=2,
            ignore_eos=True, logprobs=True, top_logprobs=2,
        )  # fmt: skip
        is_whole = answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 80
        return "200" if is_whole else f"fault: {answer.status_code} {answer.text[:200]}"

    async def _stream(self, client: httpx.AsyncClient) -> str:
        answer = await self._post(
            client, "/v1/completions", self._secrets.user, model=self._served.model,
            prompt=["How many", "Weng"], max_tokens=60, ignore_eos=True, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        *_, usage, last = [line[6:] for line in answer.text.splitlines() if line] or [""] * 2
        is_whole = last == "[DONE]" and json.loads(usage)["usage"]["completion_tokens"] == 120
        return "200" if is_whole else f"fault: {answer.status_code} {answer.text[-200:]}"

    async def _echo(self, client: httpx.AsyncClient) -> str:
        answer = await self._post(
            client, "/v1/completions", self._secrets.user, model=self._served.model,
            prompt="How many apples are left?", max_tokens=1, echo=True, logprobs=3,
        )  # fmt: skip
        return "200" if answer.status_code == 200 else f"fault: {answer.status_code} {answer.text}"

    async def _refused(self, client: httpx.AsyncClient) -> str:
        answer = await self._post(
            client, "/generate", self._secrets.user, prompt="x", params={"temperature": -1}
        )
        return "400" if answer.status_code == 400 else f"fault: {answer.status_code}"

    async def _unknown(self, client: httpx.AsyncClient) -> str:
        answer = await self._post(client, "/generate", "gyre-nobody", prompt="x")
        return "401" if answer.status_code == 401 else f"fault: {answer.status_code}"

    async def _limited(self, client: httpx.AsyncClient) -> str:
        answer = await self._post(
            client, "/generate", self._secrets.limited, prompt="x", params={"max_tokens": 4}
        )
        is_due = answer.status_code in (200, 429)
        return str(answer.status_code) if is_due else f"fault: {answer.status_code} {answer.text}"

    async def _looked(self, client: httpx.AsyncClient) -> str:
        answer = await client.get("/metrics", headers=bearer(self._secrets.user))
        return "200" if answer.status_code == 200 else f"fault: {answer.status_code}"

    async def _hung_up(self, client: httpx.AsyncClient) -> str:
        place, moment = urlsplit(self._served.url), self._draws.choice(MOMENTS)
        request = make_request(
            self._served.model, self._secrets.user, self._draws, stream=moment == "in a stream"
        )
        assert place.hostname is not None and place.port is not None
        await hang_up(place.hostname, place.port, moment, request, self._draws)
        return moment

    def _until_ready(self) -> None:
        """Wait until every engine is there again."""
        ends = time.monotonic() + REJOIN_S
        while True:
            answer = httpx.get(f"{self._served.url}/health/ready", timeout=30)
            if answer.status_code == 200 and not answer.json()["reason"]:
                return
            if time.monotonic() > ends:
                self.found.faults.append(f"an engine did not come back: {answer.text}")
                return
            time.sleep(0.2)


KINDS = (
    *("greedy", "whole", "stream", "echo", "refused", "unknown", "limited", "looked"),
    *["hung_up"] * 4,
)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def judge(found: Found, log: str) -> list[str]:
    """What must not be: nothing, in a server that lasts."""
    said = list(found.faults)
    counts = {kind: log.count(f'"kind": "{kind}"') for kind in LOSSES}
    said += [f"{count} x {kind}" for kind, count in counts.items() if count]
    if (lost := log.count('"kind": "engine.lost"')) != found.kills:
        said.append(f"{lost} engines were lost, and {found.kills} killed")
    said += [
        f"{len(texts)} greedy answers of the weights {place}"
        for place, texts in found.texts.items()
        if len(texts) > 1
    ]
    for pid in sorted({one.pid for account in found.accounts for one in account.processes}):
        said += judge_process(pid, found.accounts)
    return said


def judge_process(pid: int, accounts: Sequence[Account]) -> list[str]:
    """What a process gained between the second and the last third of its time."""
    rows = [one for account in accounts if (one := account.of(pid)) is not None]
    third = len(rows) // 3
    if not third:  # it was killed soon
        return []
    middle, last = rows[third : 2 * third], rows[-third:]
    said = []
    name = f"{rows[0].role} {pid}, {len(rows)} accounts"
    if max(one.handles for one in last) > max(one.handles for one in middle):
        said.append(f"{name}: handles {[one.handles for one in rows]}")
    growth = statistics.median(one.rss_bytes for one in last) - statistics.median(
        one.rss_bytes for one in middle
    )
    if growth > GROWTH_BYTES:
        said.append(f"{name}: {growth} bytes more, {[one.rss_bytes for one in rows]}")
    return said


def summary(found: Found, said: Sequence[str], seconds: float) -> dict[str, Any]:
    """A soak as a record."""
    return {
        "seconds": round(seconds),
        "verdict": list(said),
        "answers": dict(sorted(found.answers.items())),
        "kills": found.kills,
        "changes": found.changes,
        "accounts": [[asdict(one) for one in account.processes] for account in found.accounts],
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    options.add_argument("--minutes", type=float, default=30)
    options.add_argument("--round-s", type=float, default=30)
    options.add_argument("--requests-per-s", type=float, default=10)
    options.add_argument("--output", type=Path, required=True)
    args = options.parse_args()
    plan = SoakPlan(
        rounds=max(3, round(args.minutes * 60 / args.round_s)),
        round_s=args.round_s,
        requests_per_s=args.requests_per_s,
    )
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        first = save_checkpoint(base / "model", "qwen3")
        folders, keys = [first, save_changed(first, base / "other")], base / "keys.json"
        secrets = Secrets.make(keys)
        flags = ["--replicas", "2", "--set", "run.threads=1", "--keys", str(keys), "--access-log"]
        with serving(first, base / "log", *flags) as served:
            found = Soak(served, secrets, folders, plan).run()
            said = judge(found, served.log.read_text())
    result = summary(found, said, time.monotonic() - began)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("seconds", "verdict", "kills", "changes")}))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
