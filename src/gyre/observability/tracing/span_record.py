"""Spans as records: what happened between two times, and within what. In: nothing. Out: SpanRecord,
which passes from the code that measures to the code that sends.

Times are unix times in ns. Names of attributes are those of OpenTelemetry and of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

AttributeValue = str | bool | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanMark:
    """A moment within a span: OpenTelemetry's event."""

    name: str
    at_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRecord:
    """One span that has ended."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None  # None: the root of its trace
    is_parent_remote: bool = False  # the parent is of the client
    kind: Literal["server", "internal"] = "internal"
    started_ns: int
    ended_ns: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    marks: tuple[SpanMark, ...] = ()
    error: str | None = None  # why it failed; None: it did not
    trace_state: str = ""
