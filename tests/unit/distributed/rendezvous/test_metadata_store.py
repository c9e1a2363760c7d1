"""What a pod keeps at its rendezvous, over each kind of store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest

import rendezvous_cases
from gyre.core.errors import DeadlineError, InputError
from gyre.distributed.rendezvous.contract import KeyDelete, Lease
from gyre.distributed.rendezvous.metadata_store import KEPT_VERSIONS, MetadataStore
from gyre.distributed.rendezvous.pod_records import Superseded
from offers import registered_offer, same_offer
from rendezvous_cases import KINDS, LASTING_S, LEASE_S, LIVE_S, SOON_S, Meeting, meetings, outlive

MANY = 9_000  # tensors, whose text is longer than etcd takes in one commit

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


def store_of(
    meeting: Meeting, name: str, *, deadline_s: float = SOON_S, lease_s: float = LASTING_S
) -> MetadataStore:
    return MetadataStore(
        meeting.join(), name=name, emit=meeting.emit, lease_s=lease_s, deadline_s=deadline_s
    )


def test_a_late_joiner_gets_the_registered_version_without_the_trainer(go) -> None:
    async def main(meeting: Meeting) -> None:
        trainer = store_of(meeting, "trainer")
        await trainer.join("trainer", "host/1")
        await trainer.claim_epoch(1)
        for version in range(1, 4):
            await trainer.publish_offer(registered_offer(version, entries=MANY))
        await trainer.note_committed(1, 2)
        await trainer.leave()
        late = store_of(meeting, "engine-9")
        assert same_offer(await late.latest_offer(), registered_offer(3, entries=MANY))
        pieces = await meeting.joined[0].list("pieces/000001/000000003/", deadline_s=SOON_S)
        assert len(pieces.entries) == 3
        states = [(at.version, at.state) for at in await late.versions()]
        assert states == [(1, "registered"), (2, "committed"), (3, "registered")]

    go(main)


def test_a_receiver_waits_for_the_next_version_and_notes_what_it_has(go) -> None:
    async def main(meeting: Meeting) -> None:
        trainer, engine = store_of(meeting, "trainer"), store_of(meeting, "engine-0")
        await engine.join("engine", "host/2")
        assert await engine.latest_offer() is None
        waiting = asyncio.create_task(engine.wait_offer(after=(1, 1), deadline_s=SOON_S))
        await trainer.claim_epoch(1)
        await trainer.publish_offer(registered_offer(1))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await trainer.publish_offer(registered_offer(2))
        assert same_offer(await waiting, registered_offer(2))
        await engine.note_receiver(1, 2, "prepared")
        await engine.note_receiver(1, 2, "committed")
        (record,) = (await trainer.receivers()).values()
        assert (record.name, record.version, record.state) == ("engine-0", 2, "committed")
        with pytest.raises(DeadlineError, match="no version after 2 of epoch 1 was offered"):
            await engine.wait_offer(after=(1, 2), deadline_s=0.2)
        await engine.leave()
        assert await trainer.receivers() == {} and await trainer.members() == {}

    go(main)


def test_an_older_publisher_is_refused_once_a_newer_one_is_there(go) -> None:
    async def main(meeting: Meeting) -> None:
        old, new = store_of(meeting, "old"), store_of(meeting, "new")
        await old.join("trainer", "host/1")
        await old.claim_epoch(3)
        await old.claim_epoch(3)  # its own again
        await old.publish_offer(registered_offer(9, epoch=3))
        with pytest.raises(Superseded, match="'old' publishes under epoch 3"):
            await new.claim_epoch(3)
        with pytest.raises(Superseded):
            await new.claim_epoch(2)
        await new.claim_epoch(4)
        for _ in range(2):
            with pytest.raises(Superseded, match="'new' publishes under epoch 4"):
                await old.publish_offer(registered_offer(10, epoch=3))
        told = await meeting.wait_event("rendezvous.superseded")
        assert told == {"epoch": 4, "publisher": "new"}
        with pytest.raises(Superseded):
            await old.note_committed(3, 9)
        # a resumed run goes on from an older version, under its epoch
        await new.publish_offer(registered_offer(5, epoch=4))
        reader = store_of(meeting, "reader")
        assert same_offer(await reader.latest_offer(), registered_offer(5, epoch=4))
        await old.leave()

    go(main)


def test_old_offers_are_deleted_and_the_last_one_stays_for_its_readers(go) -> None:
    async def main(meeting: Meeting) -> None:
        trainer, other = store_of(meeting, "trainer"), meeting.join()
        await trainer.claim_epoch(1)
        for version in range(KEPT_VERSIONS + 4):
            await trainer.publish_offer(registered_offer(version))
        keys = [entry.key for entry in (await other.list("", deadline_s=SOON_S)).entries]
        last = [f"000001/{KEPT_VERSIONS + number:09}" for number in (2, 3)]
        assert [key for key in keys if key.startswith("pieces/")] == [
            f"pieces/{at}/0000" for at in last
        ]
        assert [key for key in keys if "offers" in key] == [f"state/offers/{at}" for at in last]
        assert len(await trainer.versions()) == KEPT_VERSIONS

    go(main)


def test_a_withdrawn_offer_is_not_found_and_the_one_before_still_is(go) -> None:
    async def main(meeting: Meeting) -> None:
        trainer, engine = store_of(meeting, "trainer"), store_of(meeting, "engine")
        await trainer.claim_epoch(1)
        for version in (1, 2):
            await trainer.publish_offer(registered_offer(version))
        await trainer.withdraw_offer(1, 2)
        assert same_offer(await engine.latest_offer(), registered_offer(1))
        await trainer.withdraw_offer(1, 1)
        await trainer.withdraw_offer(1, 1)
        assert await engine.latest_offer() is None
        listing = await meeting.joined[0].list("pieces/", deadline_s=SOON_S)
        assert listing.entries == ()

    go(main)


def test_members_come_and_go_and_are_watched(go) -> None:
    async def main(meeting: Meeting) -> None:
        one, two = store_of(meeting, "one"), store_of(meeting, "two", lease_s=LIVE_S)
        await one.join("trainer", "host/1")
        seen: list[list[str]] = []

        async def watch() -> None:
            async with aclosing(one.watch_members()) as changes:
                async for members in changes:
                    seen.append(sorted(members))
                    if len(seen) >= 3 and seen[-1] == ["one"]:
                        return

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0.1)
        await two.join("engine", "host/2")

        async def are_there() -> bool:
            members = await one.members()
            return set(members) == {"one", "two"} and members["two"].place == "host/2"

        await outlive(LIVE_S, are_there)
        await two.leave()
        await watching
        assert seen[0] == ["one"] and ["one", "two"] in seen
        await one.leave()

    go(main)


class CutOff:
    """A process's end whose signs of life no longer arrive, once it is cut."""

    def __init__(self, end: Any) -> None:
        self.end, self.is_cut = end, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.end, name)

    async def keep_alive(self, lease: Lease, *, deadline_s: float) -> None:
        if self.is_cut:
            raise DeadlineError("the network is cut")
        await self.end.keep_alive(lease, deadline_s=deadline_s)


def test_a_member_without_a_sign_of_life_is_gone_with_its_records(go) -> None:
    async def main(meeting: Meeting) -> None:
        one, end = store_of(meeting, "one"), CutOff(meeting.join())
        two = MetadataStore(end, name="two", emit=meeting.emit, lease_s=LEASE_S, deadline_s=SOON_S)
        await one.join("engine", "host/1")
        await two.join("engine", "host/2")
        await two.note_receiver(1, 1, "committed")
        await two.begin_operation("rollout", epoch=1, version=1)
        end.is_cut = True
        async with aclosing(one.watch_members()) as changes:
            async for members in changes:
                if "two" not in members:
                    break
        assert await one.receivers() == {} and await one.operation() is None
        # it comes back with a new lease, and writes again what it answers for
        end.is_cut = False
        told = await meeting.wait_event("rendezvous.lease_lost")
        assert told["member"] == "two" and told["seconds"] > LEASE_S
        await meeting.wait_event("rendezvous.rewritten")
        # such a short lease may end again, and its records be written again
        async with asyncio.timeout(SOON_S):
            while (found := (await one.receivers()).get("two")) is None:
                await asyncio.sleep(0.02)
            while "two" not in await one.members() or await one.operation() is None:
                await asyncio.sleep(0.02)
        assert found.version == 1
        await two.leave()
        await one.leave()

    go(main)


def test_a_clock_of_the_wall_that_jumps_ends_no_lease(go, monkeypatch) -> None:
    async def main(meeting: Meeting) -> None:
        one = store_of(meeting, "one")
        await one.join("engine", "host/1")
        now_s = time.time()
        for jump_s in (86_400.0, -86_400.0):
            monkeypatch.setattr(time, "time", lambda jump_s=jump_s: now_s + jump_s)
            await asyncio.sleep(0.6)
            assert set(await one.members()) == {"one"}
        assert meeting.events == []
        await one.leave()

    go(main)


def test_a_process_that_comes_back_takes_the_place_of_the_one_before(go) -> None:
    async def main(meeting: Meeting) -> None:
        before, after = store_of(meeting, "engine-0"), store_of(meeting, "engine-0")
        await before.join("engine", "host/1")
        await after.join("engine", "host/7")
        told = await meeting.wait_event("rendezvous.replaced")
        assert told == {"member": "engine-0", "keys": ["state/members/engine-0"]}
        await asyncio.sleep(LEASE_S)
        assert (await after.members())["engine-0"].place == "host/7"
        await before.leave()
        assert (await after.members())["engine-0"].place == "host/7", "its record is another's now"
        await after.leave()

    go(main)


def test_a_comparison_while_a_commit_is_under_way_writes_nothing_in_its_place(tmp_path) -> None:
    """The commit is refused later; until then its record is not what this process has written."""

    async def main(meeting: Meeting) -> None:
        one, commit = store_of(meeting, "one"), meeting.joined[0].commit
        held = asyncio.Event()

        async def slow(*changes: Any, **given: Any) -> int:
            if any("rollout" in getattr(change, "value", "") for change in changes):
                async with asyncio.timeout(SOON_S):
                    await held.wait()
            return await commit(*changes, **given)

        meeting.joined[0].commit = slow
        await one.join("trainer", "host/1")
        since = await one.begin_operation("update", epoch=2, version=7)
        late = asyncio.create_task(one.begin_operation("rollout", epoch=2, version=7))
        await asyncio.sleep(0)
        await commit(KeyDelete(key="state/members/one"), checks=[], deadline_s=SOON_S)
        await meeting.wait_event("rendezvous.rewritten")
        held.set()
        with pytest.raises(InputError, match=f"'update' of version 7 by 'one'.*revision {since}"):
            await late
        found = await one.operation()
        assert found is not None and (found[0].kind, found[1]) == ("update", since)
        await one.finish_operation()
        await one.leave()

    with meetings("local", tmp_path) as make:
        rendezvous_cases.go(make(), main)


def test_one_operation_is_under_way_at_a_time(go) -> None:
    async def main(meeting: Meeting) -> None:
        one, two = store_of(meeting, "one"), store_of(meeting, "two")
        await one.join("trainer", "host/1")
        await two.join("engine", "host/2")
        since = await one.begin_operation("update", epoch=2, version=7)
        for store in (one, two):
            with pytest.raises(
                InputError, match="'update' of version 7 by 'one' is under way"
            ) as raised:
                await store.begin_operation("rollout", epoch=2, version=7)
            assert f"since revision {since}" in raised.value.message
        found = await two.operation()
        assert found is not None and (found[0].kind, found[0].by, found[1]) == (
            "update",
            "one",
            since,
        )
        await two.finish_operation()  # which is not its own
        assert await two.operation() is not None
        await one.finish_operation()
        assert await two.operation() is None
        await two.begin_operation("rollout", epoch=2, version=7)
        await two.leave()
        assert await one.operation() is None, "it ends with its process"
        await one.leave()

    go(main)
