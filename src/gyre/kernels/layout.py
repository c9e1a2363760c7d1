"""PackedLayout: the position of each sequence in a packed micro-batch, and padded buckets of
sequences of similar length. In: lengths in tokens. Out: index tensors, built once per micro-batch
and used by every layer."""

# T packed tokens, B sequences of a bucket, L its padded length, P padded slots of all buckets
# together

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

QUERY_BLOCK = 128  # queries of a sequence whose scores exist at a time
# buckets up to this length keep their probabilities for the backward pass; longer ones redo them
KEEP_TOKENS = 256
# of one head of a bucket at a time; keeps them in the processor's cache at common head counts
MOST_SCORES = 2**19
# of a bucket's longest sequence; below it padding costs more than another bucket
SHORTEST_SHARE = 0.7


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """Sequences of one micro-batch, packed end to end in the given order."""

    lengths: tuple[int, ...]  # tokens of each sequence; 0 is allowed
    positions_T: Tensor  # int64, of each token in its own sequence
    offsets: Tensor  # int32 [sequences + 1], cumulative lengths
    buckets: tuple[tuple[int, int], ...]  # (B, L), in the order of the slots
    token_of_slot_P: Tensor | None  # int64; None when the packed row already is the padded one
    slot_of_token_T: Tensor | None  # int64; likewise
    num_padding: int = 0  # tokens at the end that are in no sequence; a last length of their own

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device, *, multiple_of: int = 1) -> PackedLayout:
        """Plan sequences of these lengths, and padding behind them to a number of tokens that
        divides."""
        counts = [int(n) for n in lengths]
        if num_padding := -sum(counts) % multiple_of:
            counts.append(num_padding)
        starts = [0]
        for n in counts:
            starts.append(starts[-1] + n)
        positions_T = torch.cat(
            [torch.empty(0, dtype=torch.int64), *(torch.arange(n) for n in counts)]
        )
        buckets = plan_buckets(counts)
        token_of_slot_P, slot_of_token_T = padded_slots(counts, starts, buckets)
        in_place = torch.equal(token_of_slot_P, torch.arange(len(positions_T)))
        return PackedLayout(
            lengths=tuple(counts),
            positions_T=positions_T.to(device),
            offsets=torch.tensor(starts, dtype=torch.int32).to(device),
            buckets=tuple((len(members), counts[members[0]]) for members in buckets),
            token_of_slot_P=None if in_place else token_of_slot_P.to(device),
            slot_of_token_T=None if in_place else slot_of_token_T.to(device),
            num_padding=num_padding,
        )

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Return the lengths without that of the padding."""
        return self.lengths[:-1] if self.num_padding else self.lengths


def plan_buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Return indices of sequences by bucket, longest first in each; empty sequences are in none.
    Equal lengths keep their order, so that a micro-batch of them needs no gather."""
    order = sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: -lengths[i])
    buckets: list[list[int]] = []
    for i in order:
        if buckets:
            longest = lengths[buckets[-1][0]]
            scores = (len(buckets[-1]) + 1) * longest * min(longest, QUERY_BLOCK)
            if lengths[i] >= SHORTEST_SHARE * longest and scores <= MOST_SCORES:
                buckets[-1].append(i)
                continue
        buckets.append([i])
    return buckets


def padded_slots(
    lengths: Sequence[int], starts: Sequence[int], buckets: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Return for each slot the token that fills it (padding repeats the last token of its own
    sequence), and for each token its slot."""
    token_of_slot = [torch.empty(0, dtype=torch.int64)]
    slot_of_token_T = torch.empty(sum(lengths), dtype=torch.int64)
    base = 0
    for members in buckets:
        padded = lengths[members[0]]
        for i in members:
            token_of_slot.append(starts[i] + torch.arange(padded).clamp_(max=lengths[i] - 1))
            slot_of_token_T[starts[i] : starts[i + 1]] = torch.arange(base, base + lengths[i])
            base += padded
    return torch.cat(token_of_slot), slot_of_token_T
