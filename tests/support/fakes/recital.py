"""Recital: one completion that a fake engine is reciting. In: its script. Out: TokenChunks, a
Partial. Pure but for its own state. Caller: fakes.engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gyre.core.records import (
    Finish,
    Partial,
    PromptLogprobs,
    Request,
    Support,
    TokenChunk,
)


class Recital:
    """Goes on from the request's partial for its index, if there is one; the partial's tokens are
    not sent again."""

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        script: tuple[int, ...],
        logprob: float,
        submitted_s: float,
    ) -> None:
        self.request, self.index, self.submitted_s = request, index, submitted_s
        self.running = False
        self._script = script
        s = request.sampling
        self._truncates = s.temperature > 0.0 and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)
        # What a truncated or greedy choice leaves is the scripted token alone, and that is certain.
        self._logprob, self._raw_logprob = (
            (0.0 if self._truncates or s.temperature == 0.0 else logprob),
            logprob,
        )
        begun = next((partial for partial in request.partials if partial.index == index), None)
        self._tokens: list[int] = [] if begun is None else begun.tokens.tolist()
        self._logprobs: list[float] = [] if begun is None else begun.logprobs.tolist()
        self._raw_logprobs: list[float] = [] if begun is None else begun.raw_logprobs.tolist()
        self._versions: list[int] = [] if begun is None else begun.versions.tolist()
        self._sent = len(self._tokens)
        self._tells_prompt = s.prompt_logprobs is not None

    def advance(
        self, version: int, eos_ids: frozenset[int], decode: Callable[[Sequence[int]], str] | None
    ) -> Finish | None:
        """Choose one more token under `version`; say whether it ends the completion, and why."""
        position = len(self._tokens)
        if position and (finish := self._find_end(eos_ids, decode)) is not None:
            return finish  # its beginning was a whole answer
        if position < len(self._script):
            self._tokens.append(self._script[position])
            self._logprobs.append(self._logprob)
            self._raw_logprobs.append(self._raw_logprob)
            self._versions.append(version)
        return self._find_end(eos_ids, decode)

    def _find_end(
        self, eos_ids: frozenset[int], decode: Callable[[Sequence[int]], str] | None
    ) -> Finish | None:
        sampling, last = self.request.sampling, self._tokens[-1:]
        if last and (
            last[0] in sampling.stop_ids or (last[0] in eos_ids and not sampling.ignore_eos)
        ):
            return "stop"
        if decode is not None and any(stop in decode(self._tokens) for stop in sampling.stop):
            return "stop"
        if len(self._tokens) >= sampling.max_tokens:
            return "length"
        return "stop" if len(self._tokens) >= len(self._script) else None

    @property
    def num_tokens(self) -> int:
        """Tokens chosen so far, those of the partial included."""
        return len(self._tokens)

    def is_chunk_full(self) -> bool:
        return 0 < self.request.chunk_tokens <= len(self._tokens) - self._sent

    def cut(self, finish: Finish | None, reason: str) -> TokenChunk:
        """What has not been sent yet."""
        start, self._sent = self._sent, len(self._tokens)
        return TokenChunk(
            request_id=self.request.request_id,
            index=self.index,
            tokens=np.array(self._tokens[start:], dtype=np.int32),
            logprobs=np.array(self._logprobs[start:], dtype=np.float32),
            raw_logprobs=np.array(self._raw_logprobs[start:], dtype=np.float32),
            versions=np.array(self._versions[start:], dtype=np.int32),
            support=self._support(start),
            finish=finish,
            reason=reason,
            prompt_logprobs=self._prompt_logprobs(start),
            **self._best(self._sent - start, self.request.sampling.top_logprobs or None),
        )

    def _prompt_logprobs(self, start: int) -> PromptLogprobs | None:
        """Once, with the first token: every prompt token is as likely as the chosen ones."""
        if not (self._tells_prompt and self._sent > start):
            return None
        self._tells_prompt = False
        size = len(self.request.tokens)
        logprobs = np.full(size, self._raw_logprob, np.float32)
        versions = np.full(size, self._versions[start], np.int32)
        logprobs[0], versions[0] = 0.0, -1
        best = self._best(size, self.request.sampling.prompt_logprobs)
        return PromptLogprobs(logprobs=logprobs, versions=versions, **best)

    def _best(self, count: int, width: int | None) -> dict[str, np.ndarray]:
        """The lowest ids, with falling log-probs, at each place."""
        if width is None:
            return {}
        ids = np.tile(np.arange(width, dtype=np.int32), (count, 1))
        return {"top_ids": ids, "top_logprobs": (self._raw_logprob - ids).astype(np.float32)}

    def partial(self) -> Partial:
        """Everything chosen so far."""
        return Partial(
            index=self.index,
            tokens=np.array(self._tokens, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            raw_logprobs=np.array(self._raw_logprobs, dtype=np.float32),
            versions=np.array(self._versions, dtype=np.int32),
            support=self._support(0),
        )

    def _support(self, start: int) -> Support | None:
        if not self._truncates:
            return None
        ids = np.array(self._tokens[start:], dtype=np.int32)
        return Support(offsets=np.arange(len(ids) + 1, dtype=np.int64), ids=ids)
