"""Checksum: a multilinear sum over the numbers of a tensor. In: a run of a tensor, and its place
there. Out: a sum modulo 2^64. The sums of runs that tile a tensor add up to the tensor's.

A number's bits are a word of at most 32 bits (8 bytes are two words). Word i of the whole row-major
tensor has the weight T(i % 1024) · M(i // 1024), both fixed, random and odd; the checksum is
Σ weight_i · word_i. So it depends on what is where, and not on how the tensor is cut. It needs one
pass at about the speed of memory: in C on a CPU, in Triton on a GPU. The plain form in torch, equal
to the bit, is slower.

It always detects one changed number. Other changes, swaps and moves can stay unseen. Over weights
drawn at random the probability is at most 2^-41 for words of 16 bits and 2^-25 for 32. The family
is multilinear (Carter and Wegman 1979; Lemire and Kaser, "Strongly universal string hashing is
fast"). It loses a bit of the sum for each trailing zero bit of a difference. The weights are
public: it detects faults of memory, software and networks, and is no cryptographic hash.
"""

# N numbers of the run, W words, B blocks, R runs

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.cpu.library import CHECKSUM_WORDS, ChecksumLibrary, load_checksum
from gyre.kernels.dispatch import has_triton

if TYPE_CHECKING:
    from gyre.kernels.gpu.checksum import WordRun

BLOCK_WORDS = 1024  # that one weight M covers; the C and Triton forms have the same
PIECE_WORDS = 1 << 18  # of the torch form
ALL_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SummedRun:
    """A contiguous run of a tensor. `start`: its first number in the tensor, or in `columns` of one
    with `num_columns`."""

    values_N: Tensor
    start: int = 0
    columns: tuple[int, int] | None = None
    num_columns: int = 0

    def words(self) -> WordRun:
        """Return its words and their place."""
        values_N = self.values_N
        assert values_N.is_contiguous() and values_N.dim() == 1
        size_bytes = values_N.element_size()
        words = max(1, size_bytes // 4)  # of a number
        words_W = values_N.detach().view(CHECKSUM_WORDS[size_bytes // words])
        left, right = self.columns or (0, self.start + len(values_N))
        columns = right if self.columns is None else self.num_columns
        return words_W, self.start * words, left * words, (right - left) * words, columns * words


def checksum(values_N: Tensor) -> Tensor:
    """Return the sum of a whole tensor, flat, as an int64 scalar on its device."""
    return checksums([SummedRun(values_N=values_N)])[0]


def checksums(runs: Sequence[SummedRun]) -> Tensor:
    """Return the sum of each run, R of int64 on their device, without waiting for it."""
    device = runs[0].values_N.device
    if not has_triton(device):
        return torch.stack([_sum(*run.words()) for run in runs])
    from gyre.kernels.gpu.checksum import sum_runs  # imports Triton

    words = [run.words() for run in runs]
    sums_R = torch.zeros(len(runs), dtype=torch.int64, device=device)
    for dtype in {one[0].dtype for one in words}:
        sum_runs(
            sums_R,
            {at: one for at, one in enumerate(words) if one[0].dtype == dtype},
            weights_T(device),
        )
    return sums_R


def _sum(words_W: Tensor, start: int, left: int, width: int, columns: int) -> Tensor:
    place = start, left, width, columns
    if words_W.device.type == "cpu" and not isinstance(library := _library(), Unavailable):
        return torch.tensor(library.sum_words(words_W, *place, weights_T(words_W.device)))
    return sum_words_plainly(words_W, *place)


def as_hex(total: int) -> str:
    """Return the 16 digits of a sum."""
    return f"{total & ALL_BITS:016x}"


def sum_words_plainly(words_W: Tensor, start: int, left: int, width: int, columns: int) -> Tensor:
    """Sum in torch operations, in pieces: the oracle of the other two forms."""
    device = words_W.device
    table_T = weights_T(device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    bits = (1 << 8 * words_W.element_size()) - 1
    for first in range(0, len(words_W), PIECE_WORDS):
        piece_W = words_W[first : first + PIECE_WORDS].to(torch.int64) & bits
        at_W = torch.arange(start + first, start + first + len(piece_W), device=device)
        whole_W = at_W // width * columns + left + at_W % width
        low = int(whole_W[0]) // BLOCK_WORDS
        blocks_B = torch.arange(low, int(whole_W[-1]) // BLOCK_WORDS + 1, device=device)
        weight_W = table_T[whole_W % BLOCK_WORDS] * _mix(blocks_B)[whole_W // BLOCK_WORDS - low]
        total += (weight_W * piece_W).sum()
    return total


@functools.cache
def weights_T(device: torch.device) -> Tensor:
    """Return the weights T of the words of a block."""
    return _mix(torch.arange(-BLOCK_WORDS, 0)).to(device)


def _mix(index: Tensor) -> Tensor:
    """Return odd pseudo-random numbers: the finalizer of SplitMix64, in wrapping arithmetic."""
    mixed = index * -0x61C8864680B583EB
    mixed = (mixed ^ _shift(mixed, 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ _shift(mixed, 27)) * -0x6B2FB644ECCEEE15
    return mixed ^ _shift(mixed, 31) | 1


def _shift(number: Tensor, bits: int) -> Tensor:
    """Shift right without the sign."""
    return (number >> bits) & ((1 << (64 - bits)) - 1)


@functools.cache
def _library() -> ChecksumLibrary | Unavailable:
    return load_checksum()
