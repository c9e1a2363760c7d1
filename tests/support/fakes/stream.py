"""Chunk stream: what a fake engine's `submit` hands back. In: chunks, pushed. Out: an async
iterator of them, which ends once each completion has carried `finish`. Caller: fakes.engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from gyre.core.records import TokenChunk


class ChunkStream(AsyncIterator[TokenChunk]):
    """One request's chunks, for one reader. Closing it early aborts the request."""

    def __init__(self, num_completions: int, abort: Callable[[], Awaitable[None]]) -> None:
        self._abort = abort
        self._unanswered, self._unread = num_completions, num_completions
        self._chunks: asyncio.Queue[TokenChunk] = asyncio.Queue()

    @property
    def is_answered(self) -> bool:
        return self._unanswered == 0

    def push(self, chunk: TokenChunk) -> None:
        assert not self.is_answered, f"{chunk.request_id} was answered before"
        self._unanswered -= chunk.finish is not None
        self._chunks.put_nowait(chunk)

    def __aiter__(self) -> ChunkStream:
        return self

    async def __anext__(self) -> TokenChunk:
        if self._unread == 0:
            raise StopAsyncIteration
        chunk = await self._chunks.get()
        self._unread -= chunk.finish is not None
        return chunk

    async def aclose(self) -> None:
        if not self.is_answered:
            await self._abort()
        self._unread = 0
