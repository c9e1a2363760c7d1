"""A worker's engine that answers at once, so that what is left of a request's time is the server's;
or one that gives each stream 5 tokens a second. In: requests. Out: as many equal tokens as each
asks for. Caller: bench/serve.py, whose server loads `build` or `build_paced` in a worker process.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from gyre.cluster.worker.server import Context
from gyre.core.chunks import TokenStream
from gyre.core.records import EngineStats, Health, Request, TokenChunk
from gyre.engine.frontend.admission import RequestLimits

if TYPE_CHECKING:
    from gyre.launch.placement.worker import ServedEngine
    from gyre.models.hub.folders import LoadFormat

TOKEN = 100  # of the bench's tokenizer: a letter
VOCAB_SIZE, CONTEXT_TOKENS = 512, 512
TOKENS_PER_S, STEP_S = 5, 0.02  # of each paced stream; between two steps
COUNTS = EngineStats.__dataclass_fields__


class AnsweringEngine:
    """Implements RolloutEngine, and of EngineLifecycle what a served engine is asked."""

    def __init__(self) -> None:
        self._tokens = 0

    def submit(self, request: Request) -> TokenStream:
        stream = TokenStream(request, request.sampling.n, self.abort)
        left = request.sampling.max_tokens
        size = request.chunk_tokens or left
        self._tokens += left * request.sampling.n
        for index in range(request.sampling.n):
            for begin in range(0, left, size):
                count = min(size, left - begin)
                stream.push(make_chunk(request, index, count, is_last=begin + count == left))
        return stream

    async def stats(self) -> EngineStats:
        return EngineStats(**dict.fromkeys(COUNTS, 0) | {"steps": self._tokens})

    async def health(self) -> Health:
        return Health(ok=True)

    async def start(self, *, dummy: bool) -> None:
        return None

    async def terminate(self) -> None:
        return None

    async def abort(self, request_id: str) -> None:
        return None  # whatever it was, it is answered

    async def interrupt(self, *, deadline_s: float) -> Any:
        return {}

    async def drain(self, *, deadline_s: float) -> None:
        return None

    async def prepare(self, offer: Any) -> None:
        raise NotImplementedError("a bench changes no weights")

    async def commit(self, version: int, *, policy: Any) -> None:
        raise NotImplementedError("a bench changes no weights")

    async def rollback(self) -> None:
        return None


def make_chunk(request: Request, index: int, count: int, *, is_last: bool) -> TokenChunk:
    return TokenChunk(
        request_id=request.request_id,
        index=index,
        tokens=np.full(count, TOKEN, np.int32),
        logprobs=np.zeros(count, np.float32),
        raw_logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        finish="length" if is_last else None,
    )


class PacedEngine(AnsweringEngine):
    """Gives each request of one completion a token, TOKENS_PER_S times a second from its submit."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[str, tuple[Request, TokenStream, float]] = {}
        self._told: dict[str, int] = {}
        self._steps: asyncio.Task[None] | None = None

    def submit(self, request: Request) -> TokenStream:
        stream = TokenStream(request, 1, self.abort)
        begun_s = asyncio.get_running_loop().time()
        self._open[request.request_id] = request, stream, begun_s
        self._told[request.request_id] = 0
        self._steps = self._steps or asyncio.create_task(self._run())
        return stream

    async def abort(self, request_id: str) -> None:
        if (found := self._open.pop(request_id, None)) is not None:
            found[1].push(TokenChunk.end(request_id, 0, "abort", "aborted by its owner"))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            now_s = asyncio.get_running_loop().time()
            for name, (request, stream, begun_s) in list(self._open.items()):
                if now_s < begun_s + (self._told[name] + 1) / TOKENS_PER_S:
                    continue
                self._told[name] += 1
                self._tokens += 1
                is_last = self._told[name] == request.sampling.max_tokens
                stream.push(make_chunk(request, 0, 1, is_last=is_last))
                if is_last:
                    del self._open[name]


async def build(
    context: Context,
    *,
    folder: str,
    version: int,
    config_json: str,
    load_format: LoadFormat = "auto",
    kept_tokenizer: str = "",
) -> ServedEngine:
    """Make the worker's object, as launch.placement.worker.build_served_engine does."""
    return serve_engine(AnsweringEngine())


async def build_paced(
    context: Context,
    *,
    folder: str,
    version: int,
    config_json: str,
    load_format: LoadFormat = "auto",
    kept_tokenizer: str = "",
) -> ServedEngine:
    return serve_engine(PacedEngine())


def serve_engine(engine: AnsweringEngine) -> ServedEngine:
    # here, since they import torch, which the server's process has none of
    from gyre.cluster.worker.endpoints import EngineEndpoint
    from gyre.launch.placement.worker import ServedEngine

    limits = RequestLimits(
        vocab_size=VOCAB_SIZE,
        context_tokens=CONTEXT_TOKENS,
        cache_tokens=1 << 20,
        can_decode=True,
        eos_ids=(1,),
    )
    return ServedEngine(EngineEndpoint(engine), limits)


def main() -> None:
    """`gyre serve` with one of these engines in its worker, by the name of what builds it."""
    from gyre.cli.main import main as gyre
    from gyre.launch.serving import server

    server.BUILDER = f"scripted_engine:{sys.argv.pop(1)}"
    sys.argv[0] = "gyre"
    gyre()


if __name__ == "__main__":
    main()
