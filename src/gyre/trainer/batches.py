"""Batches: from unpacked sequences to the updates of one epoch. In: a batch's sequences, config, a seed.
Out: an EpochPlan of updates, each a list of chunks and one denominator. Callers: trainer.native.

Sequences without a target leave here: they teach nothing and count in no denominator.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from gyre.core.records import TrainSequence
from gyre.objectives.api import AnyObjective, denominator, is_pairwise
from gyre.trainer.chunk import Chunk, build_chunk, target_mask
from gyre.trainer.config import TrainerConfig
from gyre.trainer.pack import Atom, make_atoms, pack, split_updates


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimiser update."""

    chunks: tuple[Chunk, ...]
    denominator: float  # of the summed loss; > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One pass over a batch."""

    updates: tuple[Update, ...]
    num_tokens: int
    num_targets: int
    num_left_out: int  # sequences without a target
    num_oversized: int  # chunks above tokens_per_chunk, each for one long sequence or pair
    padding_share: float  # part of the chunks' fixed length that holds no token

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(chunk for update in self.updates for chunk in update.chunks)


def plan_epoch(
    sequences: Sequence[TrainSequence],
    *,
    objective: AnyObjective,
    config: TrainerConfig,
    columns: Collection[str],
    seed: int,
    vocab_size: int,
    device: torch.device,
) -> EpochPlan:
    """Split into updates, pack each, lay out tensors. A pure function of its arguments."""
    pairwise = is_pairwise(objective)
    lengths = [len(sequence.tokens) for sequence in sequences]
    targets = [int(target_mask(sequence).sum()) for sequence in sequences]
    atoms = make_atoms(lengths, [sequence.pair_id if pairwise else -1 for sequence in sequences])
    useful = [atom for atom in atoms if pairwise or targets[atom.members[0]] > 0]
    plans = [
        (members, pack(members, num_ranks=1, tokens_per_chunk=config.tokens_per_chunk))
        for members in split_updates(useful, config.sequences_per_update, seed)
    ]
    updates = tuple(
        Update(
            chunks=tuple(
                build_chunk(sequences, chunk, columns=columns, pairwise=pairwise, vocab_size=vocab_size, device=device)
                for chunk in plan.ranks[0]
                if chunk
            ),
            denominator=denominator(objective, [targets[i] for atom in members for i in atom.members]),
        )
        for members, plan in plans
    )
    num_tokens = sum(atom.num_tokens for atom in useful)
    room = sum(max(config.tokens_per_chunk, chunk.layout.num_tokens) for update in updates for chunk in update.chunks)
    return EpochPlan(
        updates=updates,
        num_tokens=num_tokens,
        num_targets=sum(targets[i] for atom in useful for i in atom.members),
        num_left_out=len(sequences) - _count(useful),
        num_oversized=sum(plan.num_oversized for _, plan in plans),
        padding_share=1.0 - num_tokens / room if room else 0.0,
    )


def plan_whole(
    sequences: Sequence[TrainSequence], *, tokens_per_chunk: int, vocab_size: int, device: torch.device
) -> tuple[Chunk, ...]:
    """Pack every sequence of a batch, for a pass that reads whole sequences rather than targets."""
    atoms = make_atoms([len(sequence.tokens) for sequence in sequences], [-1] * len(sequences))
    return tuple(
        build_chunk(sequences, chunk, columns=(), pairwise=False, vocab_size=vocab_size, device=device)
        for chunk in pack(atoms, num_ranks=1, tokens_per_chunk=tokens_per_chunk).ranks[0]
        if chunk
    )


def _count(atoms: Sequence[Atom]) -> int:
    return sum(len(atom.members) for atom in atoms)
