"""A rendezvous over a TCPStore: its log is trimmed, and its holder may stop or die."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from etcd_process import stop_process
from gyre.core.errors import DeadlineError
from gyre.distributed.init import hold_store
from gyre.distributed.rendezvous import tcp_store
from gyre.distributed.rendezvous.contract import HistoryLost, KeyPut
from rendezvous_cases import LEASE_S, SOON_S, Meeting, go, meet_at_store

HOLDER = """
import sys
from gyre.distributed.init import hold_store
store = hold_store()
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait(20)


def test_a_trimmed_log_gives_the_same_to_all(monkeypatch) -> None:
    """One that joins late starts from a snapshot; one that was away goes on from it; one that was
    there all the time has seen every change."""
    monkeypatch.setattr(tcp_store, "TRIM_EVERY", 8)
    held = hold_store()

    async def main(meeting: Meeting) -> None:
        writer, reader, away = meeting.join(), meeting.join(), meeting.join()
        lease = await writer.grant(600.0, deadline_s=SOON_S)
        await writer.commit(KeyPut(key="leased", value="1", lease=lease), deadline_s=SOON_S)
        at = (await away.list("", deadline_s=SOON_S)).revision
        await away.close()  # it follows no more

        seen: list[str | None] = []

        async def write() -> None:
            for number in range(50):
                while number > len(seen) + 4:  # a reader that is further behind loses changes
                    await asyncio.sleep(0.01)
                await writer.commit(
                    KeyPut(key=f"{number % 3}", value=f"{number}"), deadline_s=SOON_S
                )

        writing = asyncio.create_task(write())
        async with aclosing(reader.watch("", after=at, deadline_s=SOON_S)) as changes:
            while len(seen) < 50:
                seen.append((await anext(changes)).changes[0].value)
        await writing
        assert seen == [f"{number}" for number in range(50)]
        late = meeting.join()
        listings = [await one.list("", deadline_s=SOON_S) for one in (writer, reader, late)]
        assert listings[0] == listings[1] == listings[2]
        assert [entry.key for entry in listings[0].entries] == ["0", "1", "2", "leased"]
        with pytest.raises(HistoryLost, match="were compacted"):
            async with aclosing(late.watch("", after=at, deadline_s=SOON_S)) as changes:
                await anext(changes)
        await late.keep_alive(lease, deadline_s=SOON_S)
        await late.revoke(lease, deadline_s=SOON_S)
        assert await reader.get("leased", deadline_s=SOON_S) is None
        assert held.num_keys() < 50 + 10, "entries become marks, and old snapshots go"

    go(meet_at_store(held.port), main)


def test_a_holder_that_stops_is_waited_for_until_the_deadline(holder) -> None:
    process, port = holder

    async def main(meeting: Meeting) -> None:
        one, other = meeting.join(), meeting.join()
        lease = await one.grant(LEASE_S, deadline_s=SOON_S)
        await one.commit(KeyPut(key="a", value="1", lease=lease), deadline_s=SOON_S)
        assert await other.get("a", deadline_s=SOON_S) is not None
        stop_process(process)
        with pytest.raises(
            DeadlineError, match=r"holds the rendezvous did not answer within 0\.5 s"
        ):
            await one.get("a", deadline_s=0.5)
        await asyncio.sleep(2 * LEASE_S)
        process.send_signal(signal.SIGCONT)
        await one.keep_alive(lease, deadline_s=SOON_S)
        assert (await other.get("a", deadline_s=SOON_S)).value == "1", "nobody could look meanwhile"
        assert meeting.kinds() == ["rendezvous.lost", "rendezvous.back"]

    go(meet_at_store(port), main)


def test_a_holder_that_dies_ends_calls_and_watches(holder) -> None:
    process, port = holder

    async def main(meeting: Meeting) -> None:
        one = meeting.join()
        at = await one.commit(KeyPut(key="a", value="1"), deadline_s=SOON_S)
        watching = asyncio.create_task(
            anext(one.watch("a", after=at, deadline_s=SOON_S))  # type: ignore[arg-type]
        )
        await asyncio.sleep(0.1)
        process.kill()
        with pytest.raises(DeadlineError, match="is gone"):
            await watching
        with pytest.raises(DeadlineError, match="is gone"):
            await one.get("a", deadline_s=SOON_S)
        assert meeting.kinds() == ["rendezvous.lost"], "once"

    go(meet_at_store(port), main)
