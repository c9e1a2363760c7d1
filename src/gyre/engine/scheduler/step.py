"""Step: what one forward pass computes, what the sampler chose in it, and what runs it. Records and
protocols only. In: nothing. Out: Step and Sampled, which pass between scheduler, runners and
postprocess; StepRunner and Flight.
"""

# N rows that choose a token, B rows that decode

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gyre.engine.kv_cache.pool import KvPool
from gyre.engine.kv_cache.prompt_logprobs import PromptSlice
from gyre.engine.scheduler.slots import InputBatch
from gyre.engine.scheduler.swap import Pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """A piece of one row's known tokens to compute."""

    row: int
    start: int  # position of its first token
    count: int  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one forward pass computes and who chooses a token after it."""

    decode_rows: np.ndarray  # int64 [B]: one token each
    chunks: tuple[PrefillChunk, ...]
    # int64 [N]: decode_rows, then rows whose prompt ends in this step, and their forks
    sample_rows: np.ndarray
    # int64 [N - B]: for the latter, the chunk whose last token they continue
    sample_chunks: np.ndarray
    sample_positions: np.ndarray  # int64 [N]: where in its sequence each chosen token goes
    # int64 [N]: the generations of those rows; a row may have a new sequence by then
    sample_generations: np.ndarray
    # int64: decoding rows whose last token the device must take from the host
    restored_rows: np.ndarray
    version: int  # of the weights that choose
    swap_out: Pairs  # pages → slots of the host pool, copied before all else
    swap_in: Pairs  # slots → pages, copied next
    copies: tuple[tuple[int, int], ...]  # (from, to) pages, copied after the pass

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + sum(chunk.count for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """What the sampler chose for `Step.sample_rows`, on the host."""

    tokens: np.ndarray  # int32 [N]
    logprobs: np.ndarray  # float32 [N], after temperature and truncation
    raw_logprobs: np.ndarray  # float32 [N]
    # place in sample_rows → int32 ids that truncation left, for rows that truncate
    supports: dict[int, np.ndarray]
    # place → ids, raw log-probs [≥ K]
    top_logprobs: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    # prompt log-probs of the step's chunks, for those that ask
    pieces: tuple[PromptSlice, ...] = ()


class Flight(Protocol):
    """A launched step whose results may not be on the host yet. Flights are fetched in the order of
    their launch, at most once each. An unneeded one is dropped unfetched."""

    def fetch(self) -> SampledTokens:
        """Block until the results are on the host; DeadlineError when the device takes too long."""
        ...


class StepRunner(Protocol):
    """Runs steps on one device, in the order in which they are launched.

    `launch` reads the rows before it returns, and the rows change as soon as it has. At that time
    the step itself is not counted yet. computed_R[row] is the position of a decoding row's input
    token, and length_R[row] that of the token to be chosen (`step.sample_positions`). The values in
    tokens_RW are only known up to known_R. So a runner keeps each row's last chosen token on the
    device and takes decode inputs from there. Rows in `step.restored_rows` first take theirs from
    tokens_RW[row, computed_R[row]]. All other token values that a step needs are known.
    """

    pool: KvPool

    def launch(self, rows: InputBatch, step: Step) -> Flight: ...

    def has_moved(self) -> bool:
        """Return whether something that the runner holds by address has moved. It is asked before a
        burst and answered by a Recapture in the journal. Ranks of one engine must capture together,
        whichever of them sees new addresses."""
        ...

    def recapture(self) -> None:
        """Hold the addresses of now, and capture anew what was captured over others."""
        ...
