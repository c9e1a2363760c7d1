"""Routing over the replicas of one server: by prefix, against round robin. In: --mode. Out: a
record. Run: python bench/routing.py --mode cpu|gpu|decision [--record].

cpu       `gyre serve --replicas 2` on a CPU, with a model of 3.3 M parameters.
gpu       The same on two GPUs, with Qwen3-8B's shape and random weights.
decision  What one choice costs the server: a prompt of 4,096 tokens, 8 replicas.

Requests share nine tenths of 4,096 prompt tokens with others of their prefix. The KV of all
prefixes is 1.6 times what one replica's cache holds: it fits into two caches, and not into one.
Prefixes are drawn by Zipf's law. Policies alternate, each time on a server of its own whose caches
the warm-up has filled; both play the same requests. Tokens per second are those of the answers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
import tracemalloc
import urllib.request
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import torch

from engine import SHAPES
from engine_cpu import SPECS
from gyre.cluster.engine_pool.load_balancer import LoadBalancer
from gyre.cluster.engine_pool.replica import EngineReplica
from gyre.core.records import EngineStats, Request, Sampling
from gyre.engine.config import PAGE_TOKENS
from gyre.models.decoder import Decoder
from gyre.models.hub.folders import CONFIG_FILE
from gyre.models.hub.load import export_hub
from gyre.models.init import init_weights
from gyre.models.spec import ModelSpec, hub_config_from_spec
from gyre.text.tokenizer import train_tokenizer
from record import parser, say
from servers import GYRE, HERE, Server, cpu_s, play, running

POLICIES = ("round_robin", "prefix")
REPLICAS = 2
PREFIX_TOKENS, OWN_TOKENS = 3686, 410  # nine tenths of 4,096, and the rest
CONTEXT_TOKENS = 8192
KV_RATIO = 1.6  # of all prefixes to one replica's cache
SCRAPE_EVERY_S = 0.25
COUNTERS = {
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "believed": "gyre_engine_believed_hit_tokens_total",
    "requests": "gyre_engine_routed_requests_total",
}
WORKER = "gyre.cluster.worker.process"
Counts = dict[str, list[float]]  # by name, one number for each engine


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--mode", choices=("cpu", "gpu", "decision"), default="cpu")
    options.add_argument("--runs", type=int, default=2, help="of each policy; the median counts")
    options.add_argument("--prefixes", type=int, default=0, help="0: 24 on a CPU, 64 on GPUs")
    options.add_argument("--zipf", type=float, default=1.0)
    options.add_argument("--concurrency", type=int, default=0, help="0: 16 on a CPU, 64 on GPUs")
    options.add_argument("--output-tokens", type=int, default=32)
    options.add_argument("--requests", type=int, default=0, help="0: 240 on a CPU, 1,000 on GPUs")
    options.add_argument("--warm-up", type=int, default=0, help="0: 120 on a CPU, 500 on GPUs")
    args = options.parse_args()
    if args.mode == "decision":
        bench_decision(args)
        return
    on_gpu = args.mode == "gpu"
    args.prefixes = args.prefixes or (64 if on_gpu else 24)
    args.concurrency = args.concurrency or (64 if on_gpu else 16)
    args.requests = args.requests or (1000 if on_gpu else 240)
    args.warm_up = args.warm_up or (500 if on_gpu else 120)
    with tempfile.TemporaryDirectory() as scratch:
        bench_serving(args, Path(scratch), on_gpu=on_gpu)


def bench_serving(args: Namespace, folder: Path, *, on_gpu: bool) -> None:
    shape = SHAPES["8b"] if on_gpu else SPECS["3m"]
    spec = replace(shape, context_tokens=CONTEXT_TOKENS)
    make_model(spec, folder, with_weights=not on_gpu)
    page_tokens = PAGE_TOKENS["cuda" if on_gpu else "cpu"]
    num_pages = round(args.prefixes * PREFIX_TOKENS / KV_RATIO / page_tokens)
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for run in range(args.runs):
        for policy in POLICIES if run % 2 == 0 else POLICIES[::-1]:
            found[policy].append(
                measure(policy, run, args, folder, pages=(num_pages, page_tokens), on_gpu=on_gpu)
            )
    rates = {
        policy: statistics.median(run["tokens_per_s"] for run in runs)
        for policy, runs in found.items()
    }
    per_cpu_s = {
        policy: statistics.median(run["tokens_per_engine_cpu_s"] for run in runs)
        for policy, runs in found.items()
    }
    by_run = [
        ours["tokens_per_s"] / theirs["tokens_per_s"]
        for ours, theirs in zip(found["prefix"], found["round_robin"], strict=True)
    ]
    say(
        args,
        name=f"routing_{args.mode}",
        unit="tokens/s",
        ours=rates["prefix"],
        peer={"name": "cluster.routing = round_robin", "value": rates["round_robin"]},
        limit=None,
        settings={
            "parameters": spec.num_parameters,
            "replicas": REPLICAS,
            "prefixes": args.prefixes,
            "prefix_tokens": PREFIX_TOKENS,
            "own_tokens": OWN_TOKENS,
            "output_tokens": args.output_tokens,
            "kv_ratio": KV_RATIO,
            "pages_of_a_replica": num_pages,
            "page_tokens": page_tokens,
            "zipf": args.zipf,
            "concurrency": args.concurrency,
            "requests": args.requests,
            "warm_up": args.warm_up,
        },
        detail={
            "ratio": rates["prefix"] / rates["round_robin"],
            "ratio_by_run": [round(ratio, 3) for ratio in by_run],
            "ratio_per_engine_cpu_s": round(per_cpu_s["prefix"] / per_cpu_s["round_robin"], 3),
            **found,
            "load_average_1min": round(os.getloadavg()[0], 2),
        },
    )


def make_model(spec: ModelSpec, folder: Path, *, with_weights: bool) -> None:
    """Write a model folder, where asked with random weights."""
    texts = [f"{a} + {b} = {a + b}, so the answer is {a + b}." for a in range(50) for b in range(9)]
    tokenizer = train_tokenizer(texts, vocab_size=SPECS["3m"].vocab_size)
    if not with_weights:
        tokenizer.save(folder / "model")
        (folder / "model" / CONFIG_FILE).write_text(json.dumps(hub_config_from_spec(spec)))
        return
    tokenizer.save(folder / "tokenizer")
    decoder = Decoder(spec, device=torch.device("cpu"), dtype=torch.float32)
    init_weights(decoder, 0)
    export_hub(decoder, folder / "model", dtype=torch.float32, tokenizer_files=folder / "tokenizer")


def measure(
    policy: str, run: int, args: Namespace, folder: Path, *, pages: tuple[int, int], on_gpu: bool
) -> dict[str, Any]:
    """One server, a warm-up and a level of the load. `pages`: of each replica, and their size."""
    num_pages, page_tokens = pages
    argv = [*GYRE, "serve", str(folder / "model"), "--port", "0", "--json"]
    argv += ["--load-format", "dummy"] if on_gpu else []
    argv += ["--replicas", str(REPLICAS), "--set", f"cluster.routing={policy}"]
    argv += ["--set", f"engine.num_pages={num_pages}", "--set", f"engine.page_tokens={page_tokens}"]
    argv += ["--set", "engine.max_running=64", *([] if on_gpu else ["--set", "run.threads=1"])]
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    log = folder / "server.log"
    with running(argv, environment, log, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the server did not start:\n{log.read_text()[-3000:]}")
        server = Server(json.loads(line)["url"], psutil.Process(process.pid))
        scraper = Scraper(server, args.warm_up)
        level = play_prefixes(server, run, args, folder)
        return summarize(level, scraper.end(), num_tokens=args.requests * args.output_tokens)


def play_prefixes(server: Server, run: int, args: Namespace, folder: Path) -> dict[str, Any]:
    """One level of the load; every answer must be whole."""
    load = {
        "load": "prefix",
        "prefixes": args.prefixes,
        "prefix-tokens": PREFIX_TOKENS,
        "zipf": args.zipf,
        "input-tokens": OWN_TOKENS,
        "output-tokens": args.output_tokens,
        "concurrency": args.concurrency,
        "requests": args.requests,
        "warm-up": args.warm_up,
        "temperature": 0.0,
        "seed": run,
        "timeout-s": 600,
    }
    (level,) = play(server, "--no-stream", load, folder)["levels"]
    return level


def summarize(level: Mapping[str, Any], counts: Counts, *, num_tokens: int) -> dict[str, Any]:
    """Return what counts of one level: rates, latencies, and hits as the engines and the router
    counted them."""
    total = {name: sum(values) for name, values in counts.items()}
    return {
        "tokens_per_s": level["output_tokens_per_s"],
        "requests_per_s": level["requests_per_s"],
        "e2e_p50_ms": level["e2e"]["p50_ms"],
        "e2e_p99_ms": level["e2e"]["p99_ms"],
        "hit_share": round(total["hits"] / total["queries"], 4),
        "believed_hit_share": round(total["believed"] / total["queries"], 4),
        # on a CPU that others use too, this is less disturbed than tokens per second
        "tokens_per_engine_cpu_s": round(num_tokens / total["cpu_s"], 2),
        "requests_by_engine": counts["requests"],
    }


class Scraper:
    """Reads the server's counters from when the warm-up was routed."""

    def __init__(self, server: Server, warm_up: int) -> None:
        self._server, self._warm_up = server, warm_up
        self._begin: Counts | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> Counts:
        """Return how far each counter has grown since then."""
        self._ended.set()
        self._thread.join()
        last = scrape(self._server)
        assert self._begin is not None, "no scrape came between warm-up and end"
        return {
            name: [new - old for new, old in zip(last[name], begin, strict=True)]
            for name, begin in self._begin.items()
        }

    def _run(self) -> None:
        while self._begin is None and not self._ended.wait(SCRAPE_EVERY_S):
            counts = scrape(self._server)
            if sum(counts["requests"]) >= self._warm_up:
                self._begin = counts


def scrape(server: Server) -> Counts:
    """Return the counters, and the processor time of each engine's process."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30.0) as answer:
        lines = answer.read().decode().splitlines()
    there = [one for one in server.process.children() if one.status() != psutil.STATUS_ZOMBIE]
    engines = [one for one in there if WORKER in one.cmdline()]
    return {"cpu_s": [cpu_s(one) for one in engines]} | {
        name: [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric + "{")]
        for name, metric in COUNTERS.items()
    }


def bench_decision(args: Namespace) -> None:
    """Time choices in this process; engines are names without anything behind them."""
    found = {page_tokens: time_decisions(page_tokens) for page_tokens in (64, 16)}
    say(
        args,
        name="routing_decision",
        unit="us of processor time per decision",
        ours=found[64]["place_p50_us"],
        peer=None,
        limit=None,
        settings={"replicas": 8, "prompt_tokens": PREFIX_TOKENS + OWN_TOKENS, "page_tokens": 64},
        detail={f"pages_of_{page_tokens}": values for page_tokens, values in found.items()},
    )


def time_decisions(page_tokens: int, *, requests: int = 3000) -> dict[str, float]:
    """Return processor time of a choice and of what follows at a request's end, and bytes."""
    names = [f"engine-{number}" for number in range(8)]
    engines = [
        cast(EngineReplica, SimpleNamespace(name=name, still_s=0.0, unanswered=set()))
        for name in names
    ]
    none = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    pages = 48_000 * 16 // page_tokens
    stats = EngineStats(**none | {"prefix_page_tokens": page_tokens, "pages_total": pages})
    rng = np.random.default_rng(0)
    prefixes = rng.integers(0, 150_000, (64, PREFIX_TOKENS), np.int32)
    answer = [rng.integers(0, 150_000, 1, np.int32) for _ in range(128)]
    tracemalloc.start()
    balancer = LoadBalancer("prefix", names, ejection=None, seed=0, emit=lambda kind, **_: None)
    for engine in engines:
        balancer.learn(engine, stats)
    place_s, end_s, held_bytes, known = [], [], 0, 0
    for number in range(2 * requests):
        if number == requests:  # memory is looked at before, since that takes time
            held_bytes = tracemalloc.get_traced_memory()[0]
            known = sum(balancer.stats(engine, 0.0).believed_pages for engine in engines)
            tracemalloc.stop()
            place_s, end_s = [], []
        own = rng.integers(0, 150_000, OWN_TOKENS, np.int32)
        request = Request(
            request_id=str(number),
            tokens=np.concatenate([prefixes[rng.integers(64)], own]),
            sampling=Sampling(max_tokens=128),
            session_id=str(number % 500),
        )
        begun_s = time.thread_time()
        (placed,) = balancer.place([request], engines, outstanding={}, now_s=0.0)
        placed_s = time.thread_time()
        balancer.begin(placed)
        balancer.end_one(placed, answer, is_whole=True)
        balancer.release(placed)
        place_s.append(placed_s - begun_s)
        end_s.append(time.thread_time() - placed_s)
    return {
        "place_p50_us": round(float(np.median(place_s)) * 1e6, 1),
        "place_p99_us": round(float(np.percentile(place_s, 99)) * 1e6, 1),
        "end_p50_us": round(float(np.median(end_s)) * 1e6, 1),
        "known_pages": known,
        "bytes_per_page": round(held_bytes / known, 1),
    }


if __name__ == "__main__":
    main()
