"""The queue of spans: everything that is offered is sent or counted as dropped, and nobody waits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.events import check_event
from gyre.observability.tracing.span_queue import (
    NOT_TAKEN,
    QUEUE_FULL,
    TOO_LATE,
    QueueSettings,
    SpanCount,
    SpanQueue,
)
from gyre.observability.tracing.span_record import SpanRecord

LONGEST_S = 30.0


def make_span(number: int) -> SpanRecord:
    return SpanRecord(
        name="a", trace_id=1, span_id=number, parent_id=None, started_ns=0, ended_ns=1
    )


class Sender:
    """Takes batches, refuses them by a reason, raises, or stands still until it is let go."""

    def __init__(self, *, refuses: str = "", raises: bool = False, stands: bool = False) -> None:
        self.refuses, self.raises = refuses, raises
        self.batches: list[Sequence[SpanRecord]] = []
        self.is_called, self.may_go = threading.Event(), threading.Event()
        self.is_closed = False
        if not stands:
            self.may_go.set()

    def send(self, spans: Sequence[SpanRecord]) -> str | None:
        self.is_called.set()
        assert self.may_go.wait(LONGEST_S)
        if self.raises:
            raise ConnectionError("no way")
        if not self.refuses:
            self.batches.append(spans)
        return self.refuses or None

    def close(self) -> None:
        self.is_closed = True
        self.may_go.set()


class Told:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.counts: Counter[str | None] = Counter()

    def emit(self, kind: str, /, **fields: Any) -> None:
        check_event(kind, fields)
        assert kind == "drop.spans"
        self.events.append(fields)

    def count(self, told: SpanCount) -> None:
        self.counts[told.dropped] += told.number


def make(sender: Sender, **changed: Any) -> tuple[SpanQueue, Told]:
    told = Told()
    settings = QueueSettings(**{"interval_s": 0.01, **changed})
    return SpanQueue(sender, emit=told.emit, count=told.count, settings=settings), told


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(1, 9), max_size=12), most=st.integers(1, 40))
def test_what_is_offered_is_sent_in_order_or_dropped_by_whole_traces(sizes, most) -> None:
    sender = Sender()
    queue, told = make(sender, most_spans=most, batch_spans=4)
    numbers = iter(range(1000))
    traces = [[make_span(next(numbers)) for _ in range(size)] for size in sizes]
    for trace in traces:
        queue.offer(trace)
    queue.close(LONGEST_S)
    sent = [span.span_id for batch in sender.batches for span in batch]
    whole = [trace for trace in traces if trace[0].span_id in sent]
    assert sent == [span.span_id for trace in whole for span in trace]
    assert all(len(batch) <= 4 for batch in sender.batches) and sender.is_closed
    assert told.counts[None] == len(sent)
    assert told.counts[QUEUE_FULL] == sum(sizes) - len(sent)
    assert sum(event["count"] for event in told.events) == told.counts[QUEUE_FULL]


def test_a_full_queue_drops_and_says_so_while_the_sender_stands_still() -> None:
    sender = Sender(stands=True)
    queue, told = make(sender, most_spans=3, batch_spans=2)
    queue.offer([make_span(0), make_span(1)])
    assert sender.is_called.wait(LONGEST_S)  # it has them
    queue.offer([make_span(2), make_span(3)])
    queue.offer([make_span(4), make_span(5)])  # would be four
    queue.offer([make_span(6)])
    assert told.counts == {QUEUE_FULL: 2}
    sender.may_go.set()
    queue.close(LONGEST_S)
    sent = [span.span_id for batch in sender.batches for span in batch]
    assert sent == [0, 1, 2, 3, 6]
    assert told.events == [{"reason": QUEUE_FULL, "count": 2, "error": ""}]


def test_what_is_not_taken_is_dropped_and_told_with_why() -> None:
    for sender, error in (
        (Sender(refuses="status 503"), "status 503"),
        (Sender(raises=True), "ConnectionError: no way"),
    ):
        queue, told = make(sender)
        queue.offer([make_span(0), make_span(1)])
        queue.close(LONGEST_S)
        assert told.counts == {NOT_TAKEN: 2}
        assert told.events == [{"reason": NOT_TAKEN, "count": 2, "error": error}]


def test_the_first_loss_is_told_at_once_and_others_together() -> None:
    sender = Sender(refuses="status 503")
    queue, told = make(sender, batch_spans=1)
    for number in range(5):
        queue.offer([make_span(number)])
    queue.close(LONGEST_S)
    assert 1 <= len(told.events) <= 2
    assert sum(event["count"] for event in told.events) == told.counts[NOT_TAKEN] == 5


def test_a_sender_that_does_not_answer_does_not_hold_up_the_end() -> None:
    sender = Sender(stands=True)
    queue, told = make(sender, batch_spans=1)
    queue.offer([make_span(0)])
    assert sender.is_called.wait(LONGEST_S)
    queue.offer([make_span(1), make_span(2)])
    queue.close(0.05)  # returns although the sender has not
    assert told.counts[TOO_LATE] == 3 and sender.is_closed, "that in hand too"
    queue.offer([make_span(3)])
    assert told.counts[TOO_LATE] == 4
