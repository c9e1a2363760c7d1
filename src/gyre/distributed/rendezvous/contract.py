"""Rendezvous: short texts by key that every process of a run sees in one order. In: checked commits
under the run's keys. Out: entries with revisions, changes in their order, leases. No torch here.

A commit is whole or refused, and takes one revision. Reads are linearizable: they see every commit
that was answered before they began. A key with a lease goes when the lease ends. Suite:
tests/contracts/test_rendezvous.py.

A call retries until its deadline, then raises DeadlineError. Training decides what follows: the
last good version serves on, since a rendezvous holds addresses and never weights.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from gyre.core.errors import RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """A key as it is now."""

    key: str
    value: str
    revision: int  # of the commit that wrote it
    lease_id: int = 0  # 0: it stays until it is deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyListing:
    """The entries under a prefix, by key, as they were at one revision."""

    entries: tuple[KeyEntry, ...]
    revision: int  # watch from here to miss nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """What one commit, or the end of a lease, did to a key."""

    key: str
    value: str | None  # None: deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChanges:
    """All that one revision changed under a watched prefix."""

    revision: int
    changes: tuple[KeyChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A promise to be alive. Unless it is kept alive within `ttl_s`, its keys are deleted."""

    id: int
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPut:
    """Write a key."""

    key: str
    value: str
    lease: Lease | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDelete:
    """Delete a key; one that is not there is fine."""

    key: str


KeyAction = KeyPut | KeyDelete


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCheck:
    """What must hold for a commit. `revision` 0: the key is not there."""

    key: str
    revision: int | None = None  # None: any
    value: str | None = None  # None: any

    def holds(self, found: KeyEntry | None) -> bool:
        if self.revision is not None and self.revision != (found.revision if found else 0):
            return False
        return self.value is None or (found is not None and found.value == self.value)


class CommitRefused(RankError):
    """A check did not hold, so nothing was written. `found` is what the key held instead."""

    def __init__(self, check: KeyCheck, found: KeyEntry | None) -> None:
        what = "is not there" if found is None else f"is at revision {found.revision}"
        super().__init__(
            f"rendezvous key '{check.key}' {what}, and the commit needs {describe(check)}",
            hint="another process has written it since; read it again",
        )
        self.check = check
        self.found = found


class LeaseLost(RankError):
    """The lease has ended, and its keys with it."""

    def __init__(self, lease: Lease) -> None:
        super().__init__(
            f"lease {lease.id:x} of {lease.ttl_s:g} s has ended at the rendezvous",
            hint="this process was too long without a sign of life; join again",
        )
        self.lease = lease


class HistoryLost(RankError):
    """Changes after a revision can't be had: they were compacted, or the store went back to older
    data. List again, and watch from there."""

    def __init__(self, after: int, reason: str, *, went_back: bool) -> None:
        super().__init__(
            f"the rendezvous has no changes after revision {after}: {reason}",
            hint="list the keys again; whoever owns a record writes it again",
        )
        self.after = after
        self.reason = reason
        self.went_back = went_back


class Rendezvous(Protocol):
    """Keys of one run. Every call raises DeadlineError when the store can't be reached in time.
    Such a commit may be carried out still, once, but not after a later one of this process."""

    async def get(self, key: str, *, deadline_s: float) -> KeyEntry | None: ...

    async def list(self, prefix: str, *, deadline_s: float) -> KeyListing: ...

    async def commit(
        self, *actions: KeyAction, checks: Sequence[KeyCheck] = (), deadline_s: float
    ) -> int:
        """Write keys, each at most once, if all checks hold; return the revision. CommitRefused,
        with nothing written, if one does not; LeaseLost if a lease has ended."""
        ...

    async def grant(self, ttl_s: float, *, deadline_s: float) -> Lease:
        """Grant a lease. A store may round `ttl_s` up."""
        ...

    async def keep_alive(self, lease: Lease, *, deadline_s: float) -> None:
        """Show a sign of life. LeaseLost if the lease has ended already."""
        ...

    async def revoke(self, lease: Lease, *, deadline_s: float) -> None:
        """End a lease with its keys. One that has ended is fine."""
        ...

    def watch(
        self, prefix: str, *, after: int, deadline_s: float
    ) -> AsyncGenerator[KeyChanges, None]:
        """Yield each revision after `after` that changed keys under the prefix, in order, once.
        HistoryLost if some can't be had. `deadline_s` is how long the store may be away. Close it
        with contextlib.aclosing."""
        ...

    async def close(self) -> None:
        """Give up this process's connection. Leases end by themselves."""
        ...


def describe(check: KeyCheck) -> str:
    """Return what a check needs, for a message."""
    if check.revision == 0:
        return "it absent"
    parts = [f"revision {check.revision}"] if check.revision is not None else []
    parts += ["the value of its writer"] if check.value is not None else []
    return " and ".join(parts) or "anything"
