"""A real etcd that is killed, stopped, given older data, or away. Where leases are to end meanwhile
they are a tenth of the default, and so is the time that it is stopped; one test has both as they
are."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from etcd_process import EtcdProcess, free_ports, start_members
from gyre.core.errors import DeadlineError
from gyre.distributed.rendezvous.contract import (
    CommitRefused,
    HistoryLost,
    KeyCheck,
    KeyPut,
)
from gyre.distributed.rendezvous.leader import campaign
from gyre.distributed.rendezvous.metadata_store import MetadataStore
from gyre.distributed.rendezvous.pod_records import Superseded
from offers import registered_offer, same_offer
from rendezvous_cases import LASTING_S, SOON_S, Meeting, go, meet_at_etcd

pytestmark = pytest.mark.slow  # `make test` has the suite over a sound etcd

PREFIX = "/gyre/run/"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    process = EtcdProcess(tmp_path)
    yield process
    process.close()


def store_of(meeting: Meeting, name: str) -> MetadataStore:
    return MetadataStore(
        meeting.join(), name=name, emit=meeting.emit, lease_s=LASTING_S, deadline_s=SOON_S
    )


async def restart(etcd: EtcdProcess) -> None:
    await asyncio.to_thread(etcd.start)


@pytest.mark.parametrize("how", ["kill", "end"])
def test_a_restarted_etcd_loses_no_commit_and_a_watch_gives_each_once(etcd, how: str) -> None:
    """A count by compare-and-swap while etcd is killed, or ended, three times: every commit is
    there, once, and was seen once."""

    async def main(meeting: Meeting) -> None:
        writer, reader = meeting.join(), meeting.join()
        start = await writer.commit(KeyPut(key="n", value="0"), deadline_s=SOON_S)
        seen: list[int] = []

        async def watch() -> None:
            async with aclosing(reader.watch("n", after=start, deadline_s=SOON_S)) as changes:
                async for at in changes:
                    seen.append(int(at.changes[0].value or -1))
                    if seen[-1] == 300:
                        return

        async def count() -> None:
            revision = start
            for number in range(1, 301):
                revision = await writer.commit(
                    KeyPut(key="n", value=f"{number}"),
                    checks=[KeyCheck(key="n", revision=revision)],
                    deadline_s=SOON_S,
                )

        watching, counting = asyncio.create_task(watch()), asyncio.create_task(count())
        for number in (40, 120, 200):
            while not seen or seen[-1] < number:
                await asyncio.sleep(0.001)
                if counting.done():
                    counting.result()
            await asyncio.to_thread(getattr(etcd, how))
            await restart(etcd)
        await asyncio.gather(watching, counting)
        assert seen == list(range(1, 301))
        assert (await reader.get("n", deadline_s=SOON_S)).value == "300"
        assert meeting.kinds().count("rendezvous.watch_reopened") >= 3
        assert meeting.kinds().count("rendezvous.lost") == meeting.kinds().count("rendezvous.back")
        lost = await meeting.wait_event("rendezvous.lost")
        assert lost["reason"].startswith(etcd.url)
        assert (await meeting.wait_event("rendezvous.back"))["seconds"] > 0
        assert "rendezvous.rewound" not in meeting.kinds()

    go(meet_at_etcd([etcd.url]), main)


class LossyProxy:
    """Passes calls on to etcd, and loses the answers of the next `losses` transactions: each was
    carried out, and its caller does not know."""

    def __init__(self, etcd: EtcdProcess) -> None:
        self.losses, self.lost, self._etcd = 0, 0, etcd
        self._client = httpx2.AsyncClient(trust_env=False)

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        await self._client.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(re.search(r"content-length: (\d+)", head)[1])  # type: ignore[index]
                body = await reader.readexactly(length)
                path = head.split()[1]
                answer = await self._client.post(self._etcd.url + path, content=body)
                if path == "/v3/kv/txn" and self.losses > 0:
                    self.losses, self.lost = self.losses - 1, self.lost + 1
                    break
                about = f"HTTP/1.1 {answer.status_code} X\r\nContent-Length: {len(answer.content)}"
                writer.write(f"{about}\r\n\r\n".encode() + answer.content)
        writer.close()


def test_a_commit_whose_answer_is_lost_is_carried_out_once(etcd) -> None:
    """Four count by compare-and-swap while two of three answers are lost. None may take another's
    count for its own, nor count twice."""

    async def main(meeting: Meeting) -> None:
        proxy = LossyProxy(etcd)
        lossy = meet_at_etcd([await proxy.start()])

        async def count(one: Any) -> None:
            for _ in range(6):
                entry, is_done = await one.get("n", deadline_s=SOON_S), False
                while not is_done:
                    value, at = (int(entry.value), entry.revision) if entry else (0, 0)
                    proxy.losses = min(proxy.losses + 2, 2)
                    try:
                        revision = await one.commit(
                            KeyPut(key="n", value=f"{value + 1}"),
                            checks=[KeyCheck(key="n", revision=at)],
                            deadline_s=SOON_S,
                        )
                        is_done = True
                        assert revision > at
                    except CommitRefused as refused:
                        entry = refused.found

        try:
            await asyncio.gather(*(count(lossy.join()) for _ in range(4)))
            reader = lossy.join()
            assert (await reader.get("n", deadline_s=SOON_S)).value == "24"
            assert proxy.lost >= 24
            # one that is not checked is written once as well
            at = (await reader.list("", deadline_s=SOON_S)).revision
            proxy.losses = 2
            revision = await reader.commit(KeyPut(key="m", value="1"), deadline_s=SOON_S)
            assert revision == at + 1 and proxy.losses == 0
            assert (await reader.get("m", deadline_s=SOON_S)).revision == revision
        finally:
            for one in lossy.joined:
                await one.close()
            await proxy.close()
        keys = etcd.ctl("get", "/gyre/", "--prefix", "--keys-only").split()
        assert [key.rpartition("/")[2] for key in keys] == ["m", "n"], "no mark is left"

    go(meet_at_etcd([etcd.url]), main)


@pytest.mark.parametrize(
    ("lease_s", "stopped_s"), [(1.0, 3.0), pytest.param(10.0, 30.0, marks=pytest.mark.slow)]
)
def test_an_etcd_that_stands_still_for_three_leases(etcd, lease_s: float, stopped_s: float) -> None:
    """Calls end at their deadlines, the version at hand serves on, and the pod is whole again."""

    async def main(meeting: Meeting) -> None:
        trainer, engine = (
            MetadataStore(
                meeting.join(), name=name, emit=meeting.emit, lease_s=lease_s,
                deadline_s=SOON_S + stopped_s,
            )
            for name in ("trainer", "engine")
        )  # fmt: skip
        await trainer.join("trainer", "host/1")
        await engine.join("engine", "host/2")
        await trainer.claim_epoch(1)
        await trainer.publish_offer(registered_offer(1))
        at_hand = await engine.latest_offer()
        await engine.note_receiver(1, 1, "committed")
        etcd.stop()
        stopped_at_s = time.monotonic()
        with pytest.raises(DeadlineError, match="etcd did not answer"):
            await meeting.join().get("state/epoch", deadline_s=0.5)
        assert same_offer(at_hand, registered_offer(1))
        publishing = asyncio.create_task(trainer.publish_offer(registered_offer(2)))
        await asyncio.sleep(stopped_s - (time.monotonic() - stopped_at_s))
        etcd.go_on()
        await publishing
        assert same_offer(
            await engine.wait_offer(after=(1, 1), deadline_s=SOON_S), registered_offer(2)
        )
        assert (await meeting.wait_event("rendezvous.lost"))["reason"].startswith(etcd.url)
        assert (await meeting.wait_event("rendezvous.back"))["seconds"] > 0
        async with asyncio.timeout(SOON_S):
            while set(await trainer.members()) != {"trainer", "engine"}:
                await asyncio.sleep(0.05)
            while "engine" not in await trainer.receivers():
                await asyncio.sleep(0.05)
        assert [at.version for at in await engine.versions()] == [1, 2]
        await trainer.leave()
        await engine.leave()

    go(meet_at_etcd([etcd.url]), main)


def test_an_etcd_with_older_data_is_noticed_and_brought_up_to_date(etcd) -> None:
    async def main(meeting: Meeting) -> None:
        trainer, engine = store_of(meeting, "trainer"), store_of(meeting, "engine")
        await trainer.join("trainer", "host/1")
        await engine.join("engine", "host/2")
        await trainer.claim_epoch(3)
        await trainer.publish_offer(registered_offer(1, epoch=3))
        etcd.kill()
        older = etcd.copy_data("older")
        await restart(etcd)
        await trainer.claim_epoch(4)
        for version in (1, 2, 3):
            await trainer.publish_offer(registered_offer(version, epoch=4))
        assert same_offer(await engine.latest_offer(), registered_offer(3, epoch=4))
        await engine.note_receiver(4, 3, "committed")
        meeting.events.clear()
        etcd.kill()
        etcd.take_data(older)
        await restart(etcd)
        # whoever looks meanwhile takes nothing older
        for _ in range(5):
            found = await engine.latest_offer()
            assert found is None or same_offer(found, registered_offer(3, epoch=4))
        told = await meeting.wait_event("rendezvous.rewound")
        assert told["revision"] < told["expected"]
        assert (await meeting.wait_event("rendezvous.rewritten"))["count"] >= 1
        async with asyncio.timeout(SOON_S):
            while (await engine.latest_offer()) is None:
                await asyncio.sleep(0.02)
            while "engine" not in await trainer.receivers():
                await asyncio.sleep(0.02)
        late = store_of(meeting, "late")
        assert same_offer(await late.latest_offer(), registered_offer(3, epoch=4))
        assert (await late.receivers())["engine"].version == 3
        before = store_of(meeting, "attempt 3")
        with pytest.raises(Superseded, match="publishes under epoch 4"):
            await before.claim_epoch(3)
        await trainer.publish_offer(registered_offer(4, epoch=4))
        assert same_offer(await late.latest_offer(), registered_offer(4, epoch=4))
        await trainer.leave()
        await engine.leave()

    go(meet_at_etcd([etcd.url]), main)


def test_older_data_that_has_overtaken_is_noticed_by_what_it_lacks(etcd, tmp_path) -> None:
    """The revision is beyond what the watcher has seen, and the change that it saw is not there."""

    async def main(meeting: Meeting) -> None:
        one, other = meeting.join(), meeting.join()
        start = await one.commit(KeyPut(key="a", value="0"), deadline_s=SOON_S)
        etcd.kill()
        older = etcd.copy_data("elsewhere/data")
        await restart(etcd)
        async with aclosing(one.watch("a", after=start, deadline_s=SOON_S)) as changes:
            seen = await other.commit(KeyPut(key="a", value="1"), deadline_s=SOON_S)
            assert (await anext(changes)).changes[0].value == "1"
            etcd.kill()
            elsewhere = await asyncio.to_thread(EtcdProcess, tmp_path / "elsewhere")
            for number in range(9):
                elsewhere.ctl("put", "/other", f"{number}")
            elsewhere.close()
            etcd.take_data(older)
            await restart(etcd)
            with pytest.raises(HistoryLost, match="went back"):
                await anext(changes)
        told = await meeting.wait_event("rendezvous.rewound")
        assert told["expected"] == seen and told["revision"] > seen
        assert (await one.get("a", deadline_s=SOON_S)).value == "0"

    go(meet_at_etcd([etcd.url]), main)


def test_the_fence_of_a_leader_holds_when_etcd_goes_back(etcd) -> None:
    async def main(meeting: Meeting) -> None:
        one, other = meeting.join(), meeting.join()
        etcd.kill()
        older = etcd.copy_data("older")
        await restart(etcd)
        lease = await one.grant(600.0, deadline_s=SOON_S)
        first = await campaign(one, "publisher", "one", lease=lease, above=8, deadline_s=SOON_S)
        etcd.kill()
        etcd.take_data(older)
        await restart(etcd)
        with pytest.raises(CommitRefused):
            await one.commit(KeyPut(key="led", value="1"), checks=[first.check], deadline_s=SOON_S)
        lease = await other.grant(600.0, deadline_s=SOON_S)
        second = await campaign(
            other, "publisher", "one", lease=lease, above=first.fence, deadline_s=SOON_S
        )
        assert second.fence > first.fence
        await other.commit(KeyPut(key="led", value="2"), checks=[second.check], deadline_s=SOON_S)
        with pytest.raises(CommitRefused):
            await one.commit(KeyPut(key="led", value="1"), checks=[first.check], deadline_s=SOON_S)

    go(meet_at_etcd([etcd.url]), main)


def test_an_etcd_that_is_away_is_asked_until_the_deadline_and_found_again(etcd) -> None:
    async def main(meeting: Meeting) -> None:
        one = meeting.join()
        await one.commit(KeyPut(key="a", value="1"), deadline_s=SOON_S)
        etcd.kill()
        with pytest.raises(DeadlineError, match=r"within 0\.4 s; last: .*[Cc]onnect") as raised:
            await one.get("a", deadline_s=0.4)
        assert "endpoints" in raised.value.hint
        assert meeting.kinds() == ["rendezvous.lost"], "once, however often it is asked"
        asking = asyncio.create_task(one.get("a", deadline_s=SOON_S))
        await restart(etcd)
        assert (await asking).value == "1"
        assert meeting.kinds() == ["rendezvous.lost", "rendezvous.back"]
        with pytest.raises(DeadlineError):
            async with aclosing(one.watch("a", after=0, deadline_s=0.5)) as changes:
                await anext(changes)
                etcd.kill()
                await anext(changes)

    go(meet_at_etcd([etcd.url]), main)


def test_the_next_endpoint_is_asked_when_one_does_not_answer(etcd) -> None:
    (port,) = free_ports(1)
    dead = f"http://127.0.0.1:{port}"

    async def main(meeting: Meeting) -> None:
        one = meeting.join()
        assert await one.get("a", deadline_s=SOON_S) is None
        ((kind, fields),) = meeting.events
        assert kind == "rendezvous.failover" and fields["endpoint"] == etcd.url
        assert fields["reason"].startswith(dead)
        await one.get("a", deadline_s=SOON_S)
        assert len(meeting.events) == 1, "it stays with the one that answers"

    go(meet_at_etcd([dead, etcd.url]), main)


def test_a_cluster_of_three_loses_a_member_and_nothing_else(tmp_path) -> None:
    """Whichever member is killed, stopped or restarted, commits go on at another one; and no member
    that is behind is taken for one with older data."""
    members = start_members(tmp_path, 3)

    async def main(meeting: Meeting) -> None:
        writer, reader = meeting.join(), meeting.join()
        pod = store_of(meeting, "one")
        await pod.join("engine", "host/1")
        start = (await writer.list("", deadline_s=SOON_S)).revision
        seen: list[str | None] = []

        async def watch() -> None:
            async with aclosing(reader.watch("n", after=start, deadline_s=SOON_S)) as changes:
                async for at in changes:
                    seen.append(at.changes[0].value)
                    if seen[-1] == "40":
                        return

        watching = asyncio.create_task(watch())
        for number in range(1, 41):
            if number == 10:
                members[0].kill()
            elif number == 20:
                await restart(members[0])
                members[1].stop()
            elif number == 30:
                members[1].go_on()
                members[2].kill()
            await writer.commit(KeyPut(key="n", value=f"{number}"), deadline_s=SOON_S)
        await watching
        assert seen == [f"{number}" for number in range(1, 41)]
        async with asyncio.timeout(
            SOON_S
        ):  # its lease may have ended, at a member that stood still
            while set(await pod.members()) != {"one"}:
                await asyncio.sleep(0.05)
        assert "rendezvous.failover" in meeting.kinds()
        assert "rendezvous.rewound" not in meeting.kinds()
        await pod.leave()

    try:
        go(meet_at_etcd([member.url for member in members]), main)
    finally:
        for member in members:
            member.close()
