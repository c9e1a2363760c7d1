"""Work lists of the attention kernels, two numbers per int32, and other host arithmetic of kernels:
block tables, packing of arrays for one copy, sizes of memory that peers write. In: lengths, arrays.
Out: work lists, tables (numpy). No Triton here, so that the host side is testable without it."""

# B or S sequences, I items of a work list, P pages of the longest sequence

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gyre.core.rounding import ceil_div, round_up

ITEM_BITS = 16  # low bits hold the piece or tile, high bits the sequence or chunk
# int32 numbers in 16 bytes: Triton compiles a kernel anew for a pointer that is not a multiple of
# that
ALIGN = 4
PEER_HEAD_ALIGN = 1024  # bytes; behind call numbers of peer sums
INVARIANT_PIECE = 512  # keys of a piece in batch-invariant mode; a multiple of every page size


def cut_pieces(length_B: np.ndarray, piece_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Split each sequence's keys into fixed-size pieces.

    Returns first_B, the offset of a sequence's pieces in the scratch, and item_I. The longest
    pieces come first, so that programs that take items in turn finish together.
    """
    pieces_B = ceil_div(length_B, piece_tokens)
    first_B = np.cumsum(pieces_B) - pieces_B
    place_I = np.repeat(np.arange(len(length_B)), pieces_B)
    piece_I = np.arange(len(place_I)) - first_B[place_I]
    tokens_I = np.minimum(length_B[place_I] - piece_I * piece_tokens, piece_tokens)
    order_I = np.argsort(-tokens_I, kind="stable")
    return first_B, (place_I << ITEM_BITS | piece_I)[order_I]


def lay_out_pages(lengths_S: np.ndarray, page_tokens: int) -> tuple[np.ndarray, int]:
    """Return the block table, sequence by sequence, and the number of pages."""
    pages_S = ceil_div(lengths_S, page_tokens)
    column_P = np.arange(max(1, int(pages_S.max())))
    first_S1 = (np.cumsum(pages_S) - pages_S)[:, None]
    return np.where(column_P < pages_S[:, None], first_S1 + column_P, 0), int(pages_S.sum())


def align(count: int) -> int:
    """Return the first multiple of ALIGN that is at least `count`."""
    return round_up(count, ALIGN)


def pack(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, list[slice]]:
    """Pack the arrays into one int32 array; return it and the aligned offset of each."""
    spans, end = [], 0
    for array in arrays:
        spans.append(slice(end, end + len(array)))
        end = align(end + len(array))
    flat = np.zeros(end, dtype=np.int32)
    for span, array in zip(spans, arrays, strict=True):
        flat[span] = array
    return flat, spans


def peer_bytes(*, ranks: int, rows: int, width: int, item_bytes: int) -> int:
    """Return the bytes that each rank of `peer_sums` needs: call numbers, and two halves of each
    rank's rows."""
    return peer_head_bytes(ranks, rows) + 2 * ranks * rows * width * item_bytes


def peer_head_bytes(ranks: int, rows: int) -> int:
    return round_up(4 * ranks * rows, PEER_HEAD_ALIGN)
