"""Trace context: which trace a piece of work belongs to, by W3C's Trace Context. In: the header
traceparent. Out: a TraceContext, or None where the header is malformed, as the specification says.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

LOW_BITS = (1 << 64) - 1  # of a trace id, which decide whether it is recorded
MOST_STATE_CHARS = 512  # of tracestate, that must be passed on; a longer one is dropped
# a later version may have more after the flags
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A trace, and the span within it that is the parent of what follows."""

    trace_id: int  # of 128 bits, not 0
    parent_id: int | None  # span of the caller, of 64 bits; None: the trace begins here
    is_sampled: bool = True  # the caller records the trace
    state: str = ""  # tracestate, as it came

    @property
    def trace_hex(self) -> str:
        return f"{self.trace_id:032x}"


def read_traceparent(headers: Sequence[str], states: Sequence[str] = ()) -> TraceContext | None:
    """Return the caller's context. None where there is not exactly one well-formed header: a trace
    begins anew. `states` are the headers tracestate. Pure."""
    if len(headers) != 1 or (found := _TRACEPARENT.fullmatch(headers[0].strip(" \t"))) is None:
        return None
    version, trace, parent, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if not int(trace, 16) or not int(parent, 16):
        return None
    state = ",".join(states)
    return TraceContext(
        trace_id=int(trace, 16),
        parent_id=int(parent, 16),
        is_sampled=bool(int(flags, 16) & 1),
        state=state if len(state) <= MOST_STATE_CHARS else "",
    )


def begin_trace(ratio: float = 1.0) -> TraceContext:
    """Return the context of a new trace. A share of `ratio` is recorded."""
    trace_id = new_id(128)
    return TraceContext(trace_id=trace_id, parent_id=None, is_sampled=is_chosen(trace_id, ratio))


def is_chosen(trace_id: int, ratio: float) -> bool:
    """Return whether a trace is recorded, by its id, as OpenTelemetry's samplers decide. Services
    with the same ratio record the same traces. Pure."""
    return (trace_id & LOW_BITS) < round(ratio * (LOW_BITS + 1))


def new_id(bits: int) -> int:
    """Return a random id. Never 0, which stands for none."""
    return secrets.randbits(bits) or 1
