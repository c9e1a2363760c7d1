"""A run's way out of a stage: the first error is the one that is raised."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gyre.core.errors import GyreError
from gyre.core.events import Emit
from gyre.launch.run import end_stage


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
