"""Contract suite of Rendezvous: in one process, over a TCPStore, and on a real etcd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest

import rendezvous_cases
from gyre.core.errors import DeadlineError
from gyre.distributed.rendezvous.contract import (
    CommitRefused,
    HistoryLost,
    KeyChanges,
    KeyCheck,
    KeyDelete,
    KeyPut,
    LeaseLost,
)
from gyre.distributed.rendezvous.leader import campaign
from rendezvous_cases import KINDS, LEASE_S, SOON_S, Meeting, keep, meetings

Go = Callable[[Callable[[Meeting], Awaitable[None]]], None]


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.slow if kind == "etcd" else ()) for kind in KINDS],
)
def meet(request, tmp_path_factory) -> Iterator[Callable[[], Meeting]]:
    with meetings(request.param, tmp_path_factory.mktemp("rendezvous")) as make:
        yield make


@pytest.fixture
def go(meet) -> Go:
    return lambda work: rendezvous_cases.go(meet(), work)


async def put(one: Any, key: str, value: str, **how: Any) -> int:
    return await one.commit(
        KeyPut(key=key, value=value, lease=how.pop("lease", None)), deadline_s=SOON_S, **how
    )


async def values(one: Any, prefix: str = "") -> dict[str, str]:
    listing = await one.list(prefix, deadline_s=SOON_S)
    return {entry.key: entry.value for entry in listing.entries}


async def take(changes: AsyncGenerator[KeyChanges, None], number: int) -> list[KeyChanges]:
    return [await anext(changes) for _ in range(number)]


def test_what_one_writes_another_reads_with_its_revision(go) -> None:
    async def main(meeting: Meeting) -> None:
        one, other = meeting.join(), meeting.join()
        assert await other.get("a", deadline_s=SOON_S) is None
        first = await put(one, "a", "1")
        second = await put(other, "a/b", "zwei – 二")
        entry = await one.get("a/b", deadline_s=SOON_S)
        assert (entry.key, entry.value, entry.revision) == ("a/b", "zwei – 二", second)
        assert second > first and entry.lease_id == 0
        listing = await one.list("", deadline_s=SOON_S)
        assert [entry.key for entry in listing.entries] == ["a", "a/b"]
        assert listing.revision >= second
        assert await values(one, "a/") == {"a/b": "zwei – 二"} and await values(one, "b") == {}
        await one.commit(KeyDelete(key="a"), KeyDelete(key="none"), deadline_s=SOON_S)
        assert await values(other) == {"a/b": "zwei – 二"}

    go(main)


def test_a_commit_is_whole_or_refused_and_has_one_revision(go) -> None:
    async def main(meeting: Meeting) -> None:
        one, other = meeting.join(), meeting.join()
        at = await put(one, "a", "1")
        absent = KeyCheck(key="b", revision=0)
        revision = await one.commit(
            KeyPut(key="a", value="2"), KeyPut(key="b", value="2"),
            checks=[KeyCheck(key="a", revision=at), absent], deadline_s=SOON_S,
        )  # fmt: skip
        assert revision > at
        for entry in (await other.list("", deadline_s=SOON_S)).entries:
            assert (entry.value, entry.revision) == ("2", revision)
        for check, found in [
            (KeyCheck(key="a", revision=at), "2"),
            (absent, "2"),
            (KeyCheck(key="a", value="1"), "2"),
            (KeyCheck(key="c", value="1"), None),
            (KeyCheck(key="c", revision=revision), None),
        ]:
            with pytest.raises(CommitRefused) as refused:
                await other.commit(
                    KeyPut(key="a", value="3"), KeyPut(key="c", value="3"),
                    checks=[KeyCheck(key="b", value="2"), check], deadline_s=SOON_S,
                )  # fmt: skip
            assert refused.value.check == check
            assert (refused.value.found and refused.value.found.value) == found
        assert await values(one) == {"a": "2", "b": "2"}

    go(main)


def test_of_many_writers_of_one_key_each_count_is_kept(go) -> None:
    """Compare-and-swap under contention: no increment is lost."""

    async def main(meeting: Meeting) -> None:
        async def count(one: Any) -> None:
            for _ in range(5):
                entry, done = await one.get("n", deadline_s=SOON_S), False
                while not done:
                    value, at = (int(entry.value), entry.revision) if entry else (0, 0)
                    try:
                        check = KeyCheck(key="n", revision=at)
                        await put(one, "n", f"{value + 1}", checks=[check])
                        done = True
                    except CommitRefused as refused:
                        entry = refused.found

        await asyncio.gather(*(count(meeting.join()) for _ in range(4)))
        assert await values(meeting.join()) == {"n": "20"}

    go(main)


def test_a_watch_gives_every_change_once_and_in_order(go) -> None:
    async def main(meeting: Meeting) -> None:
        one, other = meeting.join(), meeting.join()
        await put(one, "w/old", "0")
        start = (await one.list("", deadline_s=SOON_S)).revision
        expected = []
        for number in range(6):
            await put(other, "x/no", f"{number}")
            expected.append((await put(other, f"w/{number % 2}", f"{number}"), f"{number}"))
        async with aclosing(one.watch("w/", after=start, deadline_s=SOON_S)) as changes:
            past = await take(changes, 6)
            assert [(at.revision, at.changes[0].value) for at in past] == expected
            # and what comes while it waits
            waiting = asyncio.create_task(take(changes, 2))
            await asyncio.sleep(0.2)
            both = await other.commit(
                KeyPut(key="w/a", value="7"), KeyDelete(key="w/0"), KeyPut(key="v", value="7"),
                deadline_s=SOON_S,
            )  # fmt: skip
            last = await put(other, "w/a", "8")
            found = await waiting
        assert [at.revision for at in found] == [both, last]
        assert {(change.key, change.value) for change in found[0].changes} == {
            ("w/a", "7"),
            ("w/0", None),
        }
        # from the middle on
        async with aclosing(one.watch("w/", after=expected[3][0], deadline_s=SOON_S)) as changes:
            assert [at.revision for at in await take(changes, 4)] == [
                expected[4][0], expected[5][0], both, last,
            ]  # fmt: skip

    go(main)


def test_a_watch_from_a_revision_that_is_not_there_yet_says_so(go) -> None:
    async def main(meeting: Meeting) -> None:
        one = meeting.join()
        at = await put(one, "a", "1")
        with pytest.raises(HistoryLost) as lost:
            async with aclosing(one.watch("a", after=at + 100, deadline_s=SOON_S)) as changes:
                await take(changes, 1)
        assert lost.value.after == at + 100

    go(main)


def test_a_key_goes_with_its_lease_and_a_watcher_sees_it(go) -> None:
    async def main(meeting: Meeting) -> None:
        one, other = meeting.join(), meeting.join()
        lease, at = await keep(one, "m/one")
        await put(one, "m/stays", "here")
        assert (await other.get("m/one", deadline_s=SOON_S)).lease_id == lease.id
        async with aclosing(other.watch("m/", after=at, deadline_s=SOON_S)) as changes:
            both = await take(changes, 2)
        found = [(change.key, change.value) for one_of in both for change in one_of.changes]
        assert sorted(found) == [("m/one", None), ("m/stays", "here")]
        assert set(await values(other)) == {"m/stays"}
        with pytest.raises(LeaseLost):
            await one.keep_alive(lease, deadline_s=SOON_S)
        with pytest.raises(LeaseLost):
            await put(one, "m/one", "again", lease=lease)
        assert set(await values(other)) == {"m/stays"}
        await one.revoke(lease, deadline_s=SOON_S)  # which is fine

    go(main)


def test_a_revoked_lease_takes_all_its_keys_at_once(go) -> None:
    async def main(meeting: Meeting) -> None:
        one, other = meeting.join(), meeting.join()
        lease = await one.grant(600.0, deadline_s=SOON_S)
        at = 0
        for name in ("a", "b"):
            at = await put(one, name, "here", lease=lease)
        at = await put(one, "b", "without it")  # a later write takes the key off the lease
        at = await put(one, "c", "here", lease=lease)
        async with aclosing(other.watch("", after=at, deadline_s=SOON_S)) as changes:
            await one.revoke(lease, deadline_s=SOON_S)
            (gone,) = await take(changes, 1)
        assert {(change.key, change.value) for change in gone.changes} == {("a", None), ("c", None)}
        assert await values(one) == {"b": "without it"}

    go(main)


def test_of_two_leaders_one_passes_the_fence(go) -> None:
    """The first believes that it leads, and does not know that its lease is over."""

    async def main(meeting: Meeting) -> None:
        one, other = meeting.join(), meeting.join()
        first = None
        while first is None:
            began_s, lease = time.monotonic(), await one.grant(LEASE_S, deadline_s=SOON_S)
            try:
                first = await campaign(one, "publisher", "one", lease=lease, deadline_s=SOON_S)
                await put(one, "led", "by one", checks=[first.check])
            except (CommitRefused, LeaseLost):
                assert time.monotonic() > began_s + LEASE_S / 2, "this machine did not stand still"
                first = None
        second_lease = await other.grant(600.0, deadline_s=SOON_S)
        second = await campaign(other, "publisher", "two", lease=second_lease, deadline_s=SOON_S)
        assert second.fence == first.fence + 1
        with pytest.raises(CommitRefused) as refused:
            await put(one, "led", "by one again", checks=[first.check])
        assert refused.value.found and '"two"' in refused.value.found.value
        await put(other, "led", "by two", checks=[second.check])
        assert (await values(one, "led")) == {"led": "by two"}
        # a campaign while another leads ends at its deadline, with the name
        third = await one.grant(600.0, deadline_s=SOON_S)
        with pytest.raises(DeadlineError, match="'publisher' is still led by 'two'"):
            await campaign(one, "publisher", "one", lease=third, deadline_s=0.5)
        await other.revoke(second_lease, deadline_s=SOON_S)
        again = await campaign(one, "publisher", "one", lease=third, above=40, deadline_s=SOON_S)
        assert again.fence == 41, "above what it knows, though the store knows less"

    go(main)


def test_many_campaigners_lead_one_after_the_other(go) -> None:
    async def main(meeting: Meeting) -> None:
        fences: list[int] = []

        async def lead(name: str) -> None:
            one = meeting.join()
            lease = await one.grant(600.0, deadline_s=SOON_S)
            leads = await campaign(one, "only", name, lease=lease, deadline_s=SOON_S)
            found = await one.get("at", deadline_s=SOON_S)
            await put(one, "at", name, checks=[leads.check])
            assert found is None or found.value != name
            fences.append(leads.fence)
            await one.revoke(lease, deadline_s=SOON_S)

        await asyncio.gather(*(lead(f"{number}") for number in range(4)))
        assert fences == [1, 2, 3, 4]

    go(main)
