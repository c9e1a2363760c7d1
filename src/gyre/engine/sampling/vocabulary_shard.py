"""VocabularyShard: which columns of the logits a rank has, and what it exchanges about them. In: a
rank group, the vocabulary. Out: numbers of all ranks, in rank order.

What ranks decide together follows from what `gather` and `add_up` return: the same bytes on all,
then the same arithmetic in rank order. All sizes follow from the rows and what they ask, so a CUDA
graph may hold the exchanges.
"""

# M rows, V columns of this rank, S ranks, L rows that look back, W tokens looked back at, B bytes

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gyre.core.rounding import ceil_div
from gyre.distributed.process_group import RankGroup
from gyre.engine.sampling.logits_processors import Past


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VocabularyShard:
    """Each rank has `ceil(vocab_size / ranks)` columns. Those past the vocabulary, on the last
    ranks, are padding: -inf, which nothing chooses."""

    group: RankGroup
    vocab_size: int  # of the whole

    @property
    def width(self) -> int:
        return ceil_div(self.vocab_size, self.group.size)

    @property
    def ids(self) -> range:
        """The token ids of this rank's columns, padding included."""
        first = self.group.rank * self.width
        return range(first, first + self.width)

    def gather(self, own: Tensor) -> Tensor:
        """Return every rank's numbers, [S, …] in rank order."""
        whole = own.new_empty(self.group.size, *own.shape)
        self.group.all_gather(whole.view(-1), own.contiguous().view(-1))
        return whole

    def add_up(self, own: Tensor) -> None:
        """Sum whole numbers over the ranks, in place."""
        assert own.dtype == torch.int64, "sums of fractions would depend on the order"
        self.group.all_reduce(own)

    def own_past(self, past: Past) -> Past:
        """Return the past in this rank's columns. Others' tokens get one column behind them."""
        ids_LW, own = past.ids_LW, self.ids
        elsewhere_LW = (ids_LW < own.start) | (ids_LW >= own.stop)
        return replace(past, ids_LW=(ids_LW - own.start).masked_fill(elsewhere_LW, self.width))

    def joined_marks(self, own_MV: Tensor) -> Tensor:
        """Return marks (bool) of the whole vocabulary. They travel as bits."""
        rows, own = own_MV.shape
        weight_8 = 2 ** torch.arange(8, device=own_MV.device)
        padded = torch.nn.functional.pad(own_MV, (0, -own % 8)).view(rows, -1, 8)
        packed_MB = (padded * weight_8).sum(dim=-1).to(torch.uint8)
        whole_SMB8 = self.gather(packed_MB)[..., None] & weight_8.to(torch.uint8) != 0
        whole_MSV = whole_SMB8.transpose(0, 1).reshape(rows, self.group.size, -1)[..., :own]
        return whole_MSV.reshape(rows, -1)[:, : self.vocab_size].contiguous()
