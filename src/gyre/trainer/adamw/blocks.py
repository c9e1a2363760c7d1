"""Blocks: which moments are 8-bit codes, and the layout of a rank's scales. In: shapes, a
ShardLayout of numbers. Out: an order of tensors, the ShardLayout of the blocks. Pure.

A block is BLOCK numbers of one row, with one scale. Only matrices whose rows are whole blocks have
codes, so a split between rows never divides a block. Every layout therefore has the same blocks,
and codes and scales are split and joined like any other tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gyre.core.errors import ConfigError
from gyre.distributed.layout import Box, ModelLayout
from gyre.weights.shards import Place, Shape, ShardLayout

BLOCK = 256  # numbers; that of the library's 8-bit optimizers


def is_coded(shape: Shape) -> bool:
    """Return whether a parameter's moments can be coded: a matrix of whole blocks. Vectors and
    one-row heads are too small to matter."""
    return len(shape) == 2 and shape[0] > 1 and shape[1] % BLOCK == 0


def check_codes(model: str, shapes: Iterable[Shape]) -> None:
    """Raise ConfigError unless some parameter of a model with configured 8-bit moments can have
    them."""
    matrices = [shape for shape in shapes if len(shape) == 2 and shape[0] > 1]
    if not any(is_coded(shape) for shape in matrices):
        rows = ", ".join(f"{columns:,}" for columns in sorted({shape[1] for shape in matrices}))
        raise ConfigError(
            f'trainer.moments = "8_bit": no matrix of the {model} has rows of whole blocks of '
            f"{BLOCK} numbers (rows of "
            f"{rows})",
            hint=f'set trainer.moments = "float32", or give a fresh model sizes that {BLOCK} '
            "divides",
        )


def check_parts(model: str, table: ModelLayout | None) -> None:
    """Raise ConfigError if tensor ranks cut the rows of a matrix within blocks: its moments would
    be codes with one tensor rank and floats with several."""
    if table is None:
        return
    for name, shape in table.shapes.items():
        if is_coded(shape) and not is_coded(local := table.local_shapes[name]):
            raise ConfigError(
                f'trainer.moments = "8_bit" with parallel.tensor_ranks = {len(table.ranks)}: a '
                f"rank has {local[1]:,} of the {shape[1]:,} columns of {name} of the {model}, "
                f"which are no whole blocks of {BLOCK} numbers",
                hint='set trainer.moments = "float32", or take fewer tensor ranks',
            )


def block_layout(layout: ShardLayout) -> ShardLayout:
    """Return the layout of blocks over ranks that hold whole blocks of all the tensors."""
    return ShardLayout(
        shapes=_block_shapes(layout.shapes),
        ranks=tuple(
            {name: _of_blocks(place) for name, place in places.items()} for places in layout.ranks
        ),
        size=layout.size // BLOCK,
        table=None if layout.table is None else _block_table(layout.table),
    )


def _block_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: (shape[0], shape[1] // BLOCK) for name, shape in shapes.items()}


def _block_table(table: ModelLayout) -> ModelLayout:
    """Return the table of blocks: the same rows, and columns of blocks."""
    return replace(
        table,
        shapes=_block_shapes(table.shapes),
        local_shapes=_block_shapes(table.local_shapes),
        ranks=tuple(
            {name: tuple(_block_box(box) for box in boxes) for name, boxes in held.items()}
            for held in table.ranks
        ),
    )


def _block_box(box: Box) -> Box:
    if box.columns is None:
        return box
    left, right = box.columns
    assert left % BLOCK == right % BLOCK == 0, box
    return replace(box, columns=(left // BLOCK, right // BLOCK))


def coded_first(shapes: Mapping[str, Shape], coded: frozenset[str]) -> dict[str, Shape]:
    return dict(sorted(shapes.items(), key=lambda item: item[0] not in coded))


def _of_blocks(place: Place) -> Place:
    assert place.start % BLOCK == place.stop % BLOCK == place.at % BLOCK == 0, place
    return Place(start=place.start // BLOCK, stop=place.stop // BLOCK, at=place.at // BLOCK)
