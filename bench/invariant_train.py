"""What batch-invariant training costs on one GPU: forward by the engine's own kernels, backward by
recomputing. In: a CUDA device. Out: tokens per second of one training step at the 0.6B shape, mode
on and off. Run: python bench/invariant_train.py [--record].

A batch of rollouts, prompt and completion of 100 to 1,024 tokens each, seed 0, GRPO without KL
term; forward, backward and AdamW. The limit counts 6 operations per parameter and token (8 for the
mode, which runs its layers' forward twice).
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine import MATMUL_FLOPS, SHAPES, fill_dummy
from gyre.core.records import TrainBatch, TrainSequence
from gyre.models.decoder import Decoder
from gyre.objectives.config import GrpoConfig
from gyre.trainer.config import TrainerConfig
from gyre.trainer.passes.batch_invariant import InvariantLogprobs
from gyre.trainer.trainer import NativeTrainer
from record import parser, say

SHORTEST, LONGEST = 100, 1024


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--shape", choices=tuple(SHAPES), default="0.6b")
    options.add_argument("--sequences", type=int, default=64)
    options.add_argument("--tokens-per-chunk", type=int, default=16_384)
    options.add_argument(
        "--steps",
        type=int,
        default=3,
        help="measured steps after one that is not; the median counts",
    )
    args = options.parse_args()
    batch = make_batch(args.sequences, SHAPES[args.shape].vocab_size)
    num_tokens = sum(len(sequence.tokens) for sequence in batch.sequences)
    off, on = (measure(args, batch, invariant=invariant) for invariant in (False, True))
    spec = SHAPES[args.shape]
    say(
        args,
        name=f"invariant_train_{args.shape.replace('.', '_')}",
        unit="tokens/s",
        ours=num_tokens / on["step_s"],
        peer=None,
        limit=MATMUL_FLOPS / (8 * spec.num_parameters),
        settings={
            "shape": args.shape,
            "sequences": args.sequences,
            "tokens": num_tokens,
            "tokens_per_chunk": args.tokens_per_chunk,
            "dtype": "bfloat16",
            "device": torch.cuda.get_device_name(),
        },
        detail={
            "off_tokens_per_s": round(num_tokens / off["step_s"]),
            "on_over_off": round(off["step_s"] / on["step_s"], 3),
            "off": off,
            "on": on,
        },
    )


def make_batch(count: int, vocab_size: int) -> TrainBatch:
    draw, rng = random.Random(0), np.random.default_rng(0)
    sequences = []
    for index in range(count):
        prompt, chosen = draw.randint(SHORTEST, LONGEST), draw.randint(SHORTEST, LONGEST)
        mask = np.arange(prompt + chosen) >= prompt
        column = np.where(mask, 1.0 if index % 2 else -1.0, 0.0).astype(np.float32)
        tokens = rng.integers(0, vocab_size, prompt + chosen).astype(np.int32)
        columns = {"loss_mask": mask, "advantages": column, "logprobs": np.zeros_like(column)}
        sequences.append(TrainSequence(tokens=tokens, columns=columns))
    return TrainBatch(sequences=tuple(sequences), step=0)


def measure(args: Any, batch: TrainBatch, *, invariant: bool) -> dict[str, float]:
    """Median seconds of a step, seconds of a forward pass alone, peak bytes."""
    device = torch.device("cuda")
    decoder = Decoder(SHAPES[args.shape], device=device, dtype=torch.bfloat16)
    fill_dummy(decoder)
    passes: dict[str, Any] = {"logprobs": InvariantLogprobs(page_tokens=64)} if invariant else {}
    with ThreadPoolExecutor(1) as compute:
        trainer = NativeTrainer(
            decoder=decoder,
            objective=GrpoConfig(kl_coef=0.0),
            config=TrainerConfig(learning_rate=1e-6, tokens_per_chunk=args.tokens_per_chunk),
            compute=compute,
            emit=lambda kind, **fields: None,
            seed=0,
            **passes,
        )
        first = trainer.evaluate_now(batch, "policy").per_token
        batch = replace(  # on-policy, so that every token has a gradient
            batch,
            sequences=tuple(
                replace(sequence, columns={**sequence.columns, "logprobs": values})
                for sequence, values in zip(batch.sequences, first, strict=True)
            ),
        )
        torch.cuda.reset_peak_memory_stats()
        seconds = [
            timed(lambda step=step: trainer.step_now(replace(batch, step=step)))
            for step in range(args.steps + 1)
        ]
        forward = [
            timed(lambda step=step: trainer.evaluate_now(replace(batch, step=step), "policy"))
            for step in (8, 9)
        ]
        peak = torch.cuda.max_memory_allocated()
        asyncio.run(trainer.close())
    return {
        "step_s": round(statistics.median(seconds[1:]), 4),
        "forward_s": round(min(forward), 4),
        "peak_gib": round(peak / 2**30, 2),
    }


def timed(work: Any) -> float:
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    main()
