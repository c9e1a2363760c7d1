"""A vLLM engine whose answers a test scripts, as workers of a local cluster, for what a real vLLM never
does by itself. In: how many tokens each answer has. Out: a worker's object with an EngineEndpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from gyre.cluster.worker.endpoints import EngineEndpoint
from gyre.cluster.worker.server import Context
from gyre.core.records import Request
from gyre.sidecars.vllm.engine import VllmEngine
from gyre.sidecars.vllm.llm import LlmProcess, VllmRole, VllmSettings
from gyre.sidecars.vllm.requests import Growth, TokenLimits
from gyre.sidecars.vllm.versions import build_for
from gyre.weights.protocol import ReceiverState

VERSION = 3
SETTINGS = VllmSettings(
    folder="",
    dtype="float32",
    context_tokens=40,
    max_running=4,
    token_budget=64,
    prefix_cache=False,
    gpu_memory_utilization=0.1,
    kv_bytes=1,
    enforce_eager=True,
    start_deadline_s=1.0,
    update_deadline_s=1.0,
)
LIMITS = TokenLimits(vocab_size=50, context_tokens=40, most_completions=8)
ROLE = VllmRole(settings=SETTINGS, limits=LIMITS, drain_deadline_s=1.0, during_training="keep")


class ScriptedVllm(VllmEngine):
    """Tells `told` tokens before its last answer, and `more` than are left with it. Each token is
    its place in the completion."""

    def __init__(self, *, told: int, more: int, emit: Any) -> None:
        build = build_for("cpu")
        super().__init__(SETTINGS, build, LIMITS, emit=emit, drain_deadline_s=1.0, version=VERSION)
        self._told = told
        self._more = more
        self._process = LlmProcess(SETTINGS)
        self._state = ReceiverState(version=VERSION)

    def _generate(self, llm: Any, request: Request, growth: Growth, name: str) -> Any:
        return self._answer(growth.begun_tokens, request.sampling.max_tokens)

    async def _answer(self, begun: int, most: int) -> AsyncIterator[Any]:
        places = list(range(begun, most + self._more))
        if self._told:
            yield output_of(places[: self._told], None)
        yield output_of(places[self._told :], "length")


def output_of(tokens: list[int], finish: str | None) -> Any:
    """A piece of an answer, as vLLM's AsyncLLM gives it."""
    logprobs = SimpleNamespace(logprobs=[-1.0] * len(tokens))
    told = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=finish)
    return SimpleNamespace(outputs=[told], num_cached_tokens=0)


class ScriptedWorker:
    """The worker's object."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = EngineEndpoint(engine)


async def build_scripted(context: Context, *, told: int, more: int) -> ScriptedWorker:
    return ScriptedWorker(ScriptedVllm(told=told, more=more, emit=context.emit))
