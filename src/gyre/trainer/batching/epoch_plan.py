"""Epoch plan: from unpacked sequences to the updates of one epoch. In: a batch's sequences, config,
a seed. Out: an EpochPlan of updates, each with this rank's micro-batches and one denominator. Every
rank plans the whole batch identically and builds only its own micro-batches.

Sequences without a target are dropped here: they contribute to no gradient and no denominator.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from gyre.core.events import Emit
from gyre.core.records import TrainSequence
from gyre.core.seeds import derive_seed
from gyre.objectives.api import denominator
from gyre.objectives.config import AnyObjective, is_pairwise
from gyre.trainer.batching.microbatch import (
    MicroBatch,
    blank_chunk,
    build_chunk,
    gather_columns,
    target_mask,
)
from gyre.trainer.batching.packing import PackItem, PackPlan, make_atoms, pack, split_updates
from gyre.trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    # of this rank; as many as on every other rank, blank ones where there is no work
    chunks: tuple[MicroBatch, ...]
    denominator: float  # of the loss summed over all ranks; > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """One pass over a batch. The counts cover all ranks."""

    updates: tuple[Update, ...]
    num_tokens: int
    num_targets: int
    num_left_out: int  # sequences without a target
    num_oversized: int  # chunks above tokens_per_chunk, each for one long sequence or pair
    fewest_atoms: int  # sequences or pairs of the smallest update
    padding_share: float  # part of the chunks' fixed length that holds no token

    @property
    def chunks(self) -> tuple[MicroBatch, ...]:
        return tuple(chunk for update in self.updates for chunk in update.chunks)

    def with_columns(self, sequences: Sequence[TrainSequence], names: Collection[str]) -> EpochPlan:
        """Return the same plan with columns on its micro-batches; index tensors are shared."""
        updates = tuple(
            replace(
                update,
                chunks=tuple(gather_columns(chunk, sequences, names) for chunk in update.chunks),
            )
            for update in self.updates
        )
        return replace(self, updates=updates)


@dataclass(slots=True, kw_only=True)
class BatchPlanner:
    """Plans epochs. On a CPU the last plan is cached, so that the passes and the step of one batch
    share it."""

    objective: AnyObjective
    config: TrainerConfig
    seed: int
    vocab_size: int
    device: torch.device
    emit: Emit
    rank: int = 0
    num_ranks: int = 1
    tensor_ranks: int = 1  # that split the rows of each micro-batch
    _last: tuple[tuple[int, int], tuple[TrainSequence, ...], EpochPlan] | None = field(
        default=None, init=False
    )

    def plan(self, sequences: Sequence[TrainSequence], step: int, epoch: int) -> EpochPlan:
        """Split into updates, pack each and build index tensors. Depends only on the batch, the
        step and the epoch."""
        if (
            self._last is not None
            and self._last[0] == (step, epoch)
            and _same_layout(self._last[1], sequences)
        ):
            return self._last[2]
        plan = self._fresh(sequences, derive_seed(self.seed, "updates", step, epoch))
        if plan.num_oversized:
            limit = self.config.tokens_per_chunk
            self.emit(
                "trainer.oversized_chunks",
                step=step,
                chunks=plan.num_oversized,
                tokens_per_chunk=limit,
            )
        if plan.updates and plan.fewest_atoms < self.num_ranks:
            self.emit(
                "trainer.idle_ranks", step=step, items=plan.fewest_atoms, ranks=self.num_ranks
            )
        if self.device.type == "cpu":  # on a GPU these bytes would belong to no component
            self._last = ((step, epoch), tuple(sequences), plan)
        return plan

    def forget(self) -> None:
        self._last = None

    def whole(self, sequences: Sequence[TrainSequence], vocab_size: int) -> tuple[MicroBatch, ...]:
        """Pack every sequence of a batch, for a pass that reads whole sequences rather than
        targets."""
        atoms = make_atoms([len(sequence.tokens) for sequence in sequences], [-1] * len(sequences))
        return self._chunks(sequences, atoms, pairwise=False, vocab_size=vocab_size)[0]

    def _fresh(self, sequences: Sequence[TrainSequence], seed: int) -> EpochPlan:
        # Online DPO asks for reference log-probs of whole groups, before any of it is paired.
        pairwise = is_pairwise(self.objective) and any(
            sequence.pair_id >= 0 for sequence in sequences
        )
        targets = [int(target_mask(sequence).sum()) for sequence in sequences]
        atoms = make_atoms(
            [len(sequence.tokens) for sequence in sequences],
            [sequence.pair_id if pairwise else -1 for sequence in sequences],
        )
        useful = [atom for atom in atoms if pairwise or targets[atom.members[0]] > 0]
        updates, oversized, room = [], 0, 0
        splits = split_updates(useful, self.config.sequences_per_update, seed)
        for members in splits:
            chunks, plan = self._chunks(
                sequences, members, pairwise=pairwise, vocab_size=self.vocab_size
            )
            counts = [targets[index] for atom in members for index in atom.members]
            updates.append(Update(chunks=chunks, denominator=denominator(self.objective, counts)))
            oversized += plan.num_oversized
            room += _room(plan, sequences)
        num_tokens = sum(atom.num_tokens for atom in useful)
        return EpochPlan(
            updates=tuple(updates),
            num_tokens=num_tokens,
            num_targets=sum(targets[index] for atom in useful for index in atom.members),
            num_left_out=len(sequences) - sum(len(atom.members) for atom in useful),
            num_oversized=oversized,
            fewest_atoms=min((len(members) for members in splits), default=0),
            padding_share=1.0 - num_tokens / room if room else 0.0,
        )

    def _chunks(
        self,
        sequences: Sequence[TrainSequence],
        atoms: Sequence[PackItem],
        *,
        pairwise: bool,
        vocab_size: int,
    ) -> tuple[tuple[MicroBatch, ...], PackPlan]:
        """Return this rank's micro-batches and the packing of all ranks."""
        plan = pack(atoms, num_ranks=self.num_ranks, tokens_per_chunk=self.config.tokens_per_chunk)
        chunks = tuple(
            build_chunk(
                sequences,
                members,
                pairwise=pairwise,
                vocab_size=vocab_size,
                device=self.device,
                tensor_ranks=self.tensor_ranks,
            )
            if members
            else blank_chunk(self.device, tensor_ranks=self.tensor_ranks)
            for members in plan.ranks[self.rank]
        )
        return chunks, plan


def _room(plan: PackPlan, sequences: Sequence[TrainSequence]) -> int:
    """Return the token capacity of the micro-batches of all ranks."""
    sizes = [
        sum(len(sequences[index].tokens) for index in members)
        for rank in plan.ranks
        for members in rank
    ]
    return sum(max(plan.tokens_per_chunk, size) for size in sizes)


def _same_layout(ours: Sequence[TrainSequence], theirs: Sequence[TrainSequence]) -> bool:
    """Return whether two batches have the same tokens and targets, compared by identity of their
    frozen arrays."""
    return len(ours) == len(theirs) and all(
        a.tokens is b.tokens
        and a.columns.get("loss_mask") is b.columns.get("loss_mask")
        and a.support is b.support
        and (a.temperature, a.pair_id, a.scalars) == (b.temperature, b.pair_id, b.scalars)
        for a, b in zip(ours, theirs, strict=True)
    )
