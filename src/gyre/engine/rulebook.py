"""Rule book: the rows' sampling rules as tensors on the device, made again only when rows come or go. In: rows. Out:
Rules. Callers: runner, gpu_runner.
"""

# N rows that choose

from __future__ import annotations

import numpy as np
import torch

from gyre.engine.rows import Rows
from gyre.engine.sampler import Rules, make_rules


class RuleBook:
    """Keeps the last Rules."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._rules: Rules | None = None
        self._rules_of: tuple[int, bytes] | None = None  # row revision and rows that the rules were made for

    def rules_for(self, rows: Rows, rows_N: np.ndarray) -> Rules:
        wanted = (rows.revision, rows_N.tobytes())
        if self._rules is None or self._rules_of != wanted:
            self._rules_of = wanted
            self._rules = make_rules(
                rows.temperature_R[rows_N],
                rows.top_k_R[rows_N],
                rows.top_p_R[rows_N],
                rows.min_p_R[rows_N],
                rows.truncated_R[rows_N],
                vocab_size=self._vocab_size,
                device=self._device,
            )
        return self._rules
