"""Python streams: one completion as it is chosen, for one reader. In: a request of the API's kind.
Out: texts, on the caller's thread or its event loop. A reader that stops frees the KV pages.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator

from gyre.core.chunks import TokenStream
from gyre.launch.python.engine_thread import EngineThread, LocalEngine
from gyre.launch.python.requests import Asked, as_gyre_error
from gyre.launch.python.results import CompletionOutput
from gyre.server.bodies.schema import ApiError
from gyre.server.generation import TextDelta, TokenUsage, pieces


class OpenCompletion:
    """A request with one completion. Its methods run on the engine's event loop."""

    def __init__(self, local: LocalEngine, asked: Asked) -> None:
        self.completion: CompletionOutput | None = None  # once it has ended
        self._local = local
        self._asked = asked
        self._parts: list[TextDelta] = []
        self._stream: TokenStream | None = None
        self._pieces: AsyncIterator[TextDelta] | None = None
        self._is_closed = False

    async def next(self) -> str | None:
        """Return the next text that is not empty, or None at the end. The first call submits."""
        if self._is_closed:
            return None
        try:
            if self._pieces is None:
                self._pieces = await self._open()
            async for piece in self._pieces:
                self._parts.append(piece)
                if piece.text:
                    return piece.text
        except ApiError as error:
            await self.close()
            raise as_gyre_error(error) from None
        except BaseException:
            await self.close()
            raise
        await self.close()
        (self.completion,) = self._asked.completions(self._parts)
        return None

    async def close(self) -> None:
        """Abort what has not ended. May be called twice."""
        self._is_closed = True
        if self._stream is not None:
            await self._local.close([self._stream])

    async def _open(self) -> AsyncIterator[TextDelta]:
        request = self._asked.request(self._local.model)
        self._stream = await self._local.submit(request)
        usage = TokenUsage(prompt_tokens=len(request.tokens))
        return pieces(self._stream, request, self._local.model.tokenizer, usage)


class _Stream:
    """What both kinds have in common. `owner` is kept alive by its streams."""

    def __init__(self, thread: EngineThread, work: OpenCompletion, owner: object) -> None:
        self._thread = thread
        self._work = work
        self._owner = owner
        # not at the end of the program, where the loop may be gone
        weakref.finalize(self, _abandon, thread, work).atexit = False

    @property
    def completion(self) -> CompletionOutput | None:
        """The whole answer, with its tokens and finish_reason, once the stream has ended."""
        return self._work.completion


def _abandon(thread: EngineThread, work: OpenCompletion) -> None:
    """Abort a completion that has lost its reader."""
    thread.spawn(work.close())


class TextStream(_Stream, Iterator[str]):
    """Texts, in order. Ends with the completion, or with `close`."""

    def __next__(self) -> str:
        text = self._thread.run(self._work.next())
        if text is None:
            raise StopIteration
        return text

    def close(self) -> None:
        """Abort the request, unless it has ended."""
        self._thread.run(self._work.close())

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncTextStream(_Stream, AsyncIterator[str]):
    """Texts, in order, for `async for`. Ends with the completion, or with `aclose`."""

    async def __anext__(self) -> str:
        text = await self._thread.arun(self._work.next())
        if text is None:
            raise StopAsyncIteration
        return text

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""
        await self._thread.arun(self._work.close())

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
