"""Batch: several requests in the engine that make one answer. In: requests, in the order of their
prompts. Out: their pieces as they come, under the indices of the answer. When one fails or the
client hangs up, all are aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace

from gyre.server.generation import TextDelta, TokenUsage
from gyre.server.respond import ActiveRequest
from gyre.server.tracing.marks import RequestTrace


class RequestBatch:
    """Requests that count into the same usage. Completion j of request i has index i × n + j."""

    def __init__(self, name: str, parts: Sequence[ActiveRequest], usage: TokenUsage) -> None:
        self.name = name
        self._parts = parts
        self.usage = usage
        self.metrics = parts[0].metrics

    @property
    def num_choices(self) -> int:
        return sum(part.num_choices for part in self._parts)

    @property
    def most_tokens(self) -> int:
        return sum(part.most_tokens for part in self._parts)

    @contextlib.asynccontextmanager
    async def open(self, trace: RequestTrace | None) -> AsyncIterator[AsyncIterator[TextDelta]]:
        """Submit them all. An error or a cancellation aborts each."""
        async with contextlib.AsyncExitStack() as opened:
            streams = []
            for number, part in enumerate(self._parts):
                pieces = await opened.enter_async_context(part.open(trace))
                streams.append(_moved(pieces, number * part.num_choices))
            async with contextlib.aclosing(interleave(streams)) as merged:
                yield merged


async def _moved(pieces: AsyncIterator[TextDelta], first: int) -> AsyncIterator[TextDelta]:
    """Yield the pieces with their indices counted from `first`."""
    async for piece in pieces:
        yield replace(piece, index=first + piece.index)


async def interleave(
    streams: Sequence[AsyncIterator[TextDelta]],
) -> AsyncGenerator[TextDelta, None]:
    """Yield from all streams, each piece as soon as it is there; each stream keeps its order. One
    piece of each is waited for at a time, so a slow reader holds them back."""
    waited = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    try:
        while waited:
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            for one in [future for future in waited if future in done]:
                stream, piece = waited.pop(one), one.result()
                if piece is not None:
                    waited[asyncio.ensure_future(anext(stream, None))] = stream
                    yield piece
    finally:
        for one in waited:
            one.cancel()
        await asyncio.gather(*waited, return_exceptions=True)
