"""How fast one GPU trains: a real step (forward, loss head, backward, clip, AdamW) over packed
sequences. In: a CUDA device. Out: tokens/s, model FLOPs used (MFU), peak memory, time by part. Run:
python bench/train.py --shape 8b --record.

A shape is a Qwen3 of public size with random weights; `--layers` cuts it to what the device holds.
The step is the trainer's own code: chunk, `collect_gradients`, `grad_norm`, `update`. The layers
alone, forward and backward from a random gradient, are timed too: they are what scales to the whole
model.

MFU = model FLOPs / seconds / 989e12 (dense BF16 of an H100 or H200 by its data sheet). Model FLOPs
are those of models/flops.py, three forward passes' worth: causal attention at half, nothing that is
made again. The limit is what matrix products reach here, 794e12, or 1,458e12 in 8 bits (`--matmul
fp8`), which counts against the same 989e12. With `--away` state lies in pinned host memory: masters
and moments, or the weights as well.
"""

# T tokens, E hidden size, N targets

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from engine import COMMON, SHAPES, fill_dummy
from gyre.core.records import Checkpointing, Matmul, Moments, TrainSequence
from gyre.distributed.config import ParallelConfig
from gyre.distributed.mesh import Splitter
from gyre.distributed.process_group import alone
from gyre.kernels import flash
from gyre.kernels.attention import varlen_attention
from gyre.kernels.dispatch import why_torch
from gyre.kernels.rope import rope_tables
from gyre.models.decoder import Decoder
from gyre.models.flops import forward_flops
from gyre.models.layers.layer import Layer
from gyre.models.spec import ModelSpec
from gyre.objectives.config import SftConfig
from gyre.trainer.batching.microbatch import MicroBatch, build_chunk
from gyre.trainer.config import TrainerConfig
from gyre.trainer.passes.backward import Models, collect_gradients
from gyre.trainer.passes.forward import chunk_logprobs
from gyre.trainer.roles.trained_model import TrainedModel
from record import parser, say

# data sheet of BF16; measured on an H200
PEAK_FLOPS, MATMUL_FLOPS, FP8_FLOPS = 989e12, 794e12, 1458e12
SPECS = SHAPES | {
    "4b": ModelSpec(
        hidden_size=2560, num_layers=36, num_heads=32, mlp_size=9728, tied=True, **COMMON
    ),
}
LAYERS = {"0.6b": 28, "4b": 36, "8b": 16}  # what fits 139 GiB with optimizer state and 8 k tokens
TITAN = "torchtitan 0.2.2, whole step on 8 H200, compiled, attention at half"
PEERS = {  # 9,515, 8,808 and, with its layers' products in FP8, 12,218 tokens/s per GPU
    ("8b", "none", "same"): 0.507,
    ("8b", "selective", "same"): 0.469,
    ("8b", "none", "fp8"): 0.507 * 12_218 / 9_515,
}
WARM_UP = 3
AWAY: dict[str, dict[str, Any]] = {
    "nothing": {},
    "state": {"offload_optimizer": "host"},
    "weights": {"offload_optimizer": "host", "offload_parameters": ("actor",)},
}
PARTS = {  # of kernel names; the first that fits counts
    "attention": ("flash", "fmha", "attn"),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "splitk"),
    "adamw": ("_adamw", "kOptimizerStatic8bit"),
    "loss head": ("_statistics", "_gradient"),
    "8-bit operands": ("_largest", "_quantize", "_transposed"),
    "norm": ("_norm",),
    "heads": ("_heads",),
    "silu": ("_silu",),
    "gradients into float32": ("CUDAFunctor_add", "add_"),
    "copies": ("copy", "Memcpy", "Memset", "fill", "chunk_cat"),
}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--shape", choices=tuple(SPECS), default="8b")
    options.add_argument(
        "--layers", type=int, default=0, help="0: as many as fit one H200 with optimizer state"
    )
    options.add_argument("--tokens", type=int, default=8192)
    options.add_argument(
        "--sequences", type=int, default=1, help="the tokens are cut into so many, of like length"
    )
    options.add_argument("--checkpointing", choices=get_args(Checkpointing), default="none")
    options.add_argument(
        "--matmul", choices=get_args(Matmul), default="same", help="same: bfloat16"
    )
    options.add_argument("--moments", choices=get_args(Moments), default="float32", help="of AdamW")
    options.add_argument(
        "--away", choices=tuple(AWAY), default="nothing", help="from the device, in host memory"
    )
    options.add_argument("--steps", type=int, default=10)
    options.add_argument(
        "--profile", action="store_true", help="print the profiler's table of one step"
    )
    args = options.parse_args()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    spec = replace(SPECS[args.shape], num_layers=args.layers or LAYERS[args.shape])
    found = measure(spec, args, device)
    name = f"train_{args.shape.replace('.', '_')}"
    name += "" if args.checkpointing == "none" else f"_{args.checkpointing}"
    name += "" if args.matmul == "same" else f"_{args.matmul}"
    name += "" if args.moments == "float32" else f"_moments_{args.moments}"
    name += "" if args.away == "nothing" else f"_away_{args.away}"
    peer, group = (
        PEERS.get((args.shape, args.checkpointing, args.matmul)),
        spec.num_heads // spec.num_kv_heads,
    )
    say(
        args,
        name=name,
        unit="MFU of the whole step",
        ours=found.pop("mfu"),
        peer=None if peer is None else {"name": TITAN, "value": peer},
        limit=(FP8_FLOPS if args.matmul == "fp8" else MATMUL_FLOPS) / PEAK_FLOPS,
        settings={
            "layers": spec.num_layers,
            "tokens": args.tokens,
            "sequences": args.sequences,
            "dtype": "bfloat16",
            "checkpointing": args.checkpointing,
            "matmul": args.matmul,
            "moments": args.moments,
            "device": torch.cuda.get_device_name(),
            "attention": flash.choice(device, torch.bfloat16, group, spec.head_dim),
            "without_kernels": why_torch(device, torch.bfloat16),
        },
        detail=found,
    )


def measure(spec: ModelSpec, args: Any, device: torch.device) -> dict[str, Any]:
    decoder = Decoder(spec, device=device, dtype=torch.bfloat16)
    fill_dummy(decoder)
    settings = {
        "checkpointing": args.checkpointing,
        "matmul": args.matmul,
        "moments": args.moments,
        **AWAY[args.away],
    }
    config = TrainerConfig.model_validate(
        {"learning_rate": 1e-6, "tokens_per_chunk": args.tokens, **settings}
    )
    split = Splitter(alone(device), ParallelConfig()).split("actor")
    silent = {"folder": None, "emit": lambda kind, **fields: None, "progress": lambda: None}
    actor = TrainedModel("actor", decoder, None, config, split, **silent)
    logprobs = functools.partial(
        chunk_logprobs, checkpointing=config.checkpointing, float8=actor.float8
    )
    models = Models(actor=actor, logprobs=logprobs)
    chunk = make_chunk(spec, args.tokens, args.sequences, device)
    targets = len(chunk.targets_N)
    optimizer = models.actor.optimizer

    def gradients() -> None:
        with visit(actor):
            collect_gradients(models, SftConfig(), [chunk], targets)

    def update() -> None:
        norm = optimizer.grad_norm()
        optimizer.update(learning_rate=1e-6, grad_scale=1.0 / norm if norm > 1.0 else 1.0)

    def step() -> None:
        gradients()
        update()

    step_s = median_s(step, args.steps)
    gradients_s = median_s(gradients, args.steps)
    optimizer.zero_grad()
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    parts, kernels_s = by_part(step, table=args.profile)
    moved = traffic(actor, step)
    layers_s = median_s(layers_alone(actor, chunk), args.steps)
    whole, of_layers = model_flops(spec, chunk), model_flops(spec, chunk, head=False)
    return {
        "mfu": whole / step_s / PEAK_FLOPS,
        "tokens_per_s": round(args.tokens / step_s),
        "step_ms": round(step_s * 1e3, 2),
        "forward_backward_ms": round(gradients_s * 1e3, 2),
        "forward_backward_mfu": round(whole / gradients_s / PEAK_FLOPS, 4),
        "layers_ms": round(layers_s * 1e3, 2),
        "layers_mfu": round(of_layers / layers_s / PEAK_FLOPS, 4),
        "peak_gib": round(peak / 2**30, 2),
        "activations_gib": round((peak - held) / 2**30, 2),
        "parts_ms": parts,
        "kernels_ms": round(kernels_s * 1e3, 2),
        **moved,
    }


def visit(actor: TrainedModel) -> contextlib.AbstractContextManager[None]:
    """Around passes: weights in host memory come to the device."""
    return contextlib.nullcontext() if actor.stream is None else actor.stream.visit()


def traffic(actor: TrainedModel, step: Callable[[], None]) -> dict[str, float]:
    """What one step moves between host and device, and how long it waits for that: for weights, for
    state."""
    sources = {
        "weights": actor.stream,
        "state": actor.home if actor.home.stream is not None else None,
    }
    found = {}
    for again in (False, True):
        step()
        torch.cuda.synchronize()
        for name, source in sources.items():
            if source is not None and (moved := source.take_traffic()) and again:
                found[f"{name}_moved_gib"] = round((moved.in_bytes + moved.out_bytes) / 2**30, 2)
                found[f"{name}_waited_ms"] = round(moved.waited_s * 1e3, 2)
    return found


def make_chunk(spec: ModelSpec, tokens: int, sequences: int, device: torch.device) -> MicroBatch:
    """Random tokens; every one but a sequence's first is a target."""
    rng = np.random.default_rng(0)
    made = []
    for ids in np.array_split(rng.integers(0, spec.vocab_size, tokens).astype(np.int32), sequences):
        made.append(TrainSequence(tokens=ids, columns={"loss_mask": np.arange(len(ids)) > 0}))
    return build_chunk(
        made, range(len(made)), pairwise=False, vocab_size=spec.vocab_size, device=device
    )


def layers_alone(actor: TrainedModel, chunk: MicroBatch) -> Callable[[], None]:
    """Forward and backward of the layers, with gradients into the float32 buffer, without embedding
    and head."""
    decoder, checkpointing, float8 = actor.decoder, actor.checkpointing, actor.float8
    shape = chunk.layout.num_tokens, decoder.spec.hidden_size
    device = chunk.tokens_T.device
    x_TE, grad_TE = (torch.randn(shape, device=device).to(decoder.dtype) for _ in range(2))
    tables = rope_tables(chunk.layout.positions_T, decoder.inv_freq_F, decoder.dtype)

    def attend(
        _: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> torch.Tensor:
        return varlen_attention(q_THD, k_TKD, v_TKD, chunk.layout)

    def pass_through() -> None:
        stream_TE = x_TE.detach().requires_grad_()
        for index, layer in enumerate(decoder.layers):
            assert isinstance(layer, Layer)
            partial = functools.partial(layer, selective=checkpointing == "selective")
            through = layer.replayed if checkpointing == "full" else partial
            stream_TE = through(index, stream_TE, *tables, attend, None, float8=float8)
        stream_TE.backward(grad_TE)

    def run() -> None:
        with visit(actor):
            pass_through()

    return run


def model_flops(spec: ModelSpec, chunk: MicroBatch, *, head: bool = True) -> float:
    """Of one forward and backward pass over the chunk."""
    return 3 * forward_flops(
        spec, chunk.layout.lengths, num_outputs=len(chunk.targets_N) if head else 0
    )


def median_s(run: Callable[[], None], count: int) -> float:
    """Device seconds of one run."""
    for _ in range(WARM_UP):
        run()
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def by_part(run: Callable[[], None], *, table: bool) -> tuple[dict[str, float], float]:
    """Milliseconds of kernels by part of the step, and seconds of all of them."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    averages = profiled.key_averages()
    if table:
        print(
            averages.table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90)
        )
    parts: dict[str, float] = {}
    for event in averages:
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = next(
            (part for part, words in PARTS.items() if any(word in event.key for word in words)),
            "other",
        )
        parts[name] = parts.get(name, 0.0) + event.self_device_time_total / 1e3
    return {name: round(ms, 2) for name, ms in sorted(parts.items(), key=lambda p: -p[1])}, sum(
        parts.values()
    ) / 1e3


if __name__ == "__main__":
    main()
