"""Requests for stretches of a part: read as they were written, and refused unless they are a
bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.weights.transports.device.control import (
    FILL,
    REQUEST_BYTES,
    STRETCH_BYTES,
    ControlRequest,
    count_stretches,
    pack_request,
    unpack_request,
)
from gyre.weights.transports.device.reader_connection import can_fill
from gyre.weights.transports.part_range import PartRange, bucket_size, cut_stretches

LINES = st.integers(0, 1 << 20).map(lambda line: 64 * line)


@st.composite
def buckets(draw) -> tuple[PartRange, ...]:
    """Stretches at lines of 64 bytes, one behind the other."""
    stretches, at = [], 0
    for start, size_bytes in draw(st.lists(st.tuples(LINES, st.integers(1, 500)), min_size=1)):
        rows = {"row_bytes": 64, "pitch_bytes": 192} if size_bytes % 192 == 64 else {}
        stretches.append(PartRange(start=start, stop=start + size_bytes, at=at, **rows))
        at = -(-stretches[-1].end // 64) * 64
    return tuple(stretches)


@given(buckets())
def test_a_request_is_read_as_it_was_written(stretches):
    request = ControlRequest(op=FILL, epoch=3, version=7, first=1, stretches=stretches)
    data = pack_request(request)
    assert count_stretches(data[:REQUEST_BYTES]) == len(stretches)
    assert len(data) == REQUEST_BYTES + STRETCH_BYTES * len(stretches)
    assert unpack_request(data) == request


@given(buckets(), st.integers(1, 20).map(lambda lines: 64 * lines))
def test_a_bucket_is_cut_into_buckets_of_the_same_bytes(stretches, most_bytes):
    found: dict[int, int] = {}  # byte of the whole bucket → byte of the part
    for base, cut in cut_stretches(stretches, most_bytes):
        assert can_fill(cut, most_bytes, max(one.stop for one in stretches))
        for one in (row for stretch in cut for row in stretch.rows()):
            places = range(base + one.at, base + one.end)
            found |= dict(zip(places, range(one.start, one.stop), strict=True))
    assert found == {
        one.at + offset: one.start + offset
        for stretch in stretches
        for one in stretch.rows()
        for offset in range(one.stop - one.start)
    }


@given(buckets())
def test_what_fits_is_a_bucket(stretches):
    size_bytes, part_bytes = bucket_size(stretches), max(one.stop for one in stretches)
    assert size_bytes == max(one.end for one in stretches)
    assert can_fill(stretches, size_bytes, part_bytes)
    assert not can_fill(stretches, size_bytes - 1, part_bytes)
    assert not can_fill(stretches, size_bytes, part_bytes - 1)


ONE, NEXT = PartRange(start=64, stop=200, at=0), PartRange(start=640, stop=704, at=192)


@pytest.mark.parametrize(
    "wrong",
    [
        (),
        (NEXT, ONE),
        (ONE, replace(NEXT, at=128)),
        (ONE, replace(NEXT, start=650)),
        (ONE, replace(NEXT, at=200)),
        (ONE, replace(NEXT, stop=640)),
        (ONE, replace(NEXT, stop=705)),
        (ONE, replace(NEXT, row_bytes=64)),
    ],
    ids=[
        "none",
        "in no order",
        "over each other",
        "not from a line",
        "not to a line",
        "empty",
        "past the part",
        "rows that stand still",
    ],
)
def test_anything_else_is_none(wrong):
    assert can_fill((ONE, NEXT), 1 << 20, 704)
    assert not can_fill(wrong, 1 << 20, 704)
