"""Ranges of a part: consecutive bytes and bytes of rows, in a part and in a bucket."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyre.weights.transports.part_range import PartRange, bucket_size, cut_stretches

LINES = st.integers(0, 40).map(lambda line: 64 * line)


@st.composite
def ranges(draw, at: int = 0) -> PartRange:
    start = draw(LINES)
    if draw(st.booleans()):
        return PartRange(start=start, stop=start + draw(st.integers(1, 500)), at=at)
    row_bytes, gap, rows = draw(st.integers(1, 4)) * 64, draw(LINES), draw(st.integers(1, 5))
    pitch_bytes = row_bytes + gap
    return PartRange(
        start=start,
        stop=start + (rows - 1) * pitch_bytes + row_bytes,
        at=at,
        row_bytes=row_bytes,
        pitch_bytes=pitch_bytes,
    )


@st.composite
def buckets(draw) -> tuple[PartRange, ...]:
    found, at = [], 0
    for _ in range(draw(st.integers(1, 6))):
        found.append(draw(ranges(at)))
        at = -(-found[-1].end // 64) * 64
    return tuple(found)


def numbered(size_bytes: int) -> torch.Tensor:
    return (torch.arange(size_bytes) * 7919 % 251).to(torch.uint8)


def copied(stretches: tuple[PartRange, ...], part_N: torch.Tensor, out_N: torch.Tensor) -> None:
    for one in stretches:
        one.of_bucket(out_N).copy_(one.of_part(part_N[one.start : one.stop]))


@given(buckets())
def test_a_range_is_its_rows(stretches):
    part_N = numbered(max(one.stop for one in stretches))
    by_ranges, by_rows = (torch.zeros(bucket_size(stretches), dtype=torch.uint8) for _ in range(2))
    copied(stretches, part_N, by_ranges)
    for one in stretches:
        rows = list(one.rows())
        assert len(rows) == one.num_rows and rows[-1].stop == one.stop
        assert sum(row.stop - row.start for row in rows) == one.size_bytes
        assert all(row.is_sound and not row.row_bytes for row in rows)
        copied(tuple(rows), part_N, by_rows)
    assert torch.equal(by_ranges, by_rows)


@given(buckets(), st.integers(1, 40).map(lambda lines: 64 * lines))
def test_cuts_of_a_bucket_have_its_bytes(stretches, most_bytes):
    part_N = numbered(max(one.stop for one in stretches))
    whole, joined = (torch.zeros(bucket_size(stretches), dtype=torch.uint8) for _ in range(2))
    copied(stretches, part_N, whole)
    for base, cut in cut_stretches(stretches, most_bytes):
        assert all(one.is_sound for one in cut) and bucket_size(cut) <= most_bytes
        copied(cut, part_N, joined[base : base + bucket_size(cut)])
    assert torch.equal(whole, joined)


ROWS = PartRange(start=64, stop=64 + 2 * 256 + 128, at=0, row_bytes=128, pitch_bytes=256)


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 65},
        {"at": 3},
        {"stop": 64},
        {"stop": 64 + 2 * 256 + 127},  # the last row is cut
        {"stop": 64 + 127, "pitch_bytes": 256},  # the only one is
        {"row_bytes": 100},
        {"pitch_bytes": 64},  # rows overlap
        {"pitch_bytes": 0},
        {"row_bytes": 0},  # a pitch without rows
    ],
)
def test_other_ranges_are_not_sound(wrong):
    assert ROWS.is_sound and ROWS.num_rows == 3 and ROWS.end == 3 * 128
    assert not replace(ROWS, **wrong).is_sound
