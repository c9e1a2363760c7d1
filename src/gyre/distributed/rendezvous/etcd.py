"""etcd rendezvous: the contract over an etcd v3. In: a gateway, the run's prefix. Out: the
contract, as strong as etcd: transactions, leases and watches are its own. Each commit is carried
out once: it carries a mark, by which a repeated call sees that the one before had arrived.

A store that went back to older data (a restored backup) is noticed in two ways. A linearizable
answer may not be behind one that came before it was asked. After each interruption the last change
that this process knows must still be at its revision. Either emits `rendezvous.rewound`, and ends
watches with HistoryLost.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import groupby
from typing import Any

import httpx2

from gyre.core.errors import DeadlineError
from gyre.core.events import Emit
from gyre.distributed.rendezvous.contract import (
    CommitRefused,
    HistoryLost,
    KeyAction,
    KeyChange,
    KeyChanges,
    KeyCheck,
    KeyEntry,
    KeyListing,
    KeyPut,
    Lease,
    LeaseLost,
)
from gyre.distributed.rendezvous.etcd_gateway import (
    NOT_FOUND,
    OUT_OF_RANGE,
    EtcdAnswer,
    EtcdGateway,
    EtcdRefusal,
    EtcdUnavailable,
)

FUTURE = "future revision"  # in etcd's message for a revision that it has not reached
CLOSE_S = 1.0  # for taking the mark of this process away
REOPEN_S = 0.05  # before a watch that broke is opened again
SILENCE_S = 10.0  # without a message, after which a watch is opened anew


class EtcdRendezvous:
    """One process's end. Used on one event loop; no thread is started."""

    def __init__(self, gateway: EtcdGateway, *, prefix: str, emit: Emit) -> None:
        """Take the run's prefix, such as "/gyre/NAME/"."""
        assert prefix.endswith("/"), prefix
        self._gateway = gateway
        self._prefix = prefix
        self._emit = emit
        self._revision = 0  # the highest that etcd has answered with
        # key, value and revision of the newest entry that this process wrote or saw
        self._known: tuple[str, str, int] | None = None
        self._rewinds = 0
        self._is_unsure = False  # whether etcd was away, and its history is to be confirmed
        # a key of this process alone, beside the run's: the number of its last commit
        self._session = f"{prefix[:-1]}.sessions/{uuid.uuid4().hex}"
        self._number = 0
        self._marked = 0
        self._committing = asyncio.Lock()

    async def get(self, key: str, *, deadline_s: float) -> KeyEntry | None:
        body = (await self._call("kv/range", self._range(key), deadline_s)).body
        return next(iter(self._entries(body)), None)

    async def list(self, prefix: str, *, deadline_s: float) -> KeyListing:
        body = (await self._call("kv/range", self._below(prefix), deadline_s)).body
        entries = sorted(self._entries(body), key=lambda entry: entry.key)
        return KeyListing(entries=tuple(entries), revision=int(body["header"]["revision"]))

    async def commit(
        self, *actions: KeyAction, checks: Sequence[KeyCheck] = (), deadline_s: float
    ) -> int:
        puts = [action for action in actions if isinstance(action, KeyPut)]
        end_s = time.monotonic() + deadline_s
        await self._await_turn(deadline_s)
        try:
            revision = await self._commit_once(actions, checks, end_s)
        except EtcdRefusal as error:
            if error.code == NOT_FOUND:
                raise LeaseLost(await self._lost_of(puts, deadline_s)) from error
            raise
        finally:
            self._committing.release()
        if puts:
            self._note(puts[0].key, puts[0].value, revision)
        return revision

    async def _await_turn(self, deadline_s: float) -> None:
        """Take the lock: the mark of each commit follows that of the one before."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._committing.acquire()
        except TimeoutError as error:
            raise DeadlineError(
                f"other commits of this process took all of the {deadline_s:g} s of one",
                hint="see whether etcd is slow or away",
            ) from error

    async def _commit_once(
        self, actions: Sequence[KeyAction], checks: Sequence[KeyCheck], end_s: float
    ) -> int:
        """Commit with a mark that only this process writes. A call that is repeated finds its own
        mark where it was carried out before, and one that is late finds a newer one."""
        self._number += 1
        mark = f"{self._number}"
        message = {
            "success": [
                {"request_put": {"key": _encode(self._session), "value": _encode(mark)}},
                *(self._operation(action) for action in actions),
            ],
            "failure": [
                {"request_range": {"key": _encode(self._session)}},
                *({"request_range": self._range(check.key)} for check in checks),
            ],
        }
        while True:
            compared = {"key": _encode(self._session), "target": "MOD"}
            message["compare"] = [
                {**compared, "mod_revision": self._marked},
                *(part for check in checks for part in self._compare(check)),
            ]
            left_s = end_s - time.monotonic()
            body = (await self._call("kv/txn", message, left_s)).body
            if body.get("succeeded", False):
                self._marked = int(body["header"]["revision"])
                return self._marked
            marks, *found = (self._entries(part["response_range"]) for part in body["responses"])
            before, self._marked = self._marked, marks[0].revision if marks else 0
            if marks and marks[0].value == mark:
                return self._marked
            if self._marked == before:
                at = [next(iter(entries), None) for entries in found]
                refused = next(n for n, check in enumerate(checks) if not check.holds(at[n]))
                raise CommitRefused(checks[refused], at[refused])

    async def grant(self, ttl_s: float, *, deadline_s: float) -> Lease:
        message = {"TTL": math.ceil(ttl_s), "ID": 0}
        body = (await self._call("lease/grant", message, deadline_s)).body
        return Lease(id=int(body["ID"]), ttl_s=float(body["TTL"]))

    async def keep_alive(self, lease: Lease, *, deadline_s: float) -> None:
        if not await self._is_alive(lease, deadline_s):
            raise LeaseLost(lease)

    async def revoke(self, lease: Lease, *, deadline_s: float) -> None:
        try:
            await self._call("lease/revoke", {"ID": lease.id}, deadline_s)
        except EtcdRefusal as error:
            if error.code != NOT_FOUND:
                raise

    async def watch(
        self, prefix: str, *, after: int, deadline_s: float
    ) -> AsyncGenerator[KeyChanges, None]:
        rewinds = self._rewinds
        while True:
            await self._confirm_history(deadline_s)
            if self._rewinds != rewinds or self._revision < after:
                reason = f"etcd went back to revision {self._revision}"
                raise HistoryLost(after, reason, went_back=True)
            message = {"create_request": {**self._below(prefix), "start_revision": after + 1}}
            try:
                async with aclosing(self._gateway.stream("/v3/watch", message)) as answers:
                    while True:
                        async with asyncio.timeout(SILENCE_S):
                            answer = await anext(answers)
                        for changes in self._read_changes(answer, after):
                            after = changes.revision
                            yield changes
            except TimeoutError:
                continue  # nothing was heard, which may be as it is
            except (httpx2.TransportError, OSError, StopAsyncIteration, EtcdUnavailable) as error:
                reason = str(error) or type(error).__name__
                self._emit("rendezvous.watch_reopened", reason=reason)
                await asyncio.sleep(REOPEN_S)

    async def close(self) -> None:
        if self._number:
            message = {"key": _encode(self._session)}
            with suppress(DeadlineError):  # a small key stays
                await self._gateway.call("/v3/kv/deleterange", message, deadline_s=CLOSE_S)
        await self._gateway.close()

    async def _call(self, path: str, message: Mapping[str, Any], deadline_s: float) -> EtcdAnswer:
        """Call etcd, and look at where its revisions are."""
        asked_at, rewinds = self._revision, self._rewinds
        end_s = time.monotonic() + deadline_s
        answer = await self._gateway.call(f"/v3/{path}", message, deadline_s=deadline_s)
        self._is_unsure |= answer.was_away
        if path.startswith("kv/"):  # others may come from a member that is behind
            revision = int(answer.body["header"]["revision"])
            if rewinds == self._rewinds and revision < asked_at:
                self._rewind(revision)
            self._revision = max(self._revision, revision)
        if self._is_unsure:
            with suppress(DeadlineError):  # the answer stands; the next call looks again
                await self._confirm_history(end_s - time.monotonic())
        return answer

    async def _confirm_history(self, deadline_s: float) -> None:
        """See whether the newest entry that this process knows is still in etcd's past."""
        known, message, is_yet_to_come = self._known, self._range(""), False
        asked_at, rewinds = self._revision, self._rewinds
        try:
            past = {**self._range(known[0]), "revision": known[2]} if known else message
            answer = await self._gateway.call("/v3/kv/range", past, deadline_s=deadline_s)
        except EtcdRefusal as error:
            if error.code != OUT_OF_RANGE:
                raise
            is_yet_to_come = FUTURE in error.message
            known = None  # compacted: only the present revision can tell
            answer = await self._gateway.call("/v3/kv/range", message, deadline_s=deadline_s)
        self._is_unsure = False
        if rewinds != self._rewinds:
            return
        revision = int(answer.body["header"]["revision"])
        found = [(at.key, at.value, at.revision) for at in self._entries(answer.body)]
        is_other = known is not None and known not in found
        if is_yet_to_come or is_other or revision < asked_at:
            self._rewind(revision)
        self._revision = max(self._revision, revision)

    def _rewind(self, revision: int) -> None:
        self._emit("rendezvous.rewound", revision=revision, expected=self._revision)
        self._rewinds += 1
        self._revision, self._known = revision, None

    def _note(self, key: str, value: str, revision: int) -> None:
        if self._known is None or revision > self._known[2]:
            self._known = (key, value, revision)

    async def _is_alive(self, lease: Lease, deadline_s: float) -> bool:
        body = (await self._call("lease/keepalive", {"ID": lease.id}, deadline_s)).body
        return int(body["result"].get("TTL", 0)) > 0

    async def _lost_of(self, puts: Sequence[KeyPut], deadline_s: float) -> Lease:
        """Return which of the leases has ended: etcd does not say."""
        leases = [put.lease for put in puts if put.lease is not None]
        for lease in leases:
            if not await self._is_alive(lease, deadline_s):
                return lease
        return leases[0]

    def _compare(self, check: KeyCheck) -> list[dict[str, Any]]:
        key, parts = _encode(self._prefix + check.key), []
        if check.revision is not None:
            parts.append({"key": key, "target": "MOD", "mod_revision": check.revision})
        if check.value is not None:
            parts.append({"key": key, "target": "VALUE", "value": _encode(check.value)})
        return parts

    def _operation(self, action: KeyAction) -> dict[str, Any]:
        key = _encode(self._prefix + action.key)
        if isinstance(action, KeyPut):
            lease = action.lease.id if action.lease else 0
            return {"request_put": {"key": key, "value": _encode(action.value), "lease": lease}}
        return {"request_delete_range": {"key": key}}

    def _range(self, key: str) -> dict[str, Any]:
        return {"key": _encode(self._prefix + key)}

    def _below(self, prefix: str) -> dict[str, Any]:
        start = (self._prefix + prefix).encode()
        end = start[:-1] + bytes([start[-1] + 1])  # UTF-8 has no byte 255
        return {"key": _encode(start), "range_end": _encode(end)}

    def _entries(self, body: Mapping[str, Any]) -> list[KeyEntry]:
        return [
            KeyEntry(
                key=_decode(found["key"]).removeprefix(self._prefix),
                value=_decode(found.get("value", "")),
                revision=int(found["mod_revision"]),
                lease_id=int(found.get("lease", 0)),
            )
            for found in body.get("kvs", ())
        ]

    def _read_changes(self, answer: Mapping[str, Any], after: int) -> list[KeyChanges]:
        """Return the changes of a message by revision. HistoryLost where they were compacted."""
        result = answer.get("result", {})
        if at := result.get("compact_revision"):
            raise HistoryLost(after, f"those up to {at} were compacted", went_back=False)
        if "error" in answer or result.get("canceled"):
            raise EtcdUnavailable(str(answer.get("error") or result.get("cancel_reason")))
        found = []
        for event in result.get("events", ()):
            revision, is_gone = int(event["kv"]["mod_revision"]), event.get("type") == "DELETE"
            (entry,) = self._entries({"kvs": [event["kv"]]})
            if not is_gone:
                self._note(entry.key, entry.value, revision)
            value = None if is_gone else entry.value
            found.append((revision, KeyChange(key=entry.key, value=value)))
        return [
            KeyChanges(revision=revision, changes=tuple(change for _, change in group))
            for revision, group in groupby(found, key=lambda item: item[0])
        ]


def _encode(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _decode(text: str) -> str:
    return base64.b64decode(text).decode()
