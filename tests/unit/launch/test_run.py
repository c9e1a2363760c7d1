"""A run's way into a stage and out of it: records are read beside the loop, and the first error is
the one that is raised."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gyre.core.errors import GyreError
from gyre.core.events import Emit
from gyre.launch import run
from gyre.launch.run import Run, end_stage


class Broken:
    """A placement whose background save failed."""

    async def end(self, *, failed: bool, last: bool) -> None:
        raise GyreError("the snapshot of step 3 is not written: no space left", hint="free some")


def test_a_failure_while_a_failed_stage_is_closed_is_told_and_not_raised() -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    placement: Any = Broken()
    emit: Emit = lambda kind, **fields: events.append((kind, fields))  # noqa: E731
    asyncio.run(end_stage(placement, emit, failed=True, last=False))
    ((kind, fields),) = events
    assert kind == "warn.stage_not_closed" and "no space left" in fields["error"]


def test_a_failure_while_a_good_stage_is_closed_is_raised() -> None:
    placement: Any = Broken()
    with pytest.raises(GyreError, match="no space left"):
        asyncio.run(end_stage(placement, lambda kind, **fields: None, failed=False, last=True))


def test_the_loop_goes_on_while_records_are_read(monkeypatch) -> None:
    went_on = threading.Event()

    def load(config: object, stage: object, tokenizer: object, context: int, emit: Emit) -> str:
        assert went_on.wait(30.0), "the loop stands still"
        return f"records of {stage} for {context} tokens"

    monkeypatch.setattr(run, "load_stage_data", load)
    given: Any = SimpleNamespace(
        _config=SimpleNamespace(rewards=SimpleNamespace(model_part=lambda: None)),
        _emit=None,
        _plan=lambda stage, policy, data: SimpleNamespace(kv_pages=0),
    )
    policy: Any = SimpleNamespace(tokenizer=None, spec=SimpleNamespace(context_tokens=64))
    stage: Any = "main"

    async def prepare() -> Any:
        asyncio.get_running_loop().call_later(0.01, went_on.set)
        return await Run._prepare(given, stage, policy)

    assert asyncio.run(prepare()).data == "records of main for 64 tokens"
