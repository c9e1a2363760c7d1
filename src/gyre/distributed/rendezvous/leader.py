"""Leader: one process at a time that may write, with a fencing number. In: a rendezvous, a name, a
lease. Out: a Leadership, whose check refuses writes once another process leads."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from gyre.core.codec import decode_json
from gyre.core.errors import DeadlineError
from gyre.distributed.rendezvous.contract import (
    CommitRefused,
    HistoryLost,
    KeyCheck,
    KeyEntry,
    KeyPut,
    Lease,
    Rendezvous,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """That a process leads, for as long as its lease. Put `check` into each commit that only the
    leader may make: it refuses when the lease has ended, whatever this process believes."""

    name: str
    holder: str
    fence: int  # greater than that of every leader before
    check: KeyCheck


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderRecord:
    """What the leader's key says."""

    holder: str
    fence: int
    lease_id: int  # no two leaders write the same text


async def campaign(
    rendezvous: Rendezvous,
    name: str,
    holder: str,
    *,
    lease: Lease,
    above: int = 0,
    deadline_s: float,
) -> Leadership:
    """Wait until no process leads, then lead. `above` is the highest fence that the caller knows: a
    store that went back to older data may know less. DeadlineError names who leads."""
    end_s = time.monotonic() + deadline_s
    leader, fence = f"leaders/{name}", f"fences/{name}"
    while (left_s := end_s - time.monotonic()) > 0:
        last = await rendezvous.get(fence, deadline_s=left_s)
        number = max(above, int(last.value) if last else 0) + 1
        record = LeaderRecord(holder=holder, fence=number, lease_id=lease.id)
        text = msgspec.json.encode(record).decode()
        checks = (
            KeyCheck(key=leader, revision=0),
            KeyCheck(key=fence, revision=last.revision if last else 0),
        )
        puts = (KeyPut(key=leader, value=text, lease=lease), KeyPut(key=fence, value=f"{number}"))
        try:
            await rendezvous.commit(*puts, checks=checks, deadline_s=left_s)
        except CommitRefused as refused:
            if refused.found is not None and refused.check.key == leader:
                await _until_free(rendezvous, name, refused.found, end_s)
            continue  # the other check: another has led meanwhile
        check = KeyCheck(key=leader, value=text)
        return Leadership(name=name, holder=holder, fence=number, check=check)
    raise _still_led(name, "others, in turn")


async def _until_free(rendezvous: Rendezvous, name: str, found: KeyEntry, end_s: float) -> None:
    """Wait until the leader's key is deleted."""
    left_s = max(0.0, end_s - time.monotonic())
    changed = rendezvous.watch(found.key, after=found.revision, deadline_s=left_s)
    try:
        async with asyncio.timeout(left_s), aclosing(changed):
            async for changes in changed:
                if any(change.value is None for change in changes.changes):
                    return
    except HistoryLost:
        return  # look at the key again
    except TimeoutError as error:
        holder = decode_json(found.value, LeaderRecord).holder
        raise _still_led(name, f"'{holder}'") from error


def _still_led(name: str, holder: str) -> DeadlineError:
    return DeadlineError(
        f"'{name}' is still led by {holder}",
        hint="end that process, or wait until its lease is over",
    )
