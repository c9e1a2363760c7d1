"""Sweep: a load at each of several levels. In: a `SweepSettings`, a callback for progress. Out: a
`SweepResult`, also of a sweep that Ctrl-C has cut short.

    first model? ─▶ tokens of a word? ─▶ client's rate ─▶ for each level: warm-up, requests, summary
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre.benchmark.client import Client, ClientSettings, first_model
from gyre.benchmark.client_rate import measure_client
from gyre.benchmark.connection import ConnectionPool, Target
from gyre.benchmark.loads import NUM_UNITS, RequestPlace, Workload
from gyre.benchmark.prompts import RequestTemplate, TextFit, fit_text, probe_words
from gyre.benchmark.records import (
    DrawnRequest,
    Endpoint,
    Level,
    LevelProgress,
    LevelSummary,
    OnProgress,
    RequestResult,
)
from gyre.benchmark.runner import Tally, run_closed, run_open
from gyre.benchmark.summary import summarize
from gyre.core.errors import ConfigError, InputError

_ARRIVALS = 4  # a stream of the seed
_PROBE_STEP = 37  # odd, so that multiples of it meet every unit


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """What the command line said."""

    target: Target
    load: Workload
    levels: Sequence[Level]
    endpoint: Endpoint
    stream: bool
    model: str  # empty takes the first that the server lists
    api_key: str = field(repr=False)
    temperature: float
    ignore_eos: bool
    timeout_s: float
    most_connections: int  # of an open loop
    seed: int
    measures_client: bool

    def __post_init__(self) -> None:
        for level in self.levels:
            if (level.concurrency < 1 and level.rate_per_s <= 0.0) or (
                level.requests < 1 and level.seconds <= 0.0
            ):
                raise ConfigError(
                    f"level {level.name}: need a concurrency of at least 1 or a rate above 0, and "
                    "requests or seconds above 0",
                    hint="--concurrency 1,8,32 --requests 128, or --rate 2,4 --seconds 60",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep measured."""

    model: str
    client_max_chunks_per_s: float  # 0 where it was not measured
    levels: Sequence[LevelSummary]
    is_interrupted: bool


async def run_sweep(settings: SweepSettings, on_progress: OnProgress) -> SweepResult:
    """Play every level. InputError where the server cannot be asked at all."""
    most = max(level.concurrency or settings.most_connections for level in settings.levels)
    pool = ConnectionPool(settings.target, most=most)
    try:
        model = settings.model or await first_model(pool, api_key=settings.api_key)
        sweep = _Sweep(settings, pool, model, on_progress)
        fit = await sweep.probe() if settings.endpoint == "chat" else None
        rate = await measure_client() if settings.measures_client and settings.stream else 0.0
        is_whole = await _until_interrupt(sweep.play(fit))
    finally:
        pool.close()
    return SweepResult(
        model=model,
        client_max_chunks_per_s=rate,
        levels=sweep.summaries,
        is_interrupted=not is_whole,
    )


class _Sweep:
    """A sweep under way. `summaries` has what was measured, at any time."""

    def __init__(
        self, settings: SweepSettings, pool: ConnectionPool, model: str, on_progress: OnProgress
    ) -> None:
        self._settings = settings
        self._on_progress = on_progress
        self._template = RequestTemplate(
            endpoint=settings.endpoint,
            model=model,
            stream=settings.stream,
            temperature=settings.temperature,
            ignore_eos=settings.ignore_eos,
        )
        self._client = Client(
            pool,
            ClientSettings(
                path=self._template.path,
                stream=settings.stream,
                timeout_s=settings.timeout_s,
                api_key=settings.api_key,
            ),
        )
        self.summaries: list[LevelSummary] = []

    async def probe(self) -> TextFit | None:
        """Ask the server how many tokens words make, where the load has lengths. InputError where
        it does not answer."""
        first = self._settings.load.draw(RequestPlace(level=1, warm_up=True, index=0))
        if first.text:
            return None
        few, many = probe_words(len(first.prefix) + len(first.units))
        few_tokens, many_tokens = await self._count(few), await self._count(many)
        return fit_text((few, many), (few_tokens, many_tokens))

    async def _count(self, words: int) -> int:
        """Return the server's count of a prompt of so many words."""
        units = tuple(_PROBE_STEP * at % NUM_UNITS for at in range(words))  # of all kinds
        body = self._template.body(DrawnRequest(units=units, max_tokens=1), None)
        outcome = await self._client.ask(body, time.perf_counter())
        if outcome.failure or outcome.usage is None:
            raise InputError(
                f"a first question failed: {outcome.failure or 'no usage in the answer'}"
                + (f": {outcome.detail}" if outcome.detail else ""),
                hint="the server must answer /chat/completions with usage; --no-ignore-eos "
                "leaves out a field that not all servers know",
            )
        return outcome.usage.prompt_tokens

    async def play(self, fit: TextFit | None) -> None:
        """Play all levels. A cancellation leaves the summary of the level that it cut short."""
        for number, level in enumerate(self._settings.levels, 1):
            failed_warm_up = await self._warm_up(number, level, fit) if level.warm_up else 0
            await self._level(number, level, fit, failed_warm_up)

    async def _warm_up(self, number: int, level: Level, fit: TextFit | None) -> int:
        """Return how many requests failed."""
        warm_up = Level(
            concurrency=level.concurrency or min(level.warm_up, 8), requests=level.warm_up
        )
        tally = Tally(lambda outcome: None)
        await run_closed(
            self._client, lambda index: self._body(number, index, fit, True), warm_up, tally
        )
        return sum(bool(outcome.failure) for outcome in tally.outcomes)

    async def _level(
        self, number: int, level: Level, fit: TextFit | None, failed_warm_up: int
    ) -> None:
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        failed = 0

        def tell(is_over: bool) -> None:
            self._on_progress(
                LevelProgress(
                    level=level,
                    number=number,
                    num_levels=len(self._settings.levels),
                    ok=len(tally.outcomes) - failed,
                    failed=failed,
                    elapsed_s=time.perf_counter() - begun_s,
                    is_over=is_over,
                )
            )

        def count(outcome: RequestResult) -> None:
            nonlocal failed
            failed += bool(outcome.failure)
            tell(False)

        tally = Tally(count)
        tell(False)

        def body_at(index: int) -> bytes:
            return self._body(number, index, fit, False)

        try:
            if level.rate_per_s:
                seed = (self._settings.seed, _ARRIVALS, number)
                await run_open(self._client, body_at, level, tally, seed=seed)
            else:
                await run_closed(self._client, body_at, level, tally)
        finally:
            cpu_s = time.process_time() - begun_cpu_s
            self.summaries.append(
                summarize(
                    level,
                    tally.outcomes,
                    failed_warm_up=failed_warm_up,
                    unfinished=tally.unfinished,
                    client_cpu_s=cpu_s,
                )
            )
            tell(True)

    def _body(self, number: int, index: int, fit: TextFit | None, warm_up: bool) -> bytes:
        place = RequestPlace(level=number, warm_up=warm_up, index=index)
        return self._template.body(self._settings.load.draw(place), fit)


async def _until_interrupt(work: Coroutine[Any, Any, None]) -> bool:
    """Run it; return whether it came to its end. Ctrl-C cuts it short. Signals belong to the main
    thread; elsewhere nothing is caught."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    is_main = threading.current_thread() is threading.main_thread()
    is_cut = False

    def cut() -> None:
        nonlocal is_cut
        is_cut = True
        task.cancel()

    if is_main:
        loop.add_signal_handler(signal.SIGINT, cut)
    try:
        await task
    except asyncio.CancelledError:
        if not is_cut:
            raise
    finally:
        if is_main:
            loop.remove_signal_handler(signal.SIGINT)
    return not is_cut
