"""FLOPs: the arithmetic that a model asks for, whoever runs it and however often. Pure.

In: sizes of a decoder, lengths of packed sequences. Out: FLOPs of one forward pass; a backward pass
takes twice that. docs/training.md states the formula.

    forward = 2 · W · T  +  4 · H · D · Σ pairs  +  2 · O · E · N

W weights of the layers' matrices (not of norms, biases and the embedding, a look-up), T tokens, H
heads of D numbers, O rows of the output projection (the vocabulary, or 1 of a scalar head), E
hidden size, N rows that it is asked for. Pairs: of each layer and sequence of L tokens L²/2, causal
attention counted at half; with a sliding window of w < L tokens w·L - w²/2. What is computed a
second time (checkpointing, logits by blocks) does not count, nor does padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gyre.models.spec import ModelSpec


def forward_flops(
    spec: ModelSpec, lengths: Iterable[int], *, num_outputs: int, output_rows: int | None = None
) -> float:
    """Of sequences of these lengths in tokens, packed or not. `num_outputs` (N) hidden states go
    through an output projection with `output_rows` (O) rows; left out, the vocabulary's."""
    lengths = list(lengths)
    shapes = spec.parameter_shapes().items()
    weights = sum(
        math.prod(shape) for name, shape in shapes if len(shape) == 2 and name.startswith("layers.")
    )
    windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
    pairs = sum(seen_pairs(length, window) for length in lengths for window in windows)
    rows = spec.vocab_size if output_rows is None else output_rows
    attention = 4 * spec.num_heads * spec.head_dim * pairs
    return 2.0 * weights * sum(lengths) + attention + 2.0 * rows * spec.hidden_size * num_outputs


def seen_pairs(length: int, window: int | None) -> float:
    """(query, key) pairs of one sequence and layer, causal attention counted at half."""
    if window is None or length <= window:
        return length * length / 2
    return window * length - window * window / 2
