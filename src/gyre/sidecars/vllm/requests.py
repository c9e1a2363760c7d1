"""Requests: the contract's requests as arguments of vLLM, and vLLM's answers as chunks. In: a
Request, and the tokens of an answer. Out: arguments of SamplingParams; TokenChunks. Pure.

Each completion is a request of vLLM by itself. It gets the stop ids with it, since vLLM has no
tokenizer.
"""

# c tokens of one piece

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre.core.chunks import as_partial
from gyre.core.contracts import EngineAbilities, find_unable
from gyre.core.records import Finish, Partial, Request, Sampling, TokenChunk
from gyre.core.seeds import derive_seed
from gyre.sidecars.vllm.versions import COLDEST, HOTTEST

FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """What bounds the tokens of a request."""

    vocab_size: int
    context_tokens: int  # of prompt and completion together
    most_completions: int  # that may be unanswered
    eos_ids: tuple[int, ...] = ()


def find_refusal(
    request: Request, limits: TokenLimits, abilities: EngineAbilities, *, unanswered: int
) -> str | None:
    """Return why vLLM will not run this request, or None. `unanswered` completions are there."""
    sampling, tokens = request.sampling, request.tokens
    if reason := find_unable(request, abilities):
        return reason
    if len(tokens) == 0:
        return "an empty prompt: need at least one token"
    if int(tokens.min()) < 0 or int(tokens.max()) >= limits.vocab_size:
        return f"a prompt token outside 0 to {limits.vocab_size - 1}"
    if sampling.max_tokens < 1:
        return f"max_tokens = {sampling.max_tokens}: need 1 or more"
    if len(tokens) + sampling.max_tokens > limits.context_tokens:
        return (
            f"max_tokens = {sampling.max_tokens} after a prompt of {len(tokens)}: the context is "
            f"{limits.context_tokens} tokens"
        )
    if sampling.temperature != 0.0 and not COLDEST <= sampling.temperature <= HOTTEST:
        return (
            f"temperature = {sampling.temperature:g}: {abilities.engine} takes 0, or {COLDEST:g} "
            f"to {HOTTEST:g}"
        )
    taken = 0 if request.resumed else unanswered  # a lost engine had admitted it
    if not 1 <= sampling.n <= limits.most_completions - taken:
        return (
            f"n = {sampling.n}: {unanswered} completions are unanswered and "
            f"{limits.most_completions} (engine.max_running + engine.max_queued) fit"
        )
    return _find_bad_partial(request)


def _find_bad_partial(request: Request) -> str | None:
    indices = [partial.index for partial in request.partials]
    if len(set(indices)) < len(indices) or any(
        not 0 <= index < request.sampling.n for index in indices
    ):
        return f"partials of {indices}: need distinct indices below n = {request.sampling.n}"
    for partial in request.partials:
        if len(partial.tokens) > request.sampling.max_tokens:
            return f"partial {partial.index} has more than max_tokens"
    return None


def stop_ids_of(sampling: Sampling, eos_ids: Iterable[int]) -> list[int]:
    """Return the token ids that end a completion."""
    ends = () if sampling.ignore_eos else tuple(eos_ids)
    return list(dict.fromkeys((*sampling.stop_ids, *ends)))


def sampling_arguments(
    request: Request, index: int, *, begun_tokens: int, eos_ids: Iterable[int]
) -> dict[str, Any]:
    """Return the arguments of SamplingParams for one completion, of which `begun_tokens` are there.
    A continuation draws by another seed than its beginning: the draws would be the same again."""
    sampling = request.sampling
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "seed": derive_seed(request.seed, index, begun_tokens),
        "max_tokens": sampling.max_tokens - begun_tokens,
        "min_tokens": max(0, sampling.min_tokens - begun_tokens),
        "stop_token_ids": stop_ids_of(sampling, eos_ids),
        "ignore_eos": True,  # stop_token_ids has them
        "logprobs": 0,  # that of the chosen token alone
        "flat_logprobs": True,
        "detokenize": False,
        "skip_clone": True,  # made for this request alone
    }


class Growth:
    """One completion as it grows: the tokens that vLLM gave, and the chunks made of them."""

    def __init__(self, request: Request, index: int, eos_ids: Iterable[int]) -> None:
        self.index = index
        self.begun = next((part for part in request.partials if part.index == index), None)
        self.version = -1
        self._request = request
        self._stop_ids = frozenset(stop_ids_of(request.sampling, eos_ids))
        self._passed: list[TokenChunk] = []
        self._num_passed = 0  # tokens in them
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    @property
    def begun_tokens(self) -> int:
        return 0 if self.begun is None else len(self.begun.tokens)

    @property
    def prompt(self) -> list[int]:
        """Return the tokens that vLLM is to go on from."""
        begun = () if self.begun is None else self.begun.tokens.tolist()
        return [*self._request.tokens.tolist(), *begun]

    def ended_before(self) -> Finish | None:
        """Return how the beginning that came with the request ends it, or None."""
        sampling, count = self._request.sampling, self.begun_tokens
        if self.begun is None:
            return None
        if count and count >= sampling.min_tokens and int(self.begun.tokens[-1]) in self._stop_ids:
            return "stop"
        return "length" if count >= sampling.max_tokens else None

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], finish: Finish | None = None
    ) -> None:
        """Take tokens of vLLM, with which the completion ends if `finish` is given. ValueError
        where their number is wrong: then none of them is taken, and another engine may go on."""
        most, told = self._request.sampling.max_tokens, self._num_told + len(tokens)
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} tokens came with {len(logprobs)} log-probs")
        if told > most:
            raise ValueError(f"{told} tokens of at most {most}")
        if finish == "length" and told != most:
            raise ValueError(f"it ended by its length with {told} of {most} tokens")
        self._tokens += tokens
        self._logprobs += logprobs

    def take(self, finish: Finish | None = None, reason: str = "") -> list[TokenChunk]:
        """Return the next chunks, each with as many tokens as one is to have; with `finish` also
        what is left."""
        wanted = self._request.chunk_tokens
        chunks = []
        while wanted and len(self._tokens) >= wanted + (finish is not None):
            chunks.append(self._cut(wanted, None, ""))
        if finish is not None:
            chunks.append(self._cut(len(self._tokens), finish, reason))
        self._passed += chunks
        self._num_passed += sum(len(chunk.tokens) for chunk in chunks)
        return chunks

    def partial(self) -> Partial:
        """Return all tokens that were passed on, to go on from."""
        return as_partial(
            self.index, [*([] if self.begun is None else [self.begun]), *self._passed]
        )

    @property
    def _num_told(self) -> int:
        return self.begun_tokens + self._num_passed + len(self._tokens)

    def _cut(self, count: int, finish: Finish | None, reason: str) -> TokenChunk:
        tokens = np.asarray(self._tokens[:count], np.int32)
        told_c = np.asarray(self._logprobs[:count], np.float32)
        self._tokens, self._logprobs = self._tokens[count:], self._logprobs[count:]
        logprobs_c, raw_c = tell_logprobs(told_c, self._request.sampling)
        return TokenChunk(
            request_id=self._request.request_id,
            index=self.index,
            tokens=tokens,
            logprobs=logprobs_c,
            raw_logprobs=raw_c,
            versions=np.full(count, self.version, np.int32),
            finish=finish,
            reason=reason,
        )


def tell_logprobs(told_c: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Return (processed, raw) log-probs, from those of vLLM with processed_logprobs. For
    greedy choices these are of the plain softmax, and the processed one is that of certainty."""
    if sampling.temperature == 0.0:
        return np.zeros_like(told_c), told_c
    is_plain = sampling.temperature == 1.0 and not sampling.shapes_logits
    return told_c, told_c if is_plain else np.full_like(told_c, np.nan)
