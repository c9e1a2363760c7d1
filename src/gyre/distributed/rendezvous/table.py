"""Key table: the state of a rendezvous as a pure state machine. In: transactions in one order. Out:
the same entries, revisions and answers wherever they are applied.

The rendezvous of one process applies to one table. Over a TCPStore each process applies the shared
log to a table of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gyre.distributed.rendezvous.contract import (
    CommitRefused,
    HistoryLost,
    KeyAction,
    KeyChange,
    KeyChanges,
    KeyCheck,
    KeyDelete,
    KeyEntry,
    KeyListing,
    KeyPut,
    Lease,
    LeaseLost,
)

MOST_CHANGES = 10_000  # revisions that a table remembers for watchers


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """What a transaction came to. `revision` is 0 where it was refused."""

    revision: int = 0
    refused: KeyCheck | None = None
    found: KeyEntry | None = None  # at the check that did not hold
    lost: Lease | None = None  # a lease that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSnapshot:
    """A table at one revision, without how it came to be."""

    revision: int
    entries: tuple[KeyEntry, ...]
    leases: dict[int, float]


@dataclass(slots=True)
class KeyTable:
    """Entries by key, live leases, and the last changes."""

    revision: int = 0
    entries: dict[str, KeyEntry] = field(default_factory=dict)
    leases: dict[int, float] = field(default_factory=dict)  # id: seconds
    history: deque[KeyChanges] = field(default_factory=deque)
    forgotten: int = 0  # the last revision whose changes are no longer remembered

    def commit(self, actions: Sequence[KeyAction], checks: Sequence[KeyCheck]) -> CommitResult:
        """Write all or nothing. Deleting what is not there takes no revision."""
        for check in checks:
            found = self.entries.get(check.key)
            if not check.holds(found):
                return CommitResult(refused=check, found=found)
        for action in actions:
            if isinstance(action, KeyPut) and action.lease and action.lease.id not in self.leases:
                return CommitResult(lost=action.lease)
        return self._write(actions)

    def snapshot(self) -> TableSnapshot:
        entries = tuple(self.entries.values())
        return TableSnapshot(revision=self.revision, entries=entries, leases=dict(self.leases))

    def load(self, snapshot: TableSnapshot) -> None:
        """Become the table of a snapshot. What led to it is forgotten."""
        self.revision = self.forgotten = snapshot.revision
        self.entries = {entry.key: entry for entry in snapshot.entries}
        self.leases, self.history = dict(snapshot.leases), deque()

    def grant(self, lease: Lease) -> None:
        assert lease.id > 0 and lease.id not in self.leases, lease
        self.leases[lease.id] = lease.ttl_s

    def end(self, lease_id: int) -> bool:
        """End a lease and delete its keys. Return whether it was alive."""
        if self.leases.pop(lease_id, None) is None:
            return False
        self._write(
            [KeyDelete(key=key) for key, at in self.entries.items() if at.lease_id == lease_id]
        )
        return True

    def list(self, prefix: str) -> KeyListing:
        entries = (self.entries[key] for key in sorted(self.entries) if key.startswith(prefix))
        return KeyListing(entries=tuple(entries), revision=self.revision)

    def changes(self, prefix: str, after: int) -> Iterator[KeyChanges]:
        """Yield what changed under a prefix since a revision. HistoryLost if it is forgotten, or is
        yet to come."""
        if after < self.forgotten:
            reason = f"those up to {self.forgotten} were compacted"
            raise HistoryLost(after, reason, went_back=False)
        if after > self.revision:
            reason = f"the store is at revision {self.revision}"
            raise HistoryLost(after, reason, went_back=True)
        for past in self.history:
            own = tuple(change for change in past.changes if change.key.startswith(prefix))
            if past.revision > after and own:
                yield KeyChanges(revision=past.revision, changes=own)

    def _write(self, actions: Sequence[KeyAction]) -> CommitResult:
        keys = [action.key for action in actions]
        assert len(keys) == len(set(keys)), f"a commit writes each key once, got {keys}"
        changes, revision = [], self.revision + 1
        for action in actions:
            if isinstance(action, KeyPut):
                self.entries[action.key] = KeyEntry(
                    key=action.key,
                    value=action.value,
                    revision=revision,
                    lease_id=action.lease.id if action.lease else 0,
                )
                changes.append(KeyChange(key=action.key, value=action.value))
            elif self.entries.pop(action.key, None) is not None:
                changes.append(KeyChange(key=action.key, value=None))
        if changes:
            self.revision = revision
            self.history.append(KeyChanges(revision=revision, changes=tuple(changes)))
            if len(self.history) > MOST_CHANGES:
                self.forgotten = self.history.popleft().revision
        return CommitResult(revision=self.revision)


def revision_of(outcome: CommitResult) -> int:
    """Return the revision of a transaction, or raise why there is none."""
    if outcome.refused is not None:
        raise CommitRefused(outcome.refused, outcome.found)
    if outcome.lost is not None:
        raise LeaseLost(outcome.lost)
    return outcome.revision
