"""Span queue: spans that have ended, until a thread has sent them. In: those of a trace at a time.
Out: batches to a sender; what is lost on the way is counted, with an event.

Offering spans never waits and never fails.

    offer ──▶ bounded queue ──▶ thread ──▶ sender ──▶ collector
                  │ full                     │ not taken
                  └───────▶ drop.spans ◀─────┘
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gyre.core.events import Emit
from gyre.observability.tracing.span_record import SpanRecord

QUEUE_FULL, NOT_TAKEN, TOO_LATE = "queue_full", "not_taken", "shutdown"
DROP_REASONS = (QUEUE_FULL, NOT_TAKEN, TOO_LATE)


class SpanSender(Protocol):
    """Where batches go."""

    def send(self, spans: Sequence[SpanRecord]) -> str | None:
        """Return why the batch was not taken, or None, by a deadline of its own."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanCount:
    """Spans that were sent, or dropped for a reason."""

    number: int
    dropped: str | None  # a DROP_REASON; None: the collector has them


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    most_spans: int = 16384  # held at once; a trace that does not fit is dropped whole
    # sent together at most; as many are sent at once. Encoding them holds the interpreter lock
    batch_spans: int = 128
    interval_s: float = 1.0  # that a span waits at most while the collector answers
    report_s: float = 60.0  # between two events about spans that were dropped


class SpanQueue:
    """A bounded queue with a thread of its own. `count` is called from that thread and from those
    that offer."""

    def __init__(
        self,
        sender: SpanSender,
        *,
        emit: Emit,
        count: Callable[[SpanCount], None] = lambda told: None,
        settings: QueueSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sender = sender
        self._emit = emit
        self._count = count
        self._clock = clock
        self._settings = settings or QueueSettings()
        self._spans: deque[SpanRecord] = deque()
        self._num_in_hand = 0  # spans of the batch that is being sent
        self._untold: Counter[str] = Counter()  # dropped spans, by reason
        self._error = ""  # of the newest batch that was not taken
        self._told_s: float | None = None
        self._is_closing = self._is_closed = False
        self._changed = threading.Condition()
        # a daemon: a collector that does not answer keeps no process from its end
        self._thread = threading.Thread(target=self._run, name="gyre-spans", daemon=True)
        self._thread.start()

    def offer(self, spans: Sequence[SpanRecord]) -> None:
        """Take the spans of a trace, or drop them all where they do not fit."""
        with self._changed:
            room = self._settings.most_spans - len(self._spans)
            if self._is_closed or len(spans) > room:
                self._drop(len(spans), TOO_LATE if self._is_closed else QUEUE_FULL)
                return
            self._spans.extend(spans)
            if len(self._spans) >= self._settings.batch_spans:
                self._changed.notify()

    def close(self, deadline_s: float) -> None:
        """Send what is there, by the deadline; the rest is dropped."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(deadline_s)
        with self._changed:
            self._is_closed = True
            self._drop(len(self._spans) + self._num_in_hand, TOO_LATE)
            self._spans.clear()
            self._num_in_hand = 0
        self._sender.close()
        self._report(is_last=True)

    def _run(self) -> None:
        while True:
            batch = self._take_batch()
            if batch:
                self._send(batch)
            if self._is_closed:
                return  # what was in hand has been counted, and the last report sent
            self._report()
            if not batch and self._is_closing:
                return

    def _take_batch(self) -> list[SpanRecord]:
        """Wait for a full batch, the interval, or the end."""
        most = self._settings.batch_spans
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closing or len(self._spans) >= most, self._settings.interval_s
            )
            batch = [self._spans.popleft() for _ in range(min(most, len(self._spans)))]
            self._num_in_hand = len(batch)
            return batch

    def _send(self, batch: Sequence[SpanRecord]) -> None:
        try:
            reason = self._sender.send(batch)
        except Exception as error:  # noqa: BLE001
            # nothing that a sender raises may end the thread: later spans would be lost unseen
            reason = f"{type(error).__name__}: {error}"
        with self._changed:
            if self._is_closed:
                return
            self._num_in_hand = 0
            if reason is None:
                self._count(SpanCount(number=len(batch), dropped=None))
                return
            self._error = reason
            self._drop(len(batch), NOT_TAKEN)

    def _drop(self, number: int, reason: str) -> None:
        """Count dropped spans. The caller holds the lock."""
        if number:
            self._untold[reason] += number
            self._count(SpanCount(number=number, dropped=reason))

    def _report(self, *, is_last: bool = False) -> None:
        """Emit what was dropped since the last report: the first at once, others together."""
        with self._changed:
            now_s = self._clock()
            waits = self._told_s is not None and now_s - self._told_s < self._settings.report_s
            if not self._untold or (waits and not is_last):
                return
            untold, self._untold, self._told_s = self._untold, Counter(), now_s
            error, self._error = self._error, ""
        for reason, number in sorted(untold.items()):
            self._emit(
                "drop.spans",
                reason=reason,
                count=number,
                error=error if reason == NOT_TAKEN else "",
            )
