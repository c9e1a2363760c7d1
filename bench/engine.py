"""Offline generation on one GPU or over tensor ranks, against vLLM and the roofline. In: CUDA
devices. Out: output tokens per second of the native engine on dummy weights, with the time by
kernel. Run: python bench/engine.py --shape 0.6b [--record]; over two GPUs of this host: --shape 32b
--tensor-ranks 2. With --device cpu and the shape "tiny" ranks meet over gloo, which shows only that
it runs.

The workload is nano-vllm's: 256 requests, prompts and outputs uniform 100 to 1,024 tokens, seed 0,
temperature 0.6, no stop. The clock runs from the first submit to the last token, prefill included.
Every run has prompts of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from gyre.core.chunks import collect
from gyre.core.records import Request, Sampling
from gyre.distributed.process_group import RankGroup, alone
from gyre.engine.config import EngineConfig, plan_engine, plan_num_pages
from gyre.engine.engine import NativeEngine
from gyre.engine.memory import free_device_bytes
from gyre.engine.tensor_group import enlist, follow, lead
from gyre.models.decoder import Decoder
from gyre.models.layers.tensor_parallel import ReplicatedRows
from gyre.models.spec import ModelSpec
from ranks import Ranks, Tell
from record import RECORDS, parser, say

COPY_BYTES_PER_S, MATMUL_FLOPS = 4.28e12, 794e12  # measured before, on another H200
COMMON = {
    "family": "qwen3",
    "vocab_size": 151_936,
    "num_kv_heads": 8,
    "head_dim": 128,
    "context_tokens": 4096,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "qkv_bias": False,
    "qk_norm": True,
    "eos_ids": (),
}
SHAPES = {
    "0.6b": ModelSpec(
        hidden_size=1024, num_layers=28, num_heads=16, mlp_size=3072, tied=True, **COMMON
    ),
    "8b": ModelSpec(
        hidden_size=4096, num_layers=36, num_heads=32, mlp_size=12_288, tied=False, **COMMON
    ),
    "32b": ModelSpec(
        hidden_size=5120, num_layers=64, num_heads=64, mlp_size=25_600, tied=False, **COMMON
    ),
}
SHAPES["70b"] = replace(
    SHAPES["8b"], family="llama", qk_norm=False, hidden_size=8192, num_layers=80, num_heads=64,
    mlp_size=28_672, vocab_size=128_256,
)  # fmt: skip
SHAPES["tiny"] = replace(
    SHAPES["0.6b"], hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    mlp_size=128, vocab_size=10_240,
)  # fmt: skip
REQUESTS, SHORTEST, LONGEST = 256, 100, 1024
WALL_S, LEAD_S = 580.0, 60.0  # of all ranks together; for the others to come


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--shape", choices=tuple(SHAPES), default="0.6b")
    options.add_argument(
        "--runs", type=int, default=3, help="measured runs after one that is not; the median counts"
    )
    options.add_argument("--token-budget", type=int, default=16_384)
    options.add_argument(
        "--batch-invariant", action="store_true", help="the same workload in batch-invariant mode"
    )
    options.add_argument(
        "--prefix-hits", action="store_true", help="prompts share nine tenths; cache on"
    )
    options.add_argument(
        "--streams", type=int, nargs="*", default=[], metavar="N",
        help="then 1,024 tokens in and out at these concurrencies, streamed: TTFT and ITL",
    )  # fmt: skip
    options.add_argument(
        "--page-tokens", type=int, default=0, help="128: FlashAttention-4 where it is installed"
    )
    options.add_argument(
        "--profile", action="store_true", help="one more run under the profiler: time by kernel"
    )
    options.add_argument("--tensor-ranks", type=int, default=1, help="GPUs of this host")
    options.add_argument("--nccl-sums", action="store_true", help="no sums by peers' memory")
    options.add_argument(
        "--sharded-sampling", action="store_true", help="choose from parts of the logits in graphs"
    )
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--requests", type=int, default=REQUESTS, help="fewer are no record")
    options.add_argument("--longest", type=int, default=LONGEST, help="tokens in, and out")
    args = options.parse_args()
    spec = SHAPES[args.shape]
    rates, detail = measured(args)
    kinds = {
        "invariant": args.batch_invariant,
        "prefix_hits": args.prefix_hits,
        "streams": args.streams,
    }
    kinds[f"pages_{args.page_tokens}"] = args.page_tokens
    kinds[f"tp_{args.tensor_ranks}"] = args.tensor_ranks > 1
    kinds["nccl_sums"] = args.nccl_sums
    kinds["sharded_sampling"] = args.sharded_sampling
    name = "_".join(
        [
            f"engine_{args.shape.replace('.', '_')}",
            *[kind for kind, asked in kinds.items() if asked],
        ]
    )
    say(
        args,
        name=name,
        unit="tokens/s",
        ours=statistics.median(rates),
        peer=None if args.prefix_hits else peer_record(args.shape, args.tensor_ranks),
        limit=None if args.prefix_hits else args.tensor_ranks * roofline(spec, *workload(0, args)),
        settings={
            "tensor_ranks": args.tensor_ranks,
            "requests": args.requests,
            "tokens": f"{SHORTEST}-{args.longest} in and out",
            "temperature": 0.6,
            "dtype": "bfloat16",
            "token_budget": args.token_budget,
            "page_tokens": args.page_tokens,
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "triton": triton_version() if args.device == "cuda" else "",
            "limit_from": f"constants: {COPY_BYTES_PER_S:.3g} B/s, {MATMUL_FLOPS:.3g} FLOP/s",
        },
        detail={"tokens_per_s_by_run": [round(rate) for rate in rates], **detail},
    )


def measured(args: argparse.Namespace) -> tuple[list[float], dict[str, Any]]:
    """Measure in this process, or in one process per rank."""
    if args.tensor_ranks == 1:
        device = torch.device(args.device, 0 if args.device == "cuda" else None)
        return asyncio.run(measure(args, alone(device), lambda told: None))
    with Ranks(args.tensor_ranks, device=args.device, wall_s=WALL_S) as ranks:
        return ranks.call(over_ranks, args, deadline_s=WALL_S)[0]


def over_ranks(group: RankGroup, tell: Tell, args: argparse.Namespace) -> Any:
    """Measure on rank 0, which leads; the others follow."""
    return asyncio.run(measure(args, group, tell))


def peer_record(shape: str, tensor_ranks: int) -> dict[str, Any] | None:
    """The peer's own record, from the same kind of machine."""
    path = RECORDS / "peer_vllm.json"
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    found = record["shapes"].get(shape if tensor_ranks == 1 else f"{shape}:{tensor_ranks}")
    return (
        None
        if found is None
        else {"name": f"vLLM {record['version']}", "kept_from": record["date"], **found}
    )


def workload(run: int, args: argparse.Namespace) -> tuple[list[list[int]], list[int]]:
    """Return prompts and output lengths. Lengths are the same in every run, tokens are shifted."""
    draw = random.Random(0)
    prompts = [
        [draw.randint(0, 10_000) for _ in range(draw.randint(SHORTEST, args.longest))]
        for _ in range(args.requests)
    ]
    outputs = [draw.randint(SHORTEST, args.longest) for _ in range(args.requests)]
    return [[token + run for token in prompt] for prompt in prompts], outputs


def fill_dummy(decoder: Decoder) -> None:
    """Random weights, made on the device."""
    generator = torch.Generator(device=decoder.device).manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)


async def measure(
    args: argparse.Namespace, group: RankGroup, tell: Tell
) -> tuple[list[float], dict[str, Any]]:
    """Return rates and details; of a rank that follows nothing. `tell` gets each run's rate."""
    begun_s, device = time.perf_counter(), group.device
    events: dict[str, int] = {}
    kernels: list[Any] = []

    def emit(kind: str, **fields: Any) -> None:
        events[kind] = events.get(kind, 0) + 1
        if kind == "engine.prefill_kernel":
            kernels.append(fields)

    spec, peers = SHAPES[args.shape], None
    if group.size > 1 and device.type == "cuda" and not args.nccl_sums:
        from gyre.engine.runners.peer_memory import meet_peers  # needs Triton

        peers = meet_peers(group, width=spec.hidden_size, dtype=torch.bfloat16, emit=emit)
    tensor = None if group.size == 1 else ReplicatedRows(group, peers)
    decoder = Decoder(spec, device=device, dtype=torch.bfloat16, tensor=tensor)
    fill_dummy(decoder)
    synchronize(device)
    made_s = time.perf_counter()
    config = engine_config(args, decoder, group)
    leads = group.rank == 0 and group.size > 1
    followers = lead(group, timeout_s=LEAD_S, emit=emit) if leads else None
    stream = enlist(group, timeout_s=LEAD_S) if group.rank > 0 else None
    with ThreadPoolExecutor(1, initializer=partial(use, device)) as compute:
        engine = NativeEngine(
            decoder,
            config,
            compute=compute,
            emit=emit,
            device=device,
            dtype=torch.bfloat16,
            followers=followers,
        )
        if stream is not None:
            follow(stream, engine.worker, group)
            return [], {}
        await engine.start(dummy=False)
        await generate(engine, [[1, 2, 3]], [1], "first")
        first_s = time.perf_counter()
        group.traffic.take()
        rates = []
        for run in range(args.runs + 1):
            rates.append(await one_run(engine, args, run))
            tell({"run": run, "tokens_per_s": round(rates[-1])})
        rates = rates[1:]
        detail = {
            "start_to_first_token_s": round(first_s - begun_s, 2),
            "of_that_weights_s": round(made_s - begun_s, 2),
            "stats": vars_of(await engine.stats()),
            "events": events,
            "prefill_kernel": kernels,
            "device_bytes": device_bytes(device),
            "sent_bytes_by_run": {
                kind: round(size_bytes / (args.runs + 1))
                for kind, size_bytes in group.traffic.take().bytes_by_kind.items()
            },
        }
        detail["streams_ms"] = {count: await streamed(engine, count) for count in args.streams}
        tell({"streams_ms": detail["streams_ms"]})
        detail["one_stream_limit_ms"] = round(
            decoder.spec.weight_bytes(torch.bfloat16) / COPY_BYTES_PER_S * 1e3, 3
        )
        if args.profile:
            detail["profile"] = await profile(engine, args, args.runs + 1)
        await engine.terminate()
    if followers is not None:
        followers.close()
    return rates, detail


def engine_config(args: argparse.Namespace, decoder: Decoder, group: RankGroup) -> EngineConfig:
    """Every rank has as many KV pages as the one with the least memory."""
    config = EngineConfig(
        kv_fraction=0.85 if args.device == "cuda" else 0.01,
        max_running=args.requests,
        token_budget=max(args.token_budget, args.requests),
        prefix_cache=args.prefix_hits,
        batch_invariant=args.batch_invariant,
        page_tokens=args.page_tokens,
        sharded_sampling=args.sharded_sampling,
        tensor_ranks=args.tensor_ranks,
    )
    config = plan_engine(config, device_type=args.device)
    pages = plan_num_pages(
        config,
        page_bytes=decoder.spec.kv_bytes_per_token(torch.bfloat16) * config.page_tokens,
        context_tokens=decoder.spec.context_tokens,
        free_bytes=free_device_bytes(group.device),
    )
    if group.size == 1:
        return config
    return config.model_copy(update={"num_pages": min(group.share(pages))})


def use(device: torch.device) -> None:
    """Let this thread compute on the device, which is its own setting."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_bytes(device: torch.device) -> int:
    """Bytes of the device that are in use, by whomever."""
    if device.type != "cuda":
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


async def one_run(engine: NativeEngine, args: argparse.Namespace, run: int) -> float:
    prompts, outputs = workload(run, args)
    if args.prefix_hits:  # nine tenths of each prompt are the same in all, and from run to run
        common = workload(0, args)[0][0] * 10
        prompts = [
            common[: len(prompt) * 9 // 10] + prompt[len(prompt) * 9 // 10 :] for prompt in prompts
        ]
    begun_s = time.perf_counter()
    await generate(engine, prompts, outputs, str(run))
    return sum(outputs) / (time.perf_counter() - begun_s)


async def generate(
    engine: NativeEngine, prompts: list[list[int]], outputs: list[int], name: str
) -> None:
    streams = [
        engine.submit(
            Request(
                request_id=f"{name}.{index}",
                tokens=np.asarray(prompt, np.int32),
                sampling=Sampling(temperature=0.6, max_tokens=count, ignore_eos=True),
                seed=index,
                chunk_tokens=0,
            )
        )
        for index, (prompt, count) in enumerate(zip(prompts, outputs, strict=True))
    ]
    answers = [part for stream in streams for part in await collect(stream)]
    got = [len(answer.tokens) for answer in answers]
    assert got == outputs, [answer.reason for answer in answers if answer.reason][:3]


async def streamed(engine: NativeEngine, concurrency: int) -> dict[str, float]:
    """Milliseconds to the first token and between tokens, with `concurrency` requests sent at
    once."""
    rng, length = np.random.default_rng(concurrency), 1024
    arrivals: list[np.ndarray] = []

    async def one(index: int) -> None:
        request = Request(
            request_id=f"stream{concurrency}.{index}",
            tokens=rng.integers(0, 10_000, length).astype(np.int32),
            sampling=Sampling(temperature=0.6, max_tokens=length, ignore_eos=True),
            seed=index,
            chunk_tokens=1,
        )
        begun_s, times = time.perf_counter(), []
        async for chunk in engine.submit(request):
            times += [time.perf_counter() - begun_s] * len(chunk.tokens)
        arrivals.append(np.asarray(times))

    begun_s = time.perf_counter()
    await asyncio.gather(*[one(index) for index in range(concurrency)])
    wall_s = time.perf_counter() - begun_s
    first, gaps = (
        np.array([times[0] for times in arrivals]),
        np.concatenate([np.diff(times) for times in arrivals]),
    )
    named = {
        "ttft_p50": (first, 50),
        "ttft_p99": (first, 99),
        "itl_p50": (gaps, 50),
        "itl_p99": (gaps, 99),
    }
    found = {
        name: round(float(np.percentile(values, rank)) * 1e3, 3)
        for name, (values, rank) in named.items()
    }
    return {**found, "tokens_per_s": round(concurrency * length / wall_s)}


async def profile(engine: NativeEngine, args: argparse.Namespace, run: int) -> dict[str, Any]:
    """Seconds by kernel over one run, and how long the device had none to run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        begun_s = time.perf_counter()
        await one_run(engine, args, run)
        torch.cuda.synchronize(engine.worker.decoder.device)
        wall_s = time.perf_counter() - begun_s
    kernels = [
        (event.key, event.self_device_time_total / 1e6, event.count)
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]
    kernels.sort(key=lambda kernel: -kernel[1])
    busy_s = sum(seconds for _, seconds, _ in kernels)
    return {
        "wall_s": round(wall_s, 3),
        "kernels_s": round(busy_s, 3),
        "by_kernel": {
            name[:60]: [round(seconds, 3), count] for name, seconds, count in kernels[:24]
        },
    }


def vars_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def triton_version() -> str:
    import triton

    return triton.__version__


def roofline(spec: ModelSpec, prompts: list[list[int]], outputs: list[int]) -> float:
    """Tokens per second if decoding were one read of weights and of every sequence's KV per step,
    at the speed of a copy, and prefill were its products at the speed of the largest ones."""
    steps = max(outputs)
    kv_tokens = sum(
        len(prompt) * count + count * (count + 1) // 2
        for prompt, count in zip(prompts, outputs, strict=True)
    )
    weights = spec.weight_bytes(torch.bfloat16)
    read_bytes = kv_tokens * spec.kv_bytes_per_token(torch.bfloat16) + steps * weights
    flops = 2 * sum(map(len, prompts)) * (weights / 2)
    return sum(outputs) / (read_bytes / COPY_BYTES_PER_S + flops / MATMUL_FLOPS)


if __name__ == "__main__":
    main()
