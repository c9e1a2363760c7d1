"""FLOPs: the arithmetic that a model requires, independent of the implementation. Pure.

In: sizes of a decoder, lengths of packed sequences. Out: FLOPs of one forward pass; a backward pass
takes twice that. docs/training.md states the formula.

    forward = 2 · W · T  +  4 · H · D · Σ pairs  +  2 · O · E · N.

W counts the weights of the layers' matrices, without norms, biases and the embedding (a look-up). T
is the number of tokens, H the heads of D numbers, E the hidden size. O is the number of rows of the
output projection (the vocabulary, or 1 of a scalar head); N hidden states pass through it. Pairs of
one layer and sequence of L tokens are L²/2, as causal attention counts half. With a sliding window
of w < L tokens they are w·L - w²/2. Recomputation (checkpointing, logits by blocks) and padding do
not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gyre.models.spec import ModelSpec


def forward_flops(
    spec: ModelSpec, lengths: Iterable[int], *, num_outputs: int, output_rows: int | None = None
) -> float:
    """Return the FLOPs of sequences of these lengths in tokens, packed or not. `num_outputs` (N)
    hidden states pass through an output projection with `output_rows` (O) rows; default: the
    vocabulary."""
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
    """Return the (query, key) pairs of one sequence and layer; causal attention counts half."""
    if window is None or length <= window:
        return length * length / 2
    return window * length - window * window / 2
