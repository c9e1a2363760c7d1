"""A worker's engine that answers at once, so that what is left of a request's time is the server's.
In: requests. Out: as many equal tokens as each asks for. Caller: bench/serve.py --mode gateway,
whose server loads `build` by name in a worker process.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.cluster.worker.server import Context
from gyre.core.chunks import TokenStream
from gyre.core.records import EngineStats, Health, Request, TokenChunk
from gyre.engine.frontend.admission import RequestLimits
from gyre.launch.placement.worker import ServedEngine
from gyre.models.hub.folders import LoadFormat

TOKEN = 100  # of the bench's tokenizer: a letter
VOCAB_SIZE, CONTEXT_TOKENS = 512, 512
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
                stream.push(
                    TokenChunk(
                        request_id=request.request_id,
                        index=index,
                        tokens=np.full(count, TOKEN, np.int32),
                        logprobs=np.zeros(count, np.float32),
                        raw_logprobs=np.zeros(count, np.float32),
                        versions=np.zeros(count, np.int32),
                        finish="length" if begin + count == left else None,
                    )
                )
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


async def build(
    context: Context,
    *,
    folder: str,
    version: int,
    config_json: str,
    load_format: LoadFormat = "auto",
) -> ServedEngine:
    """Make the worker's object, as launch.placement.worker.build_served_engine does."""
    limits = RequestLimits(
        vocab_size=VOCAB_SIZE,
        context_tokens=CONTEXT_TOKENS,
        cache_tokens=1 << 20,
        can_decode=True,
        eos_ids=(1,),
    )
    return ServedEngine(EngineEndpoint(AnsweringEngine()), limits)


def main() -> None:
    """`gyre serve` with this engine in its worker."""
    from gyre.cli.main import main as gyre
    from gyre.launch.serving import server

    server.BUILDER = "scripted_engine:build"
    sys.argv[0] = "gyre"
    gyre()


if __name__ == "__main__":
    main()
