"""Sequences: one completion each, and its states. In: an admitted Request. Out: its Sequences, and
TokenChunks cut from their tokens. Pure.

    waiting → prefilling → decoding → finished    (any state may end in finished: abort, deadline,
                                                  interrupt)
               ↑  ↑ ╰───┬─────╯ ↑
               │  ╰─ swapped ───╯    its KV is in host memory: it resumes where it was
               ╰─ preempted          its KV is gone or void: it is recomputed
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from gyre.core.records import Finish, Partial, PrefillTiming, Request, Support, Timing, TokenChunk
from gyre.engine.kv_cache.prefix_cache import BlockKey
from gyre.engine.kv_cache.prompt_logprobs import PromptLogprobStore
from gyre.engine.scheduler.random import draw_key
from gyre.engine.scheduler.swap import Swapped

# why a sequence was ended
WITHDRAWN, LATE = "aborted by the caller", "the request's deadline passed"


class State(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


_NEXT = {
    # straight to decoding: forked from a sibling
    State.WAITING: {State.PREFILLING, State.DECODING, State.FINISHED},
    State.PREFILLING: {State.DECODING, State.PREEMPTED, State.SWAPPED, State.FINISHED},
    State.DECODING: {State.PREEMPTED, State.SWAPPED, State.FINISHED},
    State.PREEMPTED: {State.PREFILLING, State.FINISHED},
    # preempted: its KV went void
    State.SWAPPED: {State.PREFILLING, State.DECODING, State.PREEMPTED, State.FINISHED},
    State.FINISHED: set(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedTokens:
    """What a completion has chosen so far, while it holds no row."""

    tokens: np.ndarray  # int32 [C]
    logprobs: np.ndarray  # float32 [C]
    raw_logprobs: np.ndarray  # float32 [C]
    versions: np.ndarray  # int32 [C]


NOTHING_CHOSEN = GeneratedTokens(
    tokens=np.empty(0, np.int32),
    logprobs=np.empty(0, np.float32),
    raw_logprobs=np.empty(0, np.float32),
    versions=np.empty(0, np.int32),
)


class Sequence:
    """One completion of a request. Its growing arrays are in its row while it runs."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "chosen",
        "emitted",
        "first_token_s",
        "followers",
        "hits_given_up",
        "index",
        "key",
        "keys",
        "keys_root",
        "lost_tokens",
        "prefills",
        "prompt_store",
        "request",
        "row",
        "started_s",
        "state",
        "stop_ids",
        "supports",
        "swapped",
        "top_from",
        "top_logprobs",
    )

    def __init__(
        self, request: Request, index: int, *, arrival: int, stop_ids: tuple[int, ...]
    ) -> None:
        self.request = request
        self.index = index
        self.arrival = arrival
        self.stop_ids = stop_ids
        self.state = State.WAITING
        self.row: int | None = None
        self.chosen = NOTHING_CHOSEN  # meaningful while row is None
        self.supports: list[np.ndarray] = []  # one per chosen token when the request truncates
        # ids and log-probs [K] per token chosen from top_from on
        self.top_logprobs: list[tuple[np.ndarray, np.ndarray]] = []
        # tokens of a given beginning; their alternatives went out when they were chosen
        self.top_from = 0
        self.prompt_store: PromptLogprobStore | None = (
            None  # the prompt's log-probs, until they go out
        )
        self.hits_given_up = 0  # cached pages that are computed again for the prompt's log-probs
        self.emitted = 0  # chosen tokens that went out in chunks; a partial's own count as out
        self.key = draw_key(request.seed, index)
        self.keys: list[BlockKey] = []  # block keys under keys_root
        self.keys_root: BlockKey = b""
        self.swapped: Swapped | None = None  # its KV in host memory, while its state is SWAPPED
        self.lost_tokens = 0  # whose KV was given up when it was preempted
        self.started_s: float | None = None  # when it first had a row
        self.cached_tokens = 0  # of its prompt, then
        self.first_token_s: float | None = None
        self.prefills: list[PrefillTiming] = []  # of a traced request, until they go out
        # siblings that wait for this one to prefill their prompt
        self.followers: list[Sequence] = []

    def enter(self, state: State) -> None:
        assert state in _NEXT[self.state], (
            f"{self.request.request_id}[{self.index}]: {self.state} → {state}"
        )
        self.state = state

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key of the queue: larger priority first, then arrival."""
        return (-self.request.priority, self.arrival, self.index)

    @property
    def truncates(self) -> bool:
        return truncates(self.request)

    def known_tokens(self) -> np.ndarray:
        """Prompt and chosen tokens, while it holds no row; int32, whatever the prompt is: block
        keys are of bytes."""
        return np.concatenate(
            [self.request.tokens, self.chosen.tokens], dtype=np.int32, casting="unsafe"
        )


def truncates(request: Request) -> bool:
    """Return whether top-k, top-p or min-p can remove tokens. Greedy choice needs no truncation
    set."""
    s = request.sampling
    return s.temperature > 0.0 and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)


def sequences_of(request: Request, *, arrival: int, eos_ids: tuple[int, ...]) -> list[Sequence]:
    """Return the request's completions in the order in which they should start."""
    stops = set(request.sampling.stop_ids) | (
        set() if request.sampling.ignore_eos else set(eos_ids)
    )
    sequences = [
        Sequence(request, index, arrival=arrival, stop_ids=tuple(sorted(stops)))
        for index in range(request.sampling.n)
    ]
    best = request.sampling.prompt_logprobs
    prompt_store = None if best is None else PromptLogprobStore(len(request.tokens), best)
    for sequence in sequences:
        sequence.prompt_store = prompt_store  # one of a prompt, however many completions wait
    for partial in request.partials:
        sequence = sequences[partial.index]
        if len(partial.tokens):
            sequence.prompt_store = None  # its prompt's log-probs went out with its first token
        sequence.chosen = GeneratedTokens(
            tokens=partial.tokens.astype(np.int32),
            logprobs=partial.logprobs.astype(np.float32),
            raw_logprobs=partial.raw_logprobs.astype(np.float32),
            versions=partial.versions.astype(np.int32),
        )
        sequence.emitted = sequence.top_from = len(partial.tokens)
        if partial.support is not None and sequence.truncates:
            sequence.supports = np.split(partial.support.ids, partial.support.offsets[1:-1])[
                : len(partial.tokens)
            ]
    return sequences


def make_support(supports: Seq[np.ndarray]) -> Support:
    """Pack one array of ids per token."""
    offsets = np.zeros(len(supports) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids in supports], out=offsets[1:])
    ids = np.concatenate(supports) if supports else np.empty(0, np.int32)
    return Support(offsets=offsets, ids=ids.astype(np.int32, copy=False))


def make_chunk(
    sequence: Sequence, chosen: GeneratedTokens, finish: Finish | None, reason: str = ""
) -> TokenChunk:
    """Cut what has not gone out yet, and count it as out."""
    start, sequence.emitted = sequence.emitted, len(chosen.tokens)
    timing, cached_tokens = None, 0
    if start == 0 and sequence.started_s is not None and sequence.first_token_s is not None:
        timing = Timing(started_s=sequence.started_s, first_token_s=sequence.first_token_s)
        cached_tokens = sequence.cached_tokens
    prefills: tuple[PrefillTiming, ...] = ()
    if sequence.prefills:
        prefills, sequence.prefills = tuple(sequence.prefills), []
    top_ids, top_logprobs = _cut_top(sequence, start)
    prompt_logprobs = None
    if sequence.prompt_store is not None and len(chosen.tokens):
        whole = sequence.prompt_store.is_whole
        assert whole or finish not in (None, "stop", "length"), (
            "a token was chosen after a prompt with gaps"
        )
        prompt_logprobs, sequence.prompt_store = (
            (sequence.prompt_store.result(), None) if whole else (None, sequence.prompt_store)
        )
    return TokenChunk(
        request_id=sequence.request.request_id,
        index=sequence.index,
        tokens=chosen.tokens[start:].copy(),
        logprobs=chosen.logprobs[start:].copy(),
        raw_logprobs=chosen.raw_logprobs[start:].copy(),
        versions=chosen.versions[start:].copy(),
        support=make_support(sequence.supports[start:]) if sequence.truncates else None,
        finish=finish,
        reason=reason,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        timing=timing,
        cached_tokens=cached_tokens,
        prefills=prefills,
    )


def _cut_top(sequence: Sequence, start: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the alternatives of the tokens chosen from `start` on, [c, K] each; None if none were
    asked for."""
    best = sequence.request.sampling.top_logprobs
    if best == 0:
        return None, None
    top = sequence.top_logprobs[start - sequence.top_from :]
    ids = np.asarray([ids for ids, _ in top], dtype=np.int32).reshape(-1, best)
    return ids, np.asarray([logprobs for _, logprobs in top], dtype=np.float32).reshape(-1, best)


def make_partial(sequence: Sequence, chosen: GeneratedTokens) -> Partial:
    """Everything a later request needs to go on from here."""
    return Partial(
        index=sequence.index,
        tokens=chosen.tokens.copy(),
        logprobs=chosen.logprobs.copy(),
        raw_logprobs=chosen.raw_logprobs.copy(),
        versions=chosen.versions.copy(),
        support=make_support(sequence.supports) if sequence.truncates else None,
    )
