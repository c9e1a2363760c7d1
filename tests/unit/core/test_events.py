"""The event schema: what the code emits and what the schema names are the same."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

from gyre.cluster.worker.server import Context
from gyre.core.events import ANYWHERE, EVENTS, FIELDS, check_event
from gyre.observability.events import EventLog
from reference_pages import DOCS, GROUPS, PAGES, all_emits, emitters


def test_every_kind_and_field_that_the_code_emits_is_in_the_schema() -> None:
    for call in all_emits():
        kinds = [kind for kind in EVENTS if fnmatchcase(kind, call.kind)]
        assert kinds, f"{call.module}:{call.line}: {call.kind} is not in core/events.py"
        if "*" not in call.kind:
            event, where = EVENTS[call.kind], f"{call.module}:{call.line}: {call.kind}"
            assert call.fields <= event.allowed, f"{where}: {sorted(call.fields - event.allowed)}"
            missing = event.required - call.fields
            assert not (call.is_whole and missing), f"{where}: {sorted(missing)} missing"


def test_every_kind_of_the_schema_is_emitted_and_has_a_place_on_the_page() -> None:
    assert [kind for kind, modules in emitters(all_emits()).items() if not modules] == []
    prefixes = [prefix for _, prefixes in GROUPS for prefix in prefixes]
    assert {kind.split(".")[0] for kind in EVENTS} == set(prefixes)
    assert len(prefixes) == len(set(prefixes))


def test_every_shared_field_is_used_and_no_own_field_is_forgotten() -> None:
    shared = {name for event in EVENTS.values() for name in event.fields() if name not in event.own}
    assert shared | ANYWHERE == set(FIELDS)
    for kind, event in EVENTS.items():
        assert set(event.own) <= set(event.fields()), kind


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("engine.invented", {}),
        ("run.done", {"step": 1, "version": 1, "evals": {}}),
        ("handover.engine_terminated", {"step": 1, "why": "memory"}),
    ],
)
def test_an_unknown_kind_a_missing_field_and_an_unknown_field_are_refused(
    kind: str, fields: dict[str, Any], tmp_path: Any
) -> None:
    log = EventLog(tmp_path / "events.jsonl", attempt=1)
    for emit in (log.emit, Context("worker-0").emit):
        with pytest.raises(AssertionError, match=kind):
            emit(kind, **fields)
    assert (tmp_path / "events.jsonl").read_bytes() == b""


def test_a_worker_may_add_its_name_and_a_row_its_own_count() -> None:
    check_event("snapshot.copied", ["step", "seconds", "worker"])
    check_event("trainer.attention_kernel", ["kernel", "reason", "counted"])


@pytest.mark.parametrize("name", PAGES)
def test_reference_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"
