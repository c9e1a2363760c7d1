"""Request log: what has come of one request, so that another engine can resume it. In: the request,
chunks. Out: chunks for the caller, the request as another engine must get it. Pure.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gyre.core.chunks import as_partial, join_chunks
from gyre.core.records import Partial, Request, TokenChunk


class RequestLog:
    """One request's chunks so far, by completion. A caller that asked for one chunk at the end gets
    one chunk at the end, although the engine reports every `progress_tokens`."""

    def __init__(self, request: Request, *, progress_tokens: int) -> None:
        self.request = request
        self._whole = request.chunk_tokens == 0
        self._progress_tokens = progress_tokens
        self._begun = {partial.index: partial for partial in request.partials}
        self._chunks: dict[int, list[TokenChunk]] = {}
        # tokens of each completion, its beginning included; kept, since routing asks often
        self._num_chosen = {index: len(partial.tokens) for index, partial in self._begun.items()}
        self.num_tokens = 0  # that came, the caller's own beginnings not counted
        self._ended: set[int] = set()
        self._told_prompt: set[int] = set()

    @property
    def open(self) -> list[int]:
        """Completions that have not ended."""
        return [index for index in range(self.request.sampling.n) if index not in self._ended]

    def is_open(self, index: int) -> bool:
        """Return whether a completion has not ended."""
        return index not in self._ended

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that are still to come at most; the prompt as long as none has come."""
        longest = self.request.sampling.max_tokens
        rest = sum(max(0, longest - self._num_chosen.get(index, 0)) for index in self.open)
        return rest + (0 if self._chunks else len(self.request.tokens))

    def take(self, chunk: TokenChunk) -> list[TokenChunk]:
        """Note a chunk; return what the caller gets of it. One for a completion that has ended, as
        an engine that went on with a request sends it, is nothing new."""
        index = chunk.index
        if index in self._ended:
            return []
        if chunk.prompt_logprobs is not None:
            if index in self._told_prompt:
                chunk = replace(chunk, prompt_logprobs=None)
            self._told_prompt.add(index)
        chunks = self._chunks.setdefault(index, [])
        chunks.append(chunk)
        self.num_tokens += len(chunk.tokens)
        self._num_chosen[index] = self._num_chosen.get(index, 0) + len(chunk.tokens)
        if chunk.finish is not None:
            self._ended.add(index)
            return [join_chunks(chunks)] if self._whole else [chunk]
        return [] if self._whole else [chunk]

    def for_engine(self, *, waited_s: float = 0.0, resumed: bool = False) -> Request:
        """Return the request as an engine gets it now: what has come so far is where its
        completions begin. `waited_s` is what has passed of its deadline. `resumed`: an engine had
        admitted it, and is lost."""
        deadline_s = self.request.deadline_s
        return replace(
            self.request,
            chunk_tokens=self._progress_tokens if self._whole else self.request.chunk_tokens,
            partials=tuple(
                self._partial(i) for i in range(self.request.sampling.n) if self._num_chosen.get(i)
            ),
            deadline_s=None if deadline_s is None else max(0.0, deadline_s - waited_s),
            resumed=resumed or self.request.resumed,
        )

    def tokens_of(self, index: int) -> list[np.ndarray]:
        """Return the tokens of a completion, in parts."""
        begun = [self._begun[index].tokens] if index in self._begun else []
        return [*begun, *(chunk.tokens for chunk in self._chunks.get(index, ()))]

    def _partial(self, index: int) -> Partial:
        begun = [self._begun[index]] if index in self._begun else []
        return as_partial(index, [*begun, *self._chunks.get(index, ())])
