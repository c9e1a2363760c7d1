"""What the processes of a pod write at its rendezvous, and what follows when it takes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gyre.core.errors import DeadlineError
from gyre.distributed.config import RendezvousConfig
from gyre.distributed.rendezvous.contract import CommitRefused, KeyCheck
from gyre.distributed.rendezvous.local import LocalRendezvous
from gyre.distributed.rendezvous.metadata_store import MetadataStore
from gyre.distributed.rendezvous.pod_records import Superseded
from gyre.launch.placement.pod_metadata import PodMetadata
from offers import registered_offer

CONFIG = RendezvousConfig(lease_s=5.0, deadline_s=2.0)
Events = list[tuple[str, dict[str, Any]]]


def go(work: Callable[[LocalRendezvous, Events], Awaitable[None]]) -> None:
    async def main() -> None:
        await work(LocalRendezvous(), [])

    asyncio.run(asyncio.wait_for(main(), 20))


def process(at: LocalRendezvous, events: Events, name: str, **changes: Any) -> PodMetadata:
    return PodMetadata(
        at,
        name=name,
        role="engine",
        config=CONFIG.model_copy(update=changes),
        emit=lambda kind, **fields: events.append((kind, fields)),
    )


def reader(at: LocalRendezvous) -> MetadataStore:
    return MetadataStore(at, name="reader", emit=lambda kind, **fields: None)


def test_a_version_is_registered_committed_and_noted_by_its_receivers() -> None:
    async def work(at: LocalRendezvous, events: Events) -> None:
        driver, engine = process(at, events, "driver"), process(at, events, "engine-0")
        await driver.join()
        await engine.join()
        for version in (3, 4):
            offer = registered_offer(version, epoch=2)
            await driver.offered(offer)
            engine.note_serving(2, version)
            await driver.committed(offer)
        assert [row.state for row in await reader(at).versions()] == ["committed"] * 2
        assert await reader(at).operation() is None
        await engine.leave()
        assert set(await reader(at).members()) == {"driver"}
        await driver.leave()
        assert not events

    go(work)


def test_an_update_that_failed_is_followed_by_the_next() -> None:
    async def work(at: LocalRendezvous, events: Events) -> None:
        driver = process(at, events, "driver")
        await driver.join()
        await driver.offered(registered_offer(1, epoch=1))
        await driver.offered(registered_offer(2, epoch=1))
        found = await reader(at).operation()
        assert found is not None and found[0].version == 2
        await driver.leave()

    go(work)


def test_an_operation_of_another_that_does_not_end_is_counted_and_holds_no_version_up() -> None:
    async def work(at: LocalRendezvous, events: Events) -> None:
        other = reader(at)
        await other.join("trainer", "host/1")
        await other.begin_operation("rollout", epoch=1, version=0)
        driver = process(at, events, "driver", deadline_s=0.3)
        await driver.join()
        await driver.offered(registered_offer(1, epoch=1))
        ((kind, fields),) = events
        assert kind == "rendezvous.not_told" and "'rollout' of version 0" in fields["reason"]
        await driver.leave()
        await other.leave()

    go(work)


def test_a_newer_publisher_ends_the_older_one() -> None:
    async def work(at: LocalRendezvous, events: Events) -> None:
        old, new = process(at, events, "old"), process(at, events, "new")
        await old.join()
        await new.join()
        await old.offered(registered_offer(1, epoch=1))
        await old.committed(registered_offer(1, epoch=1))
        await new.offered(registered_offer(1, epoch=2))
        with pytest.raises(Superseded):
            await old.offered(registered_offer(2, epoch=1))
        await old.leave()
        await new.leave()

    go(work)


def test_members_of_other_hosts_are_there_as_long_as_the_driver_says() -> None:
    async def work(at: LocalRendezvous, events: Events) -> None:
        driver = process(at, events, "driver")
        await driver.join()
        driver.note_joined("member-a", "10.0.0.8, host, pid 7")
        driver.note_joined("member-b", "10.0.0.9, host, pid 7")
        driver.note_left("member-a")
        async with asyncio.timeout(10):
            while set(found := await reader(at).members()) != {"driver", "member-b"}:
                await asyncio.sleep(0)
        assert (found["member-b"].role, found["member-b"].place) == (
            "member",
            "10.0.0.9, host, pid 7",
        )
        (entry,) = [
            one
            for one in (await at.list("state/", deadline_s=1)).entries
            if one.key.endswith("member-b")
        ]
        assert entry.lease_id > 0
        await driver.leave()
        assert not await reader(at).members() and not events

    go(work)


@pytest.mark.parametrize("error", [DeadlineError("away"), CommitRefused(KeyCheck(key="a"), None)])
def test_a_note_that_is_not_taken_is_counted_and_the_next_is_written(monkeypatch, error) -> None:
    async def work(at: LocalRendezvous, events: Events) -> None:
        engine = process(at, events, "engine-0")
        await engine.join()
        written: list[int] = []

        async def note(store: MetadataStore, epoch: int, version: int, state: str) -> None:
            if version == 1:
                raise error
            written.append(version)

        monkeypatch.setattr(MetadataStore, "note_receiver", note)
        engine.note_serving(1, 1)
        engine.note_serving(1, 2)
        await engine.leave()
        assert written == [2]
        assert [kind for kind, _ in events] == ["rendezvous.not_told"]

    go(work)


def test_notes_beyond_what_is_kept_are_counted() -> None:
    async def work(at: LocalRendezvous, events: Events) -> None:
        engine = process(at, events, "engine-0")
        await engine.join()
        for version in range(70):
            engine.note_serving(1, version)
        await engine.leave()
        assert [kind for kind, _ in events] == ["drop.rendezvous_notes"] * 6

    go(work)
