"""Boxes: copies between runs of different columns, and local tensors read from whole ones. In: runs
with their values, a TensorSource, a ModelLayout. Out: the numbers that two runs share, copied; a
TensorSource of local tensors.
"""

# N numbers of a run, R rows, C columns

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from gyre.distributed.layout import BoxRun, ModelLayout, Rectangle
from gyre.weights.shards import Shape
from gyre.weights.tensor_source import TensorSource

BAND_NUMBERS = 1 << 22  # of whole rows that are read at a time, to cut columns from


def copy_common(
    out_N: Tensor, out: BoxRun, values_N: Tensor, found: BoxRun, *, num_columns: int
) -> int:
    """Copy the numbers of the run `found` that the run `out` of the same tensor has too. Returns
    how many."""
    copied = 0
    for home, value in common_views(out_N, out, values_N, found, num_columns=num_columns):
        copied += home.copy_(value).numel()
    return copied


def common_views(
    out_N: Tensor, out: BoxRun, values_N: Tensor, found: BoxRun, *, num_columns: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of the numbers that both runs of a tensor have, in `out_N` and in `values_N`,
    shaped alike."""
    if out.columns == found.columns:
        low, high = out.reach(found, num_columns)
        if low < high:
            yield (
                out_N[low - out.start : high - out.start],
                values_N[low - found.start : high - found.start],
            )
        return
    for into, into_at in out.rectangles(num_columns):
        for of, of_at in found.rectangles(num_columns):
            if (common := into.common(of)) is not None:
                yield _cut(out_N, into_at, into, common), _cut(values_N, of_at, of, common)


def views(whole: Tensor, run: BoxRun) -> Iterator[Tensor]:
    """Yield views of a contiguous whole tensor that are the run's numbers, in order."""
    if run.columns is None:
        yield whole.view(-1)[run.start : run.stop]
        return
    for part, _ in run.rectangles(whole.shape[1]):
        yield whole[part.row : part.end_row, part.left : part.right]


def _cut(values_N: Tensor, at: int, held: Rectangle, wanted: Rectangle) -> Tensor:
    """Return the wanted part of the rectangle whose numbers begin at `at`."""
    shape = (held.end_row - held.row, held.right - held.left)
    held_RC = values_N[at : at + shape[0] * shape[1]].view(shape)
    return held_RC[
        wanted.row - held.row : wanted.end_row - held.row,
        wanted.left - held.left : wanted.right - held.left,
    ]


def fill_local(
    layout: ModelLayout,
    rank: int,
    name: str,
    start: int,
    out_N: Tensor,
    read: Callable[[BoxRun, Tensor], None],
) -> None:
    """Fill `out_N` with a local tensor's numbers from `start`: `read` gets each run of the whole
    tensor, padding is zero."""
    at = start
    for run, first, _ in layout.runs(rank, name, start, start + out_N.numel()):
        out_N[at - start : first - start].zero_()
        at = first + run.stop - run.start
        read(run, out_N[first - start : at - start])
    out_N[at - start :].zero_()


def local_source(source: TensorSource, layout: ModelLayout, rank: int) -> TensorSource:
    """Return a source of one tensor rank's local tensors, or `source` where they are whole."""
    return source if len(layout.ranks) == 1 else _LocalSource(source, layout, rank)


class _LocalSource:
    """A TensorSource of local tensors, over one of whole tensors. Padding is zero."""

    def __init__(self, source: TensorSource, layout: ModelLayout, rank: int) -> None:
        self._source = source
        self._layout = layout
        self._rank = rank

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return self._layout.local_shapes

    def read(self, name: str, start: int, stop: int, out_N: Tensor) -> None:
        """Write numbers [start, stop) of a local tensor. Columns are cut from whole rows, which are
        read in bands of bounded size: a source may draw a whole block for a short run."""

        def read(run: BoxRun, home_N: Tensor) -> None:
            if run.columns is None:
                self._source.read(name, run.start, run.stop, home_N)
            else:
                self._read_columns(name, run, home_N)

        fill_local(self._layout, self._rank, name, start, out_N, read)

    def _read_columns(self, name: str, run: BoxRun, home_N: Tensor) -> None:
        columns = math.prod(self._layout.shapes[name][1:])
        assert run.columns is not None
        width = run.columns[1] - run.columns[0]
        first_row, end_row = run.start // width, -(-run.stop // width)
        step = max(1, BAND_NUMBERS // columns)
        band_N = torch.empty(min(step, end_row - first_row) * columns, dtype=home_N.dtype)
        for row in range(first_row, end_row, step):
            band = BoxRun(start=row * columns, stop=min(end_row, row + step) * columns)
            self._source.read(name, band.start, band.stop, band_N[: band.stop - band.start])
            copy_common(home_N, run, band_N, band, num_columns=columns)
