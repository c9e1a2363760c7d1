"""/metrics: known requests through the real application, and by how much each number changed."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyre.cluster.worker.endpoints import add_stats
from gyre.core.chunks import TokenStream
from gyre.core.errors import RankError
from gyre.core.events import check_event
from gyre.core.records import (
    EngineStats,
    Health,
    ReplicaStatus,
    Request,
    Timing,
    TokenChunk,
)
from gyre.server.app import make_app
from gyre.server.generation import ServedModel
from gyre.server.metrics import server_metrics
from gyre.server.metrics.engine_metrics import EngineMetrics
from gyre.server.metrics.server_metrics import ServerMetrics, inspect_one, token_buckets
from gyre.text.tokenizer import train_tokenizer
from scraped import Samples, counts_changed, read_samples
from served_cases import Place, served

TOKENIZER = train_tokenizer(["what is one and one"], vocab_size=300, min_share=0.0)
Script = Callable[[TokenStream, Request], None]
PLACE = Place(device=torch.device("cpu"), dtype=torch.float32, page_tokens=8)


class ScriptedEngine:
    """Answers each request as its script says, in the order in which they come."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = iter(scripts)
        self._streams: dict[str, TokenStream] = {}
        self.aborted = 0
        self.is_hung = False

    def submit(self, request: Request) -> AsyncIterator[TokenChunk]:
        stream = self._streams[request.request_id] = TokenStream(request, 8, self.abort)
        next(self._scripts)(stream, request)
        return stream

    async def abort(self, request_id: str) -> None:
        self.aborted += 1
        self._streams[request_id].end()

    async def health(self) -> Health:
        if self.is_hung:
            await asyncio.Event().wait()
        return Health(ok=True)

    async def stats(self) -> EngineStats:
        return STATS

    async def interrupt(self, *, deadline_s: float) -> Any:
        raise NotImplementedError

    async def drain(self, *, deadline_s: float) -> None:
        raise NotImplementedError


STATS = EngineStats(
    running=3, waiting=2, prompt_tokens=70, prefix_hit_tokens=40, generated_tokens=50,
    preemptions=1, refused=0, steps=9, pages_used=6, pages_total=8, version=4,
    page_tokens=16, prefix_page_tokens=16,
)  # fmt: skip


def tokens(index: int, count: int, finish: Any = None, timing: Timing | None = None) -> Script:
    def script(stream: TokenStream, request: Request) -> None:
        zeros = np.zeros(count, np.float32)
        stream.push(
            TokenChunk(
                request_id=request.request_id,
                index=index,
                tokens=np.full(count, TOKENIZER.encode("o")[0], np.int32),
                logprobs=zeros,
                raw_logprobs=zeros,
                versions=np.zeros(count, np.int32),
                finish=finish,
                timing=timing,
            )
        )

    return script


def ended(finish: Any) -> Script:
    return lambda stream, request: stream.push(
        TokenChunk.end(request.request_id, 0, finish, "a reason")
    )


def broken(error: Exception) -> Script:
    return lambda stream, request: stream.end(error)


def after(*scripts: Script) -> Script:
    def script(stream: TokenStream, request: Request) -> None:
        for one in scripts:
            one(stream, request)

    return script


class Bench:
    def __init__(self, engine: Any, *, logs_access: bool = False) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        model = ServedModel(
            name="m",
            tokenizer=TOKENIZER,
            context_tokens=64,
            render=lambda messages, tools: TOKENIZER.encode(messages[0].content),
            find_refusal=lambda request: None,
        )
        ticks = itertools.count(1)
        self.metrics = ServerMetrics(
            "m",
            context_tokens=64,
            inspect=inspect_one(engine),
            clock=lambda: next(ticks) / 4,  # each look at it is a quarter of a second later
        )
        self.app = make_app(
            engine,
            model,
            emit=lambda kind, **fields: self.events.append((kind, fields)),
            metrics=self.metrics,
            logs_access=logs_access,
        )
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://m")

    async def ask(self, **fields: Any) -> int:
        body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4} | fields
        return (await self.client.post("/v1/completions", json=body)).status_code

    async def scrape(self) -> Samples:
        return read_samples((await self.client.get("/metrics")).text)

    async def hang_up(self, after_messages: int, **fields: Any) -> None:
        """Ask for a stream, and leave once so many messages have come."""
        body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "stream": True} | fields
        came = asyncio.Event()
        received = iter([{"type": "http.request", "body": json.dumps(body).encode()}])
        sent = 0

        async def receive() -> Any:
            for message in received:
                return message
            await came.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal sent
            sent += 1
            if sent == after_messages:
                came.set()

        if after_messages == 0:
            came.set()
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [], "http_version": "1.1", "scheme": "http", "root_path": "",
        }  # fmt: skip
        await self.app(scope, receive, send)


def go(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))  # type: ignore[arg-type]


def response(status: int, route: str = "/v1/completions") -> tuple[str, ...]:
    return "gyre_http_responses_total", f"route={route}", f"status={status}"


def error(code: str) -> tuple[str, ...]:
    return "gyre_request_errors_total", f"code={code}"


def success(reason: str) -> tuple[str, ...]:
    return "vllm:request_success_total", f"finished_reason={reason}"


SCRAPED = {response(200, "/metrics"): 1}  # the scrape before counts in the next
TIMED = ("vllm:time_to_first_token_seconds_count",), ("vllm:request_queue_time_seconds_count",)
DONE = tuple(
    (f"vllm:{name}_count",)
    for name in (
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_max_tokens",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
    )
)
# once for all completions of a request
WHOLE = (
    ("vllm:request_params_n_count",),
    ("vllm:request_max_num_generation_tokens_count",),
)


def test_each_way_to_end_changes_exactly_its_numbers() -> None:
    timing = Timing(started_s=1.0, first_token_s=1.25)
    cases: list[tuple[Script | None, dict[str, Any], int, Samples]] = [
        (
            tokens(0, 4, "length", timing),
            {},
            200,
            {success("length"): 1, **dict.fromkeys((*TIMED, *DONE, *WHOLE), 1)},
        ),
        (
            after(tokens(0, 1, None, timing), tokens(0, 1), tokens(0, 1, "stop")),
            {"stream": True},
            200,
            {
                success("stop"): 1,
                **dict.fromkeys((*TIMED, *DONE, *WHOLE), 1),
                ("vllm:inter_token_latency_seconds_count",): 2,
            },
        ),
        (
            after(tokens(0, 2, "stop", timing), tokens(1, 4, "length", timing)),
            {"n": 2},
            200,
            {
                success("stop"): 1,
                success("length"): 1,
                **dict.fromkeys((*TIMED, *DONE), 2),
                **dict.fromkeys(WHOLE, 1),
            },
        ),
        (None, {"tools": []}, 400, {error("invalid_value"): 1}),
        (None, {"model": "gpt"}, 404, {error("model_not_found"): 1}),
        (ended("refused"), {}, 429, {error("queue_full"): 1}),
        (ended("deadline"), {}, 504, {error("deadline_exceeded"): 1, success("error"): 1}),
        (
            broken(RankError("every engine is lost")),
            {"n": 2, "stream": True},
            503,
            {error("engine_unavailable"): 1, success("error"): 2},
        ),
        (
            after(tokens(0, 1, None, timing), ended("abort")),
            {"stream": True},
            200,  # the stream had begun
            {error("engine_unavailable"): 1, success("error"): 1, **dict.fromkeys(TIMED, 1)},
        ),
        (broken(ValueError("ours")), {}, 500, {error("server_fault"): 1, success("error"): 1}),
        (
            after(tokens(0, 1), broken(ValueError("ours"))),
            {"stream": True},
            200,
            {error("server_fault"): 1, success("error"): 1},
        ),
    ]

    async def work() -> None:
        bench = Bench(ScriptedEngine(*(script for script, *_ in cases if script is not None)))
        before = await bench.scrape()
        for _, fields, status, expected in cases:
            assert await bench.ask(**fields) == status
            now = await bench.scrape()
            changed = counts_changed(before, now)
            assert changed == {response(status): 1, **SCRAPED, **expected}, fields
            assert now[("gyre_requests_in_flight",)] == 0
            before = now

    go(work)


@pytest.mark.parametrize(("messages", "status"), [(0, 499), (2, 200)])
def test_a_client_that_hangs_up_is_counted_once(messages: int, status: int) -> None:
    async def work() -> None:
        engine = ScriptedEngine(tokens(0, 1) if messages else lambda stream, request: None)
        bench = Bench(engine)
        before = await bench.scrape()
        await bench.hang_up(messages)
        assert counts_changed(before, await bench.scrape()) == {
            response(status): 1,
            **SCRAPED,
            ("gyre_disconnects_total",): 1,
            success("abort"): 1,
        }
        assert engine.aborted == 1

    go(work)


def test_times_are_of_the_clock_and_fall_into_vllms_buckets() -> None:
    async def work() -> None:
        timing = Timing(started_s=0.375, first_token_s=0.4375)
        script = after(tokens(0, 1, None, timing), tokens(0, 1), tokens(0, 1, "stop"))
        bench = Bench(ScriptedEngine(script))
        assert await bench.ask(stream=True) == 200  # submitted at 0.25; chunks 0.25 s apart
        found = await bench.scrape()
        sums = {key[0]: value for key, value in found.items() if key[0].endswith("_sum")}
        assert sums == {
            "vllm:request_queue_time_seconds_sum": 0.125,
            "vllm:time_to_first_token_seconds_sum": 0.1875,
            "vllm:request_prefill_time_seconds_sum": 0.0625,
            "vllm:request_decode_time_seconds_sum": 0.5625,
            "vllm:request_inference_time_seconds_sum": 0.625,
            "vllm:request_time_per_output_token_seconds_sum": 0.28125,
            "vllm:inter_token_latency_seconds_sum": 0.5,
            "vllm:e2e_request_latency_seconds_sum": 0.75,
            "vllm:request_prompt_tokens_sum": 3,
            "vllm:request_generation_tokens_sum": 3,
            "vllm:request_params_n_sum": 1,
            "vllm:request_max_num_generation_tokens_sum": 3,
            "vllm:request_params_max_tokens_sum": 4,
        }
        name = "vllm:time_to_first_token_seconds_bucket"
        assert (found[name, "le=0.1"], found[name, "le=0.25"]) == (0, 1)

    go(work)


def test_a_cache_whose_pages_prompts_do_not_share_has_pages_of_a_size() -> None:
    own = replace(STATS, prefix_page_tokens=0)
    both = add_stats([own, own], refused=0, version=4)
    for stats, said in ((both, "False"), (STATS, "True")):
        metrics = EngineMetrics("m")
        metrics.update([ReplicaStatus(name="engine-0", state="ready", stats=stats)])
        (cache,) = [one for one in metrics.collect() if one.name == "vllm:cache_config_info"]
        (sample,) = cache.samples
        assert sample.labels["block_size"] == "16"
        assert sample.labels["enable_prefix_caching"] == said


def test_engine_numbers_are_those_of_its_stats() -> None:
    async def work() -> None:
        found = await Bench(ScriptedEngine()).scrape()
        engine = {key[0]: value for key, value in found.items() if "engine=0" in key}
        assert engine.pop("gyre_engine_stats_age_seconds") == 0.25  # one look at the clock
        assert engine == {
            "gyre_engine_routed_requests_total": 0,
            "gyre_engine_believed_hit_tokens_total": 0,
            "gyre_engine_sessions_kept_total": 0,
            "gyre_engine_sessions_moved_total": 0,
            "gyre_engine_ejections_total": 0,
            "gyre_engine_routing_share": 1,
            "gyre_engine_routing_load": 0,
            "gyre_engine_routing_prefix_pages": 0,
            "vllm:num_requests_running": 3,
            "vllm:num_requests_waiting": 2,
            "vllm:kv_cache_usage_perc": 0.75,
            "vllm:cache_config_info": 1,
            "vllm:prefix_cache_queries_total": 70,
            "vllm:prefix_cache_hits_total": 40,
            "vllm:prompt_tokens_total": 70,
            "vllm:generation_tokens_total": 50,
            "vllm:num_preemptions_total": 1,
            "gyre_engine_steps_total": 9,
            "gyre_engine_recomputed_tokens_total": 0,
            "gyre_engine_outstanding_tokens": 0,
            "gyre_engine_up": 1,
            "gyre_weights_version": 4,
        }
        assert found["gyre_replicas", "state=ready"] == 1
        (cache,) = [key for key in found if key[0] == "vllm:cache_config_info"]
        assert {"block_size=16", "num_gpu_blocks=8", "enable_prefix_caching=True"} <= set(cache)

    go(work)


def test_a_scrape_has_an_answer_though_the_engines_have_none(monkeypatch) -> None:
    async def work() -> None:
        engine = ScriptedEngine()
        bench = Bench(engine)
        assert (await bench.scrape())["gyre_engine_up", "engine=0"] == 1
        engine.is_hung = True
        monkeypatch.setattr(server_metrics, "SCRAPE_S", 0.05)
        found = await bench.scrape()
        assert found["gyre_engine_up", "engine=0"] == 0
        assert found["gyre_replicas", "state=unwell"] == 1
        assert found["vllm:generation_tokens_total", "engine=0"] == 50, "what was last known"
        age = found["gyre_engine_stats_age_seconds", "engine=0"]
        assert (await bench.scrape())["gyre_engine_stats_age_seconds", "engine=0"] > age > 0.25
        assert found[response(200, "/metrics")] == 1
        engine.is_hung = False
        assert (await bench.scrape())["gyre_engine_up", "engine=0"] == 1

    go(work)


def test_counters_of_a_lost_engine_stay_and_its_gauges_go() -> None:
    async def inspect() -> Sequence[ReplicaStatus]:
        return [
            ReplicaStatus(name="engine-0", state=state, stats=STATS if state == "ready" else None),
            ReplicaStatus(name="engine-1", state="starting", reason="it waits for weights"),
        ]

    async def work() -> None:
        nonlocal state
        metrics = ServerMetrics("m", context_tokens=64, inspect=inspect)
        before = read_samples((await metrics.expose()).decode())
        state = "lost"
        after = read_samples((await metrics.expose()).decode())
        assert counts_changed(before, after) == {}
        gone = {key[0] for key in before if key not in after}
        assert gone == {
            "vllm:cache_config_info",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "gyre_weights_version",
        }
        assert after["gyre_engine_up", "engine=0"] == after["gyre_engine_up", "engine=1"] == 0

    state: Any = "ready"
    go(work)


def test_the_cpu_engine_counts_what_was_asked_of_it() -> None:
    """Prompts of 3 pages of 8 tokens: the second one finds two whole pages, the third shares all."""

    async def work() -> None:
        async with served(PLACE) as place:
            bench = Bench(place.engine)
            bench.metrics.clock = bench.metrics.engines._clock = asyncio.get_running_loop().time
            before = await bench.scrape()
            prompt = list(range(24))
            assert await bench.ask(prompt=prompt, max_tokens=5) == 200
            assert await bench.ask(prompt=prompt, max_tokens=7, n=2, stream=True) == 200
            after = await bench.scrape()
            changed = counts_changed(before, after)
            steps = changed.pop(("gyre_engine_steps_total", "engine=0"))
            gaps = changed.pop(("vllm:inter_token_latency_seconds_count",))
            assert steps >= 12 and gaps == 2 * 6
            assert any(f"block_size={PLACE.page_tokens}" in key for key in after)
            assert changed == {
                response(200): 2,
                **SCRAPED,
                success("length"): 3,
                **dict.fromkeys((*TIMED, *DONE), 3),
                **dict.fromkeys(WHOLE, 2),
                ("vllm:prompt_tokens_total", "engine=0"): 3 * 24,
                ("vllm:prefix_cache_queries_total", "engine=0"): 3 * 24,
                ("vllm:prefix_cache_hits_total", "engine=0"): 16 + 24,
                ("vllm:generation_tokens_total", "engine=0"): 5 + 2 * 7,
            }
            waits = after[("vllm:request_queue_time_seconds_sum",)]
            firsts = after[("vllm:time_to_first_token_seconds_sum",)]
            ends = after[("vllm:e2e_request_latency_seconds_sum",)]
            assert 0 <= waits <= firsts <= ends

    go(work)


def test_the_access_log_has_no_content() -> None:
    async def work() -> None:
        bench = Bench(
            ScriptedEngine(tokens(0, 4, "length"), lambda stream, request: None), logs_access=True
        )
        headers = {"authorization": "Bearer a-secret"}
        body = {"model": "m", "prompt": "what is", "max_tokens": 4}
        answer = await bench.client.post("/v1/completions?key=a-secret", json=body, headers=headers)
        await bench.client.get("/nowhere" + "x" * 500)
        await bench.hang_up(0)
        for kind, fields in bench.events:
            check_event(kind, fields)
            assert fields.pop("seconds") >= 0
        (_, asked), (_, unknown), (_, left) = bench.events
        assert asked == {
            "method": "POST",
            "path": "/v1/completions",
            "status": 200,
            "request_id": answer.json()["id"],
            "tokens": 4,
        }
        assert (unknown["status"], unknown["request_id"], len(unknown["path"])) == (404, None, 200)
        assert left["status"] == 499 and left["tokens"] == 0
        assert "secret" not in str(bench.events) and "what is" not in str(bench.events)

    go(work)


def test_paths_that_clients_choose_are_one_series() -> None:
    async def work() -> None:
        bench = Bench(ScriptedEngine(), logs_access=False)
        for place in range(5):
            await bench.client.get(f"/nowhere/{place}")
        await bench.client.get("/v1/completions")
        changed = counts_changed({}, await bench.scrape())
        assert changed[response(404, "other")] == 5 and changed[response(405)] == 1
        assert not bench.events

    go(work)


@given(st.integers(1, 10**7))
def test_token_buckets_are_one_two_five_up_to_the_context(most: int) -> None:
    found = token_buckets(most)
    assert found == sorted(set(found)) and found[-1] <= most < found[-1] * 2.5 + 1
    assert {str(bucket).rstrip("0") for bucket in found} <= {"1", "2", "5"}
