"""One whole GRPO step on a GPU, by part, beside TRL with vLLM colocated on the same device in the
same call: rollout, rewards, update, weights back. In: a CUDA device; a peer's environment. Out:
median seconds per step, ours and TRL's. Run: python bench/rl_step_gpu.py --peer-path FOLDER
--record; python bench/rl_step_gpu.py --shape 8b --record.

Qwen3 shapes with random weights in BF16; 64 prompts × 8 completions of exactly 512 tokens, no KL.
Ours is `gyre train` itself, read from its events. The limit adds up what must be done: products at
the measured rate; of each decode step one read of the weights and of the running sequences' keys
and values at the measured copy rate; the optimizer's bytes.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gyre.models.flops import forward_flops
from gyre.models.spec import ModelSpec
from record import circumstances, parser, say
from rl_step import Step, make_model, read_steps, run_trl, train_steps

# measured on an H200: bfloat16 products, copy counted both ways
MATMUL_FLOPS, COPY_BYTES_PER_S = 794e12, 4.28e12
STEP = Step(prompts=64, completions=8, tokens=512)
# per parameter of AdamW: master and moments read and written, gradient read, weight written
OPTIMIZER_BYTES = 28
COMMON = {
    "family": "qwen3",
    "vocab_size": 151_936,
    "num_kv_heads": 8,
    "head_dim": 128,
    "context_tokens": 2048,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
    "qkv_bias": False,
    "qk_norm": True,
    "eos_ids": (1,),
}
SPECS = {
    "0.6b": ModelSpec(
        hidden_size=1024, num_layers=28, num_heads=16, mlp_size=3072, tied=True, **COMMON
    ),
    "8b": ModelSpec(
        hidden_size=4096, num_layers=36, num_heads=32, mlp_size=12_288, tied=False, **COMMON
    ),
}
# Of a model whose state does not fit beside its gradients on one device, it lies in host memory.
SETS = {
    "0.6b": (),
    "8b": (
        'trainer.offload_optimizer="host"',
        'memory.residency="spill"',
        "memory.host_budget_bytes=118111600640",
    ),
}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--shape", choices=tuple(SPECS), default="0.6b")
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--warm-up", type=int, default=2, help="steps that are not counted")
    options.add_argument(
        "--deadline-s", type=float, default=1800.0, help="longest that our steps may take"
    )
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options.add_argument(
        "--label", default="", help="behind the record's name, for a run with --set"
    )
    options.add_argument(
        "--peer-path", type=Path, help="folder with trl 1.16, vllm 0.25.1 and their needs"
    )
    options.add_argument(
        "--peer-batch",
        type=int,
        nargs="*",
        default=[16],
        help="sequences per pass; the best counts",
    )
    options.add_argument("--peer-steps", type=int, default=4)
    args = options.parse_args()
    if args.record:
        # what a record needs and this machine lacks is told before anything is measured
        circumstances(args.commit)
    spec = SPECS[args.shape]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        prompts = make_model(
            spec, folder, device="cuda", dtype=torch.bfloat16, prompts=2048, words=48
        )
        ours = run_ours(folder, args)
        peer = run_peers(folder, args, prompts) if args.peer_path else None
    limit = limit_parts(spec, ours["tokens"] - STEP.sampled_tokens)
    say(
        args,
        name="_".join(filter(None, ("rl_step_gpu", args.shape.replace(".", "_"), args.label))),
        unit="s",
        ours=ours["median_s"],
        peer=peer,
        limit=sum(limit.values()),
        settings={
            "parameters": spec.num_parameters,
            **asdict(STEP),
            "set": [*SETS[args.shape], *args.set],
            "device": torch.cuda.get_device_name(),
        },
        detail={
            **ours,
            "limit_parts_s": {name: round(seconds, 3) for name, seconds in limit.items()},
        },
    )


def run_ours(folder: Path, args: Any) -> dict[str, Any]:
    sets = ['run.device="cuda"', 'run.dtype="bfloat16"', "trainer.tokens_per_chunk=16384"]
    sets += [f"engine.max_running={STEP.prompts * STEP.completions}", *SETS[args.shape], *args.set]
    read = read_steps(
        train_steps(folder, STEP, steps=args.steps, sets=sets, deadline_s=args.deadline_s),
        STEP,
        warm_up=args.warm_up,
    )
    return {
        **read,
        "rollout_tokens_per_s": round(STEP.sampled_tokens / read["phases_s"]["rollout"]),
        "train_tokens_per_s": round(read["tokens"] / read["phases_s"]["train"]),
    }


def limit_parts(spec: ModelSpec, prompt_tokens: int) -> dict[str, float]:
    """Seconds of one step if nothing but the necessary products and bytes took time. A backward
    pass is two forward passes; a completion's keys and values are read once per token, half of them
    on average."""
    sequences = STEP.prompts * STEP.completions
    length = prompt_tokens // sequences + STEP.tokens
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2
    read = 2 * spec.num_parameters + sequences * (length - STEP.tokens / 2) * kv_bytes
    decode_flops = forward_flops(spec, [1] * sequences, num_outputs=sequences)
    forward = forward_flops(spec, [length] * sequences, num_outputs=STEP.sampled_tokens)
    return {
        "decode_bytes": STEP.tokens * read / COPY_BYTES_PER_S,
        "decode_products": STEP.tokens * decode_flops / MATMUL_FLOPS,
        "train_products": 3 * forward / MATMUL_FLOPS,
        "optimizer_bytes": OPTIMIZER_BYTES * spec.num_parameters / COPY_BYTES_PER_S,
    }


def run_peers(folder: Path, args: Any, prompts: list[str]) -> dict[str, Any]:
    """TRL on the same model, prompts and sizes, in a process of its own per batch size; the fastest
    counts."""
    found = [run_peer(folder, args, prompts, batch) for batch in args.peer_batch]
    best = min(found, key=lambda one: one["value"])
    return {**best, "value_by_batch": {one["batch"]: one["value"] for one in found}}


def run_peer(folder: Path, args: Any, prompts: list[str], batch: int) -> dict[str, Any]:
    settings = {
        "model": str(folder / "model"),
        "folder": str(folder / "trl"),
        "prompts": prompts,
        "dtype": "bfloat16",
        "prompts_per_step": STEP.prompts,
        "completions_per_prompt": STEP.completions,
        "max_tokens": STEP.tokens,
        "kl_coef": 0.0,
        "learning_rate": 1e-6,
        "steps": args.peer_steps,
        "micro_batches": STEP.prompts * STEP.completions // batch,
        "threads": os.cpu_count(),
        "vllm_memory_share": 0.35,
        "context_tokens": 1024,
    }
    environment = {
        **os.environ,
        "PYTHONPATH": str(args.peer_path),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    environment |= {"HF_HUB_OFFLINE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    answer = run_trl(sys.executable, folder, settings, environment, timeout_s=420)
    versions = answer["versions"]
    return {
        "name": f"TRL {versions['trl']} with vLLM {versions['vllm']} colocated, {batch} sequences "
        "per pass",
        "value": statistics.median(answer["seconds"][1:]),
        "batch": batch,
        "seconds": [round(seconds, 2) for seconds in answer["seconds"]],
        "completion_tokens": answer["completion_tokens"],
        "versions": versions,
    }


if __name__ == "__main__":
    main()
