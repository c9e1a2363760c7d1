"""A server on a GPU, from start to streams. In: a CUDA device; with --peer-site a folder that has
vLLM's packages. Out: by level of concurrency tokens per second, TTFT and ITL of `gyre serve`, of
vLLM's server and of our engine in process, which is the limit; seconds from start to ready. Run:
python bench/serve_gpu.py [--peer-site FOLDER] [--record].

All three play 1,024 tokens in and out, on dummy weights, in a closed loop with the same prompts.
Both servers are asked by `gyre bench serve`. They run one after the other, each on the whole GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import string
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tokenizers
import torch

from gyre.benchmark.loads import Lengths, RandomLoad, RequestPlace
from gyre.benchmark.summary import percentiles
from gyre.core.records import Request, Sampling
from gyre.engine.engine import NativeEngine
from gyre.launch.factories import load_policy, make_engine, make_machine
from gyre.launch.run_folder.run_folder import find_model
from peers.vllm_gpu import COMMON, SHAPES
from record import parser, say
from servers import GYRE, START_S, Server, free_port, is_well, play, running

TOKENS, TEMPERATURE, CONTEXT = 1024, 0.6, 4096
MOST_RUNNING = 256
LOOK_S = 0.02  # between two looks at a server that starts
ENGINE = {"max_running": MOST_RUNNING, "kv_fraction": 0.85}
# no hub is asked; NVLink multicast is off, which a shared host may forbid
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    options.add_argument(
        "--levels", default="1:3,8:16,32:64,128:256,256:512", help="CONCURRENCY:REQUESTS, …"
    )
    options.add_argument("--peer-site", type=Path, help="folder with vLLM's packages")
    options.add_argument("--token-budget", type=int, default=8192, help="vLLM's own on an H100")
    options.add_argument("--scratch", type=Path, help="keep logs there, and parts for a next call")
    options.add_argument("--starts", type=int, default=2, help="of ours; the first compiles")
    options.add_argument(
        "--parts", default="peer,ours,engine", help="peer, ours, engine, as far as wanted"
    )
    options.add_argument("--in-process", type=Path, help="(what part engine starts)")
    args = options.parse_args()
    if args.in_process:
        args.in_process.write_text(json.dumps(asyncio.run(measure_engine(args))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.scratch or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model", args.shape)
        bench(args, folder)


def bench(args: Namespace, folder: Path) -> None:
    kept = folder / "parts.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    parts = {"peer": measure_peer, "ours": measure_ours, "engine": measure_engine_apart}
    for name in args.parts.split(","):
        found[name] = parts[name](args, folder)
        kept.write_text(json.dumps(found, indent=2) + "\n")
        print(name, json.dumps(found[name]), flush=True)
    if "ours" not in found:
        return
    level = max(found["ours"]["levels"], key=int)
    value = {
        name: one["levels"][level]["tokens_per_s"]
        for name, one in found.items()
        if level in one["levels"]
    }
    peer = None
    if "peer" in value:
        peer = {"name": f"vLLM {found['peer']['version']}", "value": value["peer"], **found["peer"]}
    say(
        args,
        name=f"serve_gpu_{args.shape.replace('.', '_')}",
        unit=f"tokens/s at {level} at a time",
        ours=value["ours"],
        peer=peer,
        limit=value.get("engine"),
        settings={
            "tokens": f"{TOKENS} in and out",
            "levels": args.levels,
            "temperature": TEMPERATURE,
            "dtype": "bfloat16",
            "token_budget": args.token_budget,
            **ENGINE,
            "device": torch.cuda.get_device_name(),
            "limit_from": "our engine in process, by the same requests",
        },
        detail={name: one for name, one in found.items() if name != "peer"},
    )


def levels_of(args: Namespace) -> list[tuple[int, int]]:
    """Return (concurrency, requests) of each level."""
    pairs = (level.split(":") for level in args.levels.split(","))
    return [(int(concurrency), int(requests)) for concurrency, requests in pairs]


def overrides(args: Namespace) -> list[str]:
    """Return our engine's settings as a command line says them."""
    settings = {**ENGINE, "token_budget": args.token_budget}
    return [f"engine.{key}={value}" for key, value in settings.items()]


# -- the model


def write_model(folder: Path, shape: str) -> None:
    """Write a config, and a tokenizer of as many entries, each of which has a text: no weights."""
    if (folder / "tokenizer.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **SHAPES[shape], "max_position_embeddings": CONTEXT}
    config["transformers_version"] = "4.51.0"  # without it the loader asks the hub about a fix
    (folder / "config.json").write_text(json.dumps(config))
    num_words = COMMON["bos_token_id"]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(letters)}
    merges: list[tuple[str, str]] = []
    for size in range(2, 5):
        words = ("".join(word) for word in product(string.ascii_lowercase, repeat=size))
        for word in islice(words, num_words - len(vocab)):
            merges.append((word[:-1], word[-1]))
            vocab[word] = len(vocab)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    rest = COMMON["vocab_size"] - backend.get_vocab_size()
    backend.add_tokens([f"<extra_{number}>" for number in range(rest)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "model_max_length": CONTEXT,
            }
        )
    )


# -- servers


def measure_ours(args: Namespace, folder: Path) -> dict[str, Any]:
    """Start as often as asked, and play the levels on the last one."""
    starts, levels, cpu = [], {}, {}
    for number in range(args.starts):
        argv = [*GYRE, "serve", str(folder / "model"), "--load-format", "dummy", "--json"]
        port = free_port()
        argv += ["--port", str(port)]
        argv += [part for change in overrides(args) for part in ("--set", change)]
        log = folder / f"ours_{number}.log"
        with started(argv, {**os.environ, **ENVIRONMENT}, log, port, "/health/ready") as (
            server,
            start_s,
        ):
            starts.append({"start_s": round(start_s, 2), "events": start_events(log)})
            if number == args.starts - 1:
                levels, cpu = play_levels(server, args, folder)
    return {"starts": starts, "levels": levels, "cpu_share": cpu}


def measure_peer(args: Namespace, folder: Path) -> dict[str, Any]:
    port = free_port()
    program = "from vllm.entrypoints.cli.main import main; main()"
    argv = [sys.executable, "-c", program, "serve", str(folder / "model")]
    argv += ["--load-format", "dummy", "--max-model-len", str(CONTEXT), "--port", str(port)]
    argv += ["--host", "127.0.0.1", "--no-enable-log-requests", "--gpu-memory-utilization", "0.9"]
    argv += ["--disable-uvicorn-access-log", "--generation-config", "vllm"]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": str(args.peer_site),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    }
    with started(argv, environment, folder / "peer.log", port, "/health") as (server, start_s):
        levels, cpu = play_levels(server, args, folder)
    version = next(args.peer_site.glob("vllm-*.dist-info")).name.split("-")[1].removesuffix(".dist")
    return {
        "version": version,
        "starts": [{"start_s": round(start_s, 2)}],
        "levels": levels,
        "cpu_share": cpu,
    }


@contextlib.contextmanager
def started(
    argv: list[str], environment: Mapping[str, str], log: Path, port: int, path: str
) -> Iterator[tuple[Server, float]]:
    """Start a server; yield it with the seconds to the first 200 of `path`."""
    url, begun_s = f"http://127.0.0.1:{port}", time.monotonic()
    with running(argv, environment, log, stdout=subprocess.DEVNULL) as process:
        while not is_well(url + path):
            if process.poll() is not None or time.monotonic() > begun_s + START_S:
                raise SystemExit(f"{argv[:6]} did not start:\n{log.read_text()[-6000:]}")
            time.sleep(LOOK_S)
        yield Server(url, psutil.Process(process.pid)), time.monotonic() - begun_s


def start_events(log: Path) -> list[dict[str, Any]]:
    """Return what the server told of its start."""
    rows = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    kinds = ("engine.loaded", "engine.started", "engine.graphs_captured", "serve.ready")
    return [row for row in rows if row["kind"] in (*kinds, "engine.prefill_kernel")]


def play_levels(
    server: Server, args: Namespace, folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Play each level; return its numbers, and the share of a core that each process took."""
    levels, shares = {}, {}
    for concurrency, requests in levels_of(args):
        load = {
            "input-tokens": TOKENS,
            "output-tokens": TOKENS,
            "concurrency": concurrency,
            "requests": requests,
            "warm-up": 0,
            "temperature": TEMPERATURE,
            "seed": concurrency,
        }
        if concurrency == levels_of(args)[0][0]:  # kernels that only a request compiles
            play(server, "--stream", {**load, "output-tokens": 16, "seed": 0}, folder)
        before_s, begun_s = cpu_by_process_s(server.process), time.monotonic()
        found = play(server, "--stream", load, folder)
        wall_s = time.monotonic() - begun_s
        after_s = cpu_by_process_s(server.process)
        shares[concurrency] = [
            round((after_s[pid] - before_s.get(pid, 0.0)) / wall_s, 2) for pid in after_s
        ]
        levels[str(concurrency)] = summary_of(found["levels"][0])
    return levels, shares


def cpu_by_process_s(process: psutil.Process) -> dict[int, float]:
    """Processor time of a server's process and of its workers."""
    times = {}
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            spent = one.cpu_times()
            times[one.pid] = spent.user + spent.system
    return times


def summary_of(level: Mapping[str, Any]) -> dict[str, float]:
    return {
        "tokens_per_s": round(level["output_tokens_per_s"], 1),
        **{
            f"{name}_{rank}_ms": round(level[name][f"{rank}_ms"], 2)
            for name in ("ttft", "itl")
            for rank in ("p50", "p90", "p99")
        },
        "chunks": level["chunks"],
        "client_cpu_share": round(level["client_cpu_share"], 3),
    }


# -- our engine in process


def measure_engine_apart(args: Namespace, folder: Path) -> dict[str, Any]:
    """In a process of its own, since the GPU is kept until a process ends."""
    output = folder / "engine.json"
    argv = [sys.executable, __file__, "--in-process", str(output), "--scratch", str(folder)]
    argv += ["--levels", args.levels, "--token-budget", str(args.token_budget)]
    subprocess.run(argv, check=True, env={**os.environ, **ENVIRONMENT}, timeout=START_S)
    return json.loads(output.read_text())


async def measure_engine(args: Namespace) -> dict[str, Any]:
    model, config = find_model(args.scratch / "model", None, overrides(args))
    machine, events = make_machine(config), []
    loop = asyncio.get_running_loop()
    policy = await loop.run_in_executor(
        machine.compute,
        lambda: load_policy(model, machine, load_format="dummy"),
    )
    engine = make_engine(
        config.engine,
        policy,
        machine,
        lambda kind, **fields: events.append({"kind": kind, **fields}),
        shared_weights=False,
    )
    await engine.start(dummy=False)
    levels = {}
    for concurrency, requests in levels_of(args):
        if not levels:
            await play_engine(engine, concurrency, requests, seed=0, max_tokens=16)
        levels[str(concurrency)] = await play_engine(
            engine, concurrency, requests, seed=concurrency
        )
    await engine.terminate()
    return {"levels": levels}


async def play_engine(
    engine: NativeEngine, concurrency: int, requests: int, *, seed: int, max_tokens: int = TOKENS
) -> dict[str, float]:
    """Play a closed loop of the load that the servers get."""
    load = RandomLoad(lengths=Lengths(input_tokens=TOKENS, output_tokens=max_tokens), seed=seed)
    prompts = [
        np.asarray(load.draw(RequestPlace(level=1, warm_up=False, index=index)).units, np.int32)
        for index in range(requests)
    ]
    places, first_s, gaps_s = iter(range(requests)), [], []

    async def one_client() -> None:
        for place in places:
            request = Request(
                request_id=f"{seed}.{max_tokens}.{place}",
                tokens=prompts[place],
                sampling=Sampling(temperature=TEMPERATURE, max_tokens=max_tokens, ignore_eos=True),
                seed=place,
                chunk_tokens=1,
            )
            begun_s, times_s = time.perf_counter(), []
            async for _ in engine.submit(request):
                times_s.append(time.perf_counter())
            first_s.append(times_s[0] - begun_s)
            gaps_s.extend(np.diff(times_s).tolist())

    begun_s = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    wall_s = time.perf_counter() - begun_s
    ttft, itl = percentiles(first_s), percentiles(gaps_s)
    return {
        "tokens_per_s": round(requests * max_tokens / wall_s, 1),
        "ttft_p50_ms": round(ttft.p50_ms, 2),
        "ttft_p99_ms": round(ttft.p99_ms, 2),
        "itl_p50_ms": round(itl.p50_ms, 2),
        "itl_p99_ms": round(itl.p99_ms, 2),
    }


if __name__ == "__main__":
    main()
