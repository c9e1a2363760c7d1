"""Layout: which box of each whole tensor the ranks of the tensor axis hold, and where in their
local tensors. In: the boxes, a run of a local tensor's numbers. Out: the numbers of the whole
tensor that it holds. Pure.

A local tensor is a whole tensor of a smaller model. Data-parallel shards are runs of it and know
nothing of this table. `models.layout` makes the table of a model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gyre.core.rounding import ceil_div

Columns = tuple[int, int] | None  # [start, stop) of a matrix's columns; None for all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Rows and columns of a whole tensor. The local tensor has exactly these columns, so there the
    box is a run of rows. A vector is rows of one number."""

    start: int  # first row in the whole tensor
    rows: int
    at: int  # first row in the local tensor
    columns: Columns = None
    owner: int = 0  # the lowest tensor rank that holds this box

    def follows(self, other: Box) -> bool:
        """Return whether both are one box, `other` above."""
        end = (other.start + other.rows, other.at + other.rows, other.columns, other.owner)
        return end == (self.start, self.at, self.columns, self.owner)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """Rows [row, end_row) and columns [left, right) of a whole tensor."""

    row: int
    end_row: int
    left: int
    right: int

    def common(self, other: Rectangle) -> Rectangle | None:
        """Return the part that both have, or None."""
        row, end_row = max(self.row, other.row), min(self.end_row, other.end_row)
        left, right = max(self.left, other.left), min(self.right, other.right)
        if row >= end_row or left >= right:
            return None
        return Rectangle(row=row, end_row=end_row, left=left, right=right)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRun:
    """Numbers [start, stop) of some columns of a whole tensor, counted row by row within these
    columns."""

    start: int
    stop: int
    columns: Columns = None

    def reach(self, other: BoxRun, num_columns: int) -> tuple[int, int]:
        """Return [start, stop) of this run's numbers outside of which `other` has none; equal
        columns give what both have, other ones the common rows."""
        low, high = other.start, other.stop
        if self.columns != other.columns:
            (left, right), (first, last) = (
                run.columns or (0, num_columns) for run in (self, other)
            )
            if left >= last or first >= right:
                return self.start, self.start
            low = low // (last - first) * (right - left)
            high = ceil_div(high, last - first) * (right - left)
        low = max(self.start, low)
        return low, max(low, min(self.stop, high))

    def whole_runs(self, num_columns: int) -> Iterator[tuple[int, int, int]]:
        """Yield [start, stop) of the row-major tensor, and the offset in this run, of each stretch:
        one of all columns, otherwise one a row."""
        if self.columns is None:
            yield self.start, self.stop, 0
            return
        for part, offset in self.rectangles(num_columns):
            width = part.right - part.left
            for row in range(part.row, part.end_row):
                start = row * num_columns + part.left
                yield start, start + width, offset + (row - part.row) * width

    def rectangles(self, num_columns: int) -> Iterator[tuple[Rectangle, int]]:
        """Yield the rectangles that the run consists of, at most three, each with its offset in the
        run. `num_columns` is the whole tensor's."""
        first, last = self.columns or (0, num_columns)
        width, at = last - first, self.start
        while at < self.stop:
            row, column = divmod(at, width)
            rows = (self.stop - at) // width if column == 0 else 0  # whole ones
            stop = at + rows * width if rows else min(self.stop, at - column + width)
            left = first + column
            right = last if rows else left + stop - at
            end_row = row + max(1, rows)
            yield Rectangle(row=row, end_row=end_row, left=left, right=right), at - self.start
            at = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """The table: whole tensors, the local tensors that all tensor ranks have, and each rank's
    boxes. Rows of a local tensor that no box names are padding."""

    shapes: Mapping[str, tuple[int, ...]]
    local_shapes: Mapping[str, tuple[int, ...]]
    ranks: tuple[Mapping[str, tuple[Box, ...]], ...]
    # Tensors whose boxes, where several ranks hold one, have a part of its gradient on each of
    # them. Of all others each holder computes the whole gradient.
    partial: frozenset[str] = frozenset()

    def of(self, names: Iterable[str]) -> ModelLayout:
        """Return the table of some of the tensors."""
        names = list(names)
        return ModelLayout(
            shapes={name: self.shapes[name] for name in names},
            local_shapes={name: self.local_shapes[name] for name in names},
            ranks=tuple({name: boxes[name] for name in names} for boxes in self.ranks),
            partial=self.partial.intersection(names),
        )

    def with_whole(self, shapes: Mapping[str, tuple[int, ...]]) -> ModelLayout:
        """Return the table with further tensors, which every rank holds whole."""
        boxes = whole_model(shapes).ranks[0]
        return replace(
            self,
            shapes={**self.shapes, **shapes},
            local_shapes={**self.local_shapes, **shapes},
            ranks=tuple({**held, **boxes} for held in self.ranks),
        )

    def holders(self, name: str) -> dict[Box, tuple[int, ...]]:
        """Return which ranks hold each box of a tensor, by the box as its owner has it."""
        found: dict[Box, tuple[int, ...]] = {}
        for rank, boxes in enumerate(self.ranks):
            for box in boxes[name]:
                found[box] = (*found.get(box, ()), rank)
        return found

    def runs(
        self, rank: int, name: str, start: int, stop: int
    ) -> Iterator[tuple[BoxRun, int, int]]:
        """Yield the whole tensor's runs in numbers [start, stop) of a rank's local tensor. Each
        comes with its first local number and its owner; padding yields nothing."""
        width = math.prod(self.local_shapes[name][1:])
        for box in self.ranks[rank][name]:
            low, high = max(start, box.at * width), min(stop, (box.at + box.rows) * width)
            if low < high:
                shift = (box.start - box.at) * width
                run = BoxRun(start=low + shift, stop=high + shift, columns=box.columns)
                yield run, low, box.owner


def whole_model(shapes: Mapping[str, tuple[int, ...]]) -> ModelLayout:
    """Return the table of one tensor rank: every local tensor is the whole one."""
    boxes = {name: (Box(start=0, rows=shape[0], at=0),) for name, shape in shapes.items()}
    return ModelLayout(shapes=shapes, local_shapes=shapes, ranks=(boxes,))


def joined(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Join boxes of one rank that touch in both tensors; leave out empty ones."""
    found: list[Box] = []
    for box in boxes:
        if found and box.follows(found[-1]):
            found[-1] = replace(found[-1], rows=found[-1].rows + box.rows)
        elif box.rows:
            found.append(box)
    return tuple(found)


def find_gap(shape: tuple[int, ...], runs: Iterable[BoxRun]) -> str | None:
    """Return how the runs fail to cover the tensor exactly once, or None. Their columns are equal
    or apart, as all runs of one layout are."""
    by_columns: dict[Columns, list[BoxRun]] = {}
    for run in runs:
        by_columns.setdefault(run.columns, []).append(run)
    columns, right = math.prod(shape[1:]), 0
    rows = shape[0] if shape else 1
    bands = sorted(by_columns, key=lambda band: band or (0, columns)) or [None]
    for band in bands:
        left, end = band or (0, columns)
        if left != right:
            what = "twice" if left < right else "not at all"
            return f"columns {min(left, right)} to {max(left, right)} are there {what}"
        right, at = end, 0
        for run in sorted(by_columns.get(band, []), key=lambda run: run.start):
            if run.start != at:
                what = "twice" if run.start < at else "not at all"
                return f"numbers {min(at, run.start)} to {max(at, run.start)} are there {what}"
            at = run.stop
        if at != rows * (end - left):
            return f"it ends after {at} of {rows * (end - left)} numbers"
    return None if right == columns else f"it ends after {right} of {columns} columns"
