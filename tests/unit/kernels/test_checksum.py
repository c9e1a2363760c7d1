"""Checksums: equal in C and torch, additive over any cut, and changed by what a fault changes.
tests/gpu/test_checksum_gpu.py holds the Triton form to the same sums."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gyre.kernels import checksum as module
from gyre.kernels.checksum import (
    ALL_BITS,
    BLOCK_WORDS,
    SummedRun,
    checksum,
    checksums,
    sum_words_plainly,
    weights_T,
)
from gyre.kernels.cpu.build import INSTRUCTION_SETS, Unavailable
from gyre.kernels.cpu.library import ANY_PROCESSOR, load_checksum

DTYPES = [torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


def numbers(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Of all bit patterns."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def by_hand(bits: list[int], first: int = 0) -> int:
    """The definition, in Python's integers, over words at `first` and after."""

    def mix(index: int) -> int:
        mixed = index * 0x9E3779B97F4A7C15 & ALL_BITS
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & ALL_BITS
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & ALL_BITS
        return (mixed ^ mixed >> 31) | 1

    return (
        sum(
            word * mix(at % 1024 - 1024 & ALL_BITS) * mix(at // 1024)
            for at, word in enumerate(bits, first)
        )
        & ALL_BITS
    )


@pytest.mark.parametrize(
    ("dtype", "view"),
    [
        (torch.bfloat16, torch.int16),
        (torch.float32, torch.int32),
        (torch.float64, torch.int32),
        (torch.uint8, torch.uint8),
    ],
)
def test_the_sum_is_the_definition(dtype, view):
    values_N = numbers(1500, dtype)
    mask = (1 << 8 * view.itemsize) - 1
    words = [word & mask for word in values_N.view(view).tolist()]
    assert int(checksum(values_N)) & ALL_BITS == by_hand(words)
    start = 900  # numbers
    shifted = int(checksums([SummedRun(values_N=values_N, start=start)])) & ALL_BITS
    assert shifted == by_hand(words, start * dtype.itemsize // view.itemsize)


SETS = {one.name: one for one in (*INSTRUCTION_SETS, ANY_PROCESSOR)}


@pytest.mark.parametrize("name", SETS)
@settings(deadline=None, max_examples=60)
@given(
    size_bytes=st.sampled_from([1, 2, 4]),
    count=st.integers(1, 5000),
    start=st.integers(0, 10_000),
    left=st.integers(0, 50),
    width=st.integers(1, 3000),
    beside=st.integers(0, 50),
)
def test_c_and_torch_agree(name, size_bytes, count, start, left, width, beside):
    library = load_checksum(SETS[name])
    if isinstance(library, Unavailable):
        pytest.skip(f"no library for {name}: {library.reason}")
    words_W = numbers(count, {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size_bytes])
    place = (start, left, width, left + width + beside)
    found = library.sum_words(words_W, *place, weights_T(words_W.device))
    assert found == int(sum_words_plainly(words_W, *place))


def test_without_a_compiler_the_sum_is_the_same(monkeypatch):
    values_N = numbers(300_000, torch.bfloat16)  # two pieces
    run = SummedRun(values_N=values_N, start=7)
    expected = checksums([run])
    monkeypatch.setattr(module, "_library", lambda: Unavailable(reason="no compiler"))
    assert torch.equal(checksums([run]), expected)


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 60),
    columns=st.integers(1, 90),
    cuts=st.lists(st.floats(0, 1), max_size=5),
    bands=st.lists(st.floats(0, 1), max_size=3),
)
def test_the_sums_of_any_cut_add_up_to_the_tensors(dtype, rows, columns, cuts, bands):
    whole_RC = numbers(rows * columns, dtype).view(rows, columns)
    edges = sorted({0, columns, *(round(cut * columns) for cut in bands)})
    total = 0
    for left, right in itertools.pairwise(edges):
        band_N = whole_RC[:, left:right].reshape(-1).contiguous()
        ends = sorted({0, len(band_N), *(round(cut * len(band_N)) for cut in cuts)})
        for start, stop in itertools.pairwise(ends):
            given_columns = None if (left, right) == (0, columns) else (left, right)
            run = SummedRun(
                values_N=band_N[start:stop],
                start=start,
                columns=given_columns,
                num_columns=columns,
            )
            total += int(checksums([run]))
    assert total & ALL_BITS == int(checksum(whole_RC.view(-1))) & ALL_BITS


@settings(deadline=None, max_examples=100)
@given(dtype=st.sampled_from(DTYPES), count=st.integers(1, 3000), data=st.data())
def test_one_changed_number_is_always_found(dtype, count, data):
    values_N = numbers(count, dtype)
    changed_N = values_N.clone().view(torch.uint8)
    at = data.draw(st.integers(0, len(changed_N) - 1))
    changed_N[at] ^= data.draw(st.integers(1, 255))
    assert checksum(values_N) != checksum(changed_N.view(dtype))


@settings(deadline=None, max_examples=100)
@given(dtype=st.sampled_from(DTYPES), count=st.integers(2, 3000), data=st.data())
def test_two_swapped_numbers_are_found(dtype, count, data):
    values_N = numbers(count, dtype)
    one, other = (data.draw(st.integers(0, count - 1)) for _ in "ab")
    swapped_N = values_N.clone().view(torch.uint8).view(count, dtype.itemsize)
    swapped_N[[one, other]] = swapped_N[[other, one]]
    assume(not torch.equal(swapped_N.view(-1), values_N.view(torch.uint8)))
    assert checksum(values_N) != checksum(swapped_N.view(-1).view(dtype))


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    values=st.integers(1, 40),
    zeros=st.integers(1, 2000),
    at=st.integers(0, 1),
)
def test_numbers_that_moved_among_zeros_are_found(dtype, values, zeros, at):
    """A run of zeros in front, or behind; also whole blocks that trade places."""
    full_N, empty_N = numbers(values, dtype), torch.zeros(zeros, dtype=dtype)
    assume(bool(full_N.view(torch.uint8).any()))
    assert checksum(torch.cat([full_N, empty_N])) != checksum(torch.cat([empty_N, full_N]))
    blocks = [numbers(BLOCK_WORDS, torch.bfloat16, seed) for seed in (1, 2)]
    assert checksum(torch.cat(blocks)) != checksum(torch.cat(blocks[::-1]))


@pytest.mark.parametrize("bit", [0, 7, 15, 31])
def test_a_bit_that_flips_in_two_numbers_is_found(bit):
    """The top bit counts least: a difference of it uses the lowest bits of the weights only."""
    plain_N = torch.zeros(4096, dtype=torch.int32)
    value = (1 << bit) - (1 << 32 if bit == 31 else 0)
    seen = set()
    for other in range(1, 4096):
        plain_N.zero_()
        plain_N[0] = plain_N[other] = value
        seen.add(int(checksum(plain_N)))
    assert len(seen) == 4095 and 0 not in seen
