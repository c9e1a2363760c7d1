"""Repetition: whether the end of a completion repeats itself. In: its tokens, piece by piece. Out:
after how many of them it is certain.

A pattern is a run of min_pattern to max_pattern tokens. The completion repeats itself once its last
tokens are one pattern `count` times over, as in vLLM's RepetitionDetectionParams. Kimi k1.5 ends
such rollouts early, too (arXiv 2501.12599, "Partial Rollouts"). Each token costs one comparison for
each length of a pattern.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

CHECK_TOKENS = 32  # between two looks at a completion: it may go on so far past its end


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionRule:
    """What counts as a repetition."""

    count: int  # times that the pattern stands in a row
    min_pattern: int
    max_pattern: int


class RepetitionFinder:
    """Looks at one completion as it grows."""

    def __init__(self, rule: RepetitionRule) -> None:
        # P lengths of a pattern
        self._periods_P = np.arange(rule.min_pattern, rule.max_pattern + 1)
        self._needed_P = self._periods_P * (rule.count - 1)
        # newest tokens that equal those one period before, in a row
        self._equal_P = np.zeros(len(self._periods_P), dtype=np.int64)
        # the newest tokens, newest first; -1 stands before the first
        self._newest = np.full(rule.max_pattern, -1, dtype=np.int64)
        self._num_tokens = 0

    def find(self, tokens: Iterable[int]) -> int | None:
        """Take the next tokens. Return the number of all tokens up to the end of a repetition, or
        None. After an answer nothing more is taken."""
        for token in tokens:
            same_P = self._newest[self._periods_P - 1] == token
            self._equal_P = np.where(same_P, self._equal_P + 1, 0)
            self._newest[1:] = self._newest[:-1]
            self._newest[0] = token
            self._num_tokens += 1
            if (self._equal_P >= self._needed_P).any():
                return self._num_tokens
        return None
