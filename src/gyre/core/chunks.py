"""Chunks: the pieces of a completion, joined, and the stream that they come by. In: TokenChunks and
Partials, in order. Out: a TokenChunk, Partial or Completion; an async iterator of chunks.

C tokens of the whole, c of one piece.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from gyre.core.records import Completion, Partial, Request, Support, TokenChunk


def join_chunks(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """Join all chunks of a completion, with the last one's end."""
    if len(chunks) == 1:
        return chunks[0]
    last = chunks[-1]
    return TokenChunk(
        request_id=last.request_id,
        index=last.index,
        tokens=np.concatenate([chunk.tokens for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        raw_logprobs=np.concatenate([chunk.raw_logprobs for chunk in chunks]),
        versions=np.concatenate([chunk.versions for chunk in chunks]),
        support=join_supports([chunk.support for chunk in chunks]),
        finish=last.finish,
        reason=last.reason,
        top_ids=_join_arrays([chunk.top_ids for chunk in chunks]),
        top_logprobs=_join_arrays([chunk.top_logprobs for chunk in chunks]),
        prompt_logprobs=next(
            (chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None
        ),
        timing=next((chunk.timing for chunk in chunks if chunk.timing is not None), None),
        cached_tokens=sum(chunk.cached_tokens for chunk in chunks),
        prefills=tuple(piece for chunk in chunks for piece in chunk.prefills),
    )


def as_partial(index: int, parts: Sequence[Partial | TokenChunk]) -> Partial:
    """Return the tokens so far as a Partial, to resume completion `index` of the request."""
    return Partial(
        index=index,
        tokens=np.concatenate([part.tokens for part in parts]).astype(np.int32),
        logprobs=np.concatenate([part.logprobs for part in parts]).astype(np.float32),
        raw_logprobs=np.concatenate([part.raw_logprobs for part in parts]).astype(np.float32),
        versions=np.concatenate([part.versions for part in parts]).astype(np.int32),
        support=join_supports([part.support for part in parts]),
    )


def first_tokens(partial: Partial, count: int) -> Partial:
    """Return the first `count` tokens of a Partial."""
    support = partial.support
    if support is not None:
        offsets = support.offsets[: count + 1]
        support = Support(offsets=offsets, ids=support.ids[: offsets[-1]])
    return Partial(
        index=partial.index,
        tokens=partial.tokens[:count],
        logprobs=partial.logprobs[:count],
        raw_logprobs=partial.raw_logprobs[:count],
        versions=partial.versions[:count],
        support=support,
    )


def join_supports(supports: Sequence[Support | None]) -> Support | None:
    """Join the supports piece by piece; a piece without one was not truncated or has no tokens."""
    parts = [support for support in supports if support is not None]
    if not parts:
        return None
    counts = np.concatenate([np.diff(support.offsets) for support in parts])
    return Support(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        ids=np.concatenate([support.ids for support in parts]).astype(np.int32),
    )


def _join_arrays(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    parts = [array for array in arrays if array is not None]
    return np.concatenate(parts) if parts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVisit:
    """An engine's time with a request, by the monotonic clock, as all times of a trace."""

    engine: str
    sent_s: float
    lost_s: float | None = None  # the engine was lost; another one continues


class TokenStream(AsyncIterator[TokenChunk]):
    """Chunks of one request, in order, for one reader. It ends after each of its completions has
    carried `finish`, or with `end`."""

    def __init__(
        self, request: Request, most_completions: int, abort: Callable[[str], Awaitable[None]]
    ) -> None:
        """Expect one answer, a refusal, where the number of completions is impossible."""
        n = request.sampling.n
        self.request_id = request.request_id
        self.visits: list[EngineVisit] = []  # of a traced request, in a pool of engines
        self._abort = abort
        self._unfinished = set(range(n if isinstance(n, int) and 1 <= n <= most_completions else 1))
        self._chunks: deque[TokenChunk] = deque()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    @property
    def unfinished(self) -> list[int]:
        """Indices of completions that have no answer yet."""
        return sorted(self._unfinished)

    def note_sent(self, engine: str, now_s: float) -> None:
        """Note which engine has the request from now on."""
        self.visits.append(EngineVisit(engine=engine, sent_s=now_s))

    def note_lost(self, now_s: float) -> None:
        """Note that the engine that has the request is lost."""
        if self.visits:
            self.visits[-1] = replace(self.visits[-1], lost_s=now_s)

    def push(self, chunk: TokenChunk) -> None:
        assert chunk.index in self._unfinished, (
            f"{chunk.request_id}[{chunk.index}] was answered before"
        )
        self._chunks.append(chunk)
        if chunk.finish is not None:
            self._unfinished.remove(chunk.index)
        self._changed.set()

    def refuse(self, reason: str) -> None:
        """Answer every completion with the refusal."""
        for index in self.unfinished:
            self.push(TokenChunk.end(self.request_id, index, "refused", reason))

    def end(self, error: BaseException | None = None) -> None:
        """Let no chunk follow. `error` is raised to the reader after the chunks that are there."""
        self._unfinished.clear()
        self._error = error
        self._changed.set()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenChunk:
        while not self._chunks:
            if self._error is not None:
                # the traceback of an earlier reader says nothing to this one
                raise self._error.with_traceback(None)
            if not self._unfinished:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._chunks.popleft()

    async def aclose(self) -> None:
        """Abort the request unless it is answered already: its reader goes away."""
        if self._unfinished:
            await self._abort(self.request_id)
        self._chunks.clear()


async def collect(stream: AsyncIterator[TokenChunk]) -> tuple[Completion, ...]:
    """Read a stream to its end and join each completion's chunks, by index."""
    chunks: dict[int, list[TokenChunk]] = {}
    async for chunk in stream:
        chunks.setdefault(chunk.index, []).append(chunk)
    return tuple(complete(chunks[index]) for index in sorted(chunks))


def complete(chunks: Sequence[TokenChunk]) -> Completion:
    """Return all chunks of one completion; the last one has `finish`."""
    whole = join_chunks(chunks)
    assert whole.finish is not None, whole
    return Completion(**{field.name: getattr(whole, field.name) for field in fields(Completion)})
