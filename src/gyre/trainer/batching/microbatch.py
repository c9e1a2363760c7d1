"""MicroBatch: one packed row of whole sequences as tensors. In: sequences of a batch and the
indices that `pack` chose. Out: a MicroBatch with token ids, target rows and columns on the device.

T tokens of the micro-batch, S sequences, P pairs, N targets: tokens whose loss_mask is True. Target
t of a sequence is predicted by the hidden state of token t - 1, its row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from gyre.core.errors import InputError
from gyre.core.records import Support, TrainSequence
from gyre.kernels.attention import PackedLayout

Put = Callable[[np.ndarray], Tensor]  # an array to the device


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePairs:
    """The preference pairs of a micro-batch, as indices into its S sequences."""

    chosen_P: Tensor  # int64
    rejected_P: Tensor  # int64
    margins_P: Tensor | None  # float32, where the data says by how much the chosen one should win


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Everything that one forward pass needs. Index tensors are int64. Behind the sequences are
    the layout's padding tokens, which attend to each other only and have no target."""

    # indices into the batch, in the order of the chunk; a blank chunk has none
    members: tuple[int, ...]
    layout: PackedLayout
    tokens_T: Tensor
    rows_N: Tensor  # which of the T hidden states predicts each target
    targets_N: Tensor
    temperature_N: Tensor  # float32
    # float32, divided on the host as the engine does, so that its bits are the same
    inverse_temperature_N: Tensor
    # offsets [N + 1] and ids of what truncation left choosable
    support: tuple[Tensor, Tensor] | None
    sequence_index_N: Tensor
    target_counts_S: Tensor
    last_row_S: Tensor  # where a reward model reads its score
    pairs: PreferencePairs | None
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # float32 [N] each


def target_mask(sequence: TrainSequence) -> np.ndarray:
    """Return the mask of targets: loss_mask, or all tokens but the first, which nothing
    predicts."""
    mask = sequence.columns.get("loss_mask")
    if mask is None:
        mask = np.ones(len(sequence.tokens), dtype=bool)
        mask[:1] = False
        return mask
    assert mask.dtype == bool and mask.shape == sequence.tokens.shape and not mask[:1].any(), (
        "loss_mask"
    )
    return mask


def check_columns(sequences: Sequence[TrainSequence], required: Collection[str], kind: str) -> None:
    """Raise an error for a batch that lacks columns required by the objective."""
    for index, sequence in enumerate(sequences):
        missing = sorted(set(required) - set(sequence.columns))
        if missing:
            raise InputError(
                f"sequence {index} of the batch has columns {sorted(sequence.columns)}; "
                f"objective '{kind}' also needs {missing}",
                hint="check that data source and objective.kind belong together",
            )
        for name, column in sequence.columns.items():
            assert column.shape == sequence.tokens.shape, (
                f"{name}: {column.shape} for {sequence.tokens.shape} tokens"
            )


def build_chunk(
    sequences: Sequence[TrainSequence],
    members: Sequence[int],
    *,
    pairwise: bool,
    vocab_size: int,
    device: torch.device,
    tensor_ranks: int = 1,
) -> MicroBatch:
    """Concatenate one or more sequences. `pairwise`: neighbors are preference pairs. Tokens are
    padded to equal runs for `tensor_ranks`."""
    chosen = [sequences[index] for index in members]
    lengths = np.array([len(sequence.tokens) for sequence in chosen], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    masks = [target_mask(sequence) for sequence in chosen]
    counts = np.array([int(mask.sum()) for mask in masks], dtype=np.int64)
    tokens = np.concatenate([sequence.tokens for sequence in chosen]).astype(np.int64)
    flat_mask = np.concatenate(masks)
    targets_at = np.flatnonzero(flat_mask)
    temperatures = np.array([sequence.temperature for sequence in chosen], dtype=np.float32)
    if (temperatures <= 0.0).any():
        raise InputError(
            "a sequence was sampled with temperature 0: its tokens have no probabilities to train "
            "on",
            hint="set rollout.sampling.temperature above 0 for training",
        )
    layout = PackedLayout.of(lengths.tolist(), device, multiple_of=tensor_ranks)
    index_of = np.repeat(np.arange(len(chosen)), counts)

    def put(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        members=tuple(members),
        layout=layout,
        tokens_T=put(np.pad(tokens, (0, layout.num_padding))),
        rows_N=put(targets_at - 1),
        targets_N=put(tokens[targets_at]),
        temperature_N=put(temperatures[index_of]),
        inverse_temperature_N=put((np.float32(1.0) / temperatures)[index_of]),
        support=_support(chosen, counts, vocab_size, put),
        sequence_index_N=put(index_of),
        target_counts_S=put(counts),
        last_row_S=put(starts[1:] - 1),
        pairs=_pairs(chosen, put) if pairwise else None,
    )


def blank_chunk(device: torch.device, *, tensor_ranks: int = 1) -> MicroBatch:
    """Build a dummy micro-batch of two tokens and one target, and padding. A rank without work runs
    it, since per-layer weight gathers are collective. Its results are discarded."""
    blank = TrainSequence(tokens=np.zeros(2, dtype=np.int32), columns={})
    chunk = build_chunk(
        (blank,), (0,), pairwise=False, vocab_size=1, device=device, tensor_ranks=tensor_ranks
    )
    return replace(chunk, members=())


def gather_columns(
    chunk: MicroBatch, sequences: Sequence[TrainSequence], names: Collection[str]
) -> MicroBatch:
    """Return the micro-batch with these columns of its sequences, at its targets."""
    if not chunk.members:
        return chunk
    chosen = [sequences[index] for index in chunk.members]
    masks = [target_mask(sequence) for sequence in chosen]
    columns = {}
    for name in names:
        parts = [sequence.columns[name][mask] for sequence, mask in zip(chosen, masks, strict=True)]
        columns[name] = torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(
            chunk.tokens_T.device
        )
    return replace(chunk, columns=columns)


def _support(
    chosen: Sequence[TrainSequence], counts: np.ndarray, vocab_size: int, put: Put
) -> tuple[Tensor, Tensor] | None:
    """Concatenate the ragged supports; a sequence without one allows all tokens."""
    if all(sequence.support is None for sequence in chosen):
        return None
    widths, ids = [], []
    for sequence, count in zip(chosen, counts.tolist(), strict=True):
        support = sequence.support or _full_support(count, vocab_size)
        assert len(support.offsets) == count + 1, (
            f"support of {len(support.offsets) - 1} tokens for {count} targets"
        )
        widths.append(np.diff(support.offsets))
        ids.append(support.ids)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(widths))]).astype(np.int64)
    return put(offsets), put(np.concatenate(ids).astype(np.int64))


def _full_support(count: int, vocab_size: int) -> Support:
    return Support(
        offsets=np.arange(count + 1, dtype=np.int64) * vocab_size,
        ids=np.tile(np.arange(vocab_size, dtype=np.int32), count),
    )


def _pairs(chosen: Sequence[TrainSequence], put: Put) -> PreferencePairs:
    """Return the preference pairs; siblings are adjacent."""
    wins, losses, margins = [], [], []
    for position in range(0, len(chosen), 2):
        pair = chosen[position : position + 2]
        assert len(pair) == 2 and pair[0].pair_id == pair[1].pair_id >= 0, (
            "a pair needs two siblings of one pair_id"
        )
        first_wins = pair[0].scalars["chosen"] > pair[1].scalars["chosen"]
        wins.append(position if first_wins else position + 1)
        losses.append(position + 1 if first_wins else position)
        margins.append(chosen[wins[-1]].scalars.get("margin"))
    has_margins = bool(margins) and all(margin is not None for margin in margins)
    return PreferencePairs(
        chosen_P=put(np.array(wins, dtype=np.int64)),
        rejected_P=put(np.array(losses, dtype=np.int64)),
        margins_P=put(np.array(margins, dtype=np.float32)) if has_margins else None,
    )
