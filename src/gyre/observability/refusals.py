"""Refusals: one event per kind of refusal and turn of the event loop. In: refused requests and the
reasons. Out: `engine.refused` events with a count.

A kind is a reason without its numbers: "the queue is full: 12 completions …" and "… 13 completions
…" are one.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from gyre.core.events import Emit


@dataclass(slots=True, kw_only=True)
class _Kind:
    request_id: str  # the first one's
    reason: str
    count: int = 0


class Refusals:
    """Collects the refusals of one turn of the event loop and emits them in the next."""

    def __init__(self, emit: Emit) -> None:
        self.total = 0
        self._emit = emit
        self._kinds: dict[str, _Kind] = {}

    def note(self, request_id: str, reason: str) -> None:
        """Count a refusal. Must be called on a running event loop."""
        if not self._kinds:
            asyncio.get_running_loop().call_soon(self._tell)
        self.total += 1
        kind = self._kinds.setdefault(
            re.sub(r"\d+", "#", reason), _Kind(request_id=request_id, reason=reason)
        )
        kind.count += 1

    def _tell(self) -> None:
        kinds, self._kinds = self._kinds, {}
        for kind in kinds.values():
            self._emit(
                "engine.refused", request_id=kind.request_id, reason=kind.reason, count=kind.count
            )
