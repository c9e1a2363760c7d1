"""Split KV: attention in which every token is a query of the split decode kernel. Pieces have a
fixed size, so that each token is computed in one way only. In: rows and positions of tokens. Out:
work lists on the device, by slabs that share one scratch."""

# T tokens, I items of a slab's work list

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gyre.core.rounding import ceil_div
from gyre.kernels.gpu.decode_attention import DecodeWork
from gyre.kernels.gpu.work_list import INVARIANT_PIECE, cut_pieces, pack

SLAB_ITEMS = 16_384  # pieces that one call of the kernel leaves in its scratch, at most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slab:
    """Tokens of one kernel call."""

    span: slice  # of the tokens that were cut
    work: DecodeWork
    num_items: int


def cut_slabs(
    row_T: np.ndarray, position_T: np.ndarray, *, longest_tokens: int, device: torch.device
) -> list[Slab]:
    """Divide tokens into slabs. No sequence is longer than `longest_tokens`. The keys of every
    token must be in their pages before a slab runs."""
    slab_tokens = max(1, SLAB_ITEMS // ceil_div(longest_tokens, INVARIANT_PIECE))
    slabs: list[Slab] = []
    for begin in range(0, len(row_T), slab_tokens):
        span = slice(begin, min(begin + slab_tokens, len(row_T)))
        first_S, item_I = cut_pieces(position_T[span] + 1, INVARIANT_PIECE)
        size_2 = np.array([len(item_I), INVARIANT_PIECE])
        sent = send(device, row_T[span], position_T[span], first_S, item_I, size_2)
        work = DecodeWork(
            row_B=sent[0], position_B=sent[1], first_B=sent[2], item_I=sent[3], size_2=sent[4]
        )
        slabs.append(Slab(span=span, work=work, num_items=len(item_I)))
    return slabs


def send(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    """Copy the arrays to the device as int32 in one transfer, aligned as the kernels were compiled
    for."""
    flat, spans = pack(arrays)
    sent = torch.from_numpy(flat).pin_memory().to(device, non_blocking=True)
    return [sent[span] for span in spans]
