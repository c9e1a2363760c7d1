"""Streams: what `submit` hands back. In: chunks, pushed on the event loop's thread. Out: an async iterator of them.
Callers: native (pushes), whoever submitted (reads), tests and chat (`collect`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

from gyre.core.records import Completion, Support, TokenChunk


class TokenStream(AsyncIterator[TokenChunk]):
    """Chunks of one request, in order; ends after each of its completions has carried `finish`. One reader."""

    def __init__(self, request_id: str, num_completions: int, abort: Callable[[str], Awaitable[None]]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._unfinished = set(range(num_completions))
        self._chunks: deque[TokenChunk] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def unfinished(self) -> list[int]:
        """Indices of completions that have no answer yet."""
        return sorted(self._unfinished)

    def push(self, chunk: TokenChunk) -> None:
        assert chunk.index in self._unfinished, f"{chunk.request_id}[{chunk.index}] was answered before"
        self._chunks.append(chunk)
        if chunk.finish is not None:
            self._unfinished.remove(chunk.index)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenChunk:
        while not self._chunks:
            if not self._unfinished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._chunks.popleft()

    async def aclose(self) -> None:
        """The reader goes away: the request is aborted unless it is answered already."""
        if self._unfinished:
            await self._abort(self.request_id)
        self._chunks.clear()


async def collect(stream: AsyncIterator[TokenChunk]) -> tuple[Completion, ...]:
    """Read a stream to its end and join each completion's chunks, by index."""
    chunks: dict[int, list[TokenChunk]] = {}
    async for chunk in stream:
        chunks.setdefault(chunk.index, []).append(chunk)
    return tuple(join_chunks(chunks[index]) for index in sorted(chunks))


def join_chunks(chunks: list[TokenChunk]) -> Completion:
    """Join all chunks of one completion; the last one carries `finish`."""
    last = chunks[-1]
    assert last.finish is not None, last
    return Completion(
        request_id=last.request_id,
        index=last.index,
        tokens=np.concatenate([chunk.tokens for chunk in chunks]),
        logprobs=np.concatenate([chunk.logprobs for chunk in chunks]),
        raw_logprobs=np.concatenate([chunk.raw_logprobs for chunk in chunks]),
        versions=np.concatenate([chunk.versions for chunk in chunks]),
        finish=last.finish,
        support=_join_supports([chunk.support for chunk in chunks]),
        reason=last.reason,
        top_ids=_join_arrays([chunk.top_ids for chunk in chunks]),
        top_logprobs=_join_arrays([chunk.top_logprobs for chunk in chunks]),
        prompt_logprobs=next((chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None), None),
    )


def _join_arrays(arrays: list[np.ndarray | None]) -> np.ndarray | None:
    parts = [array for array in arrays if array is not None]
    return np.concatenate(parts) if parts else None


def _join_supports(supports: list[Support | None]) -> Support | None:
    parts = [support for support in supports if support is not None]
    if not parts:
        return None
    sizes = np.concatenate([np.diff(support.offsets) for support in parts])
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return Support(offsets=offsets, ids=np.concatenate([support.ids for support in parts]))
