"""The state machine of a rendezvous: whole commits, revisions that grow, changes that rebuild the
entries from any revision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.distributed.rendezvous import table as tables
from gyre.distributed.rendezvous.contract import (
    HistoryLost,
    KeyAction,
    KeyCheck,
    KeyDelete,
    KeyPut,
    Lease,
)
from gyre.distributed.rendezvous.table import KeyTable

KEYS = st.sampled_from(["a", "a/b", "b", "c"])
LEASES = {number: Lease(id=number, ttl_s=1.0) for number in (1, 2)}
PUTS = st.builds(
    KeyPut, key=KEYS, value=st.sampled_from("xyz"), lease=st.sampled_from([None, *LEASES.values()])
)
COMMITS = st.tuples(
    st.lists(PUTS | st.builds(KeyDelete, key=KEYS), max_size=3, unique_by=lambda at: at.key),
    st.lists(
        st.builds(KeyCheck, key=KEYS, revision=st.none() | st.integers(0, 6), value=st.none() | st.sampled_from("xyz")),
        max_size=2,
    ),
)  # fmt: skip
STEPS = st.lists(COMMITS | st.sampled_from([1, 2]), max_size=20)


def play(steps) -> tuple[KeyTable, list[dict[str, str]]]:
    """The table after all steps, and its values after each revision."""
    table = KeyTable()
    for lease in LEASES.values():
        table.grant(lease)
    values: list[dict[str, str]] = [{}]
    for step in steps:
        before = table.revision
        if isinstance(step, int):
            table.end(step)
        else:
            table.commit(*step)
        assert table.revision - before in (0, 1)
        now = {key: entry.value for key, entry in table.entries.items()}
        if table.revision > before:
            values.append(now)
        assert now == values[table.revision], "nothing changes without a revision"
    return table, values


@given(STEPS, st.data())
def test_the_changes_after_a_revision_lead_to_what_is_there(steps, data) -> None:
    table, values = play(steps)
    after = data.draw(st.integers(0, table.revision))
    rebuilt, seen = dict(values[after]), after
    for changes in table.changes("", after):
        assert changes.revision > seen
        seen = changes.revision
        for change in changes.changes:
            if change.value is None:
                del rebuilt[change.key]
            else:
                rebuilt[change.key] = change.value
    assert rebuilt == values[-1]


@given(STEPS, COMMITS)
def test_a_commit_writes_all_or_nothing(steps, commit) -> None:
    table, _ = play(steps)
    before = dict(table.entries)
    actions: list[KeyAction]
    actions, checks = commit
    held = all(check.holds(before.get(check.key)) for check in checks)
    ended = [
        at.lease
        for at in actions
        if isinstance(at, KeyPut) and at.lease and at.lease.id not in table.leases
    ]
    result = table.commit(actions, checks)
    assert (result.refused is None) == held
    if not held:
        assert result.refused in checks and result.found == before.get(result.refused.key)
    if not held or ended:
        assert table.entries == before and result.revision == 0
        return
    for action in actions:
        entry = table.entries.get(action.key)
        if isinstance(action, KeyDelete):
            assert entry is None
        else:
            assert entry is not None and entry.revision == result.revision == table.revision
            assert (entry.value, entry.lease_id) == (
                action.value,
                action.lease.id if action.lease else 0,
            )


@given(STEPS)
def test_keys_of_a_lease_that_has_ended_are_gone_and_no_others(steps) -> None:
    table, _ = play(steps)
    for lease in LEASES:
        expected = {key for key, entry in table.entries.items() if entry.lease_id != lease}
        table.end(lease)
        assert set(table.entries) == expected


@given(STEPS)
def test_two_that_apply_the_same_steps_agree(steps) -> None:
    one, other = play(steps)[0], play(steps)[0]
    assert one == other


def test_changes_that_are_forgotten_are_not_left_out_in_silence(monkeypatch) -> None:
    monkeypatch.setattr(tables, "MOST_CHANGES", 3)
    table = KeyTable()
    for number in range(5):
        table.commit([KeyPut(key="a", value=f"{number}")], [])
    assert [changes.revision for changes in table.changes("a", 2)] == [3, 4, 5]
    with pytest.raises(HistoryLost, match="up to 2 were compacted"):
        [*table.changes("a", 1)]
    with pytest.raises(HistoryLost, match="is at revision 5"):
        [*table.changes("a", 6)]
