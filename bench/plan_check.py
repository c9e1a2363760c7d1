"""The memory plan against the allocator: a published shape trains a few steps on one GPU, and at
each of the plan's moments the bytes predicted are set beside what was allocated at most, weights in
virtual memory included. In: a CUDA device. Out: the error of the peak in per cent; the limit is 10.
Run: python bench/plan_check.py --shape qwen3-0.6b --tokens 16384 --record.

NativeTrainer runs as in a run; hooks on the first and last layer and on the embedding say which
moment has begun. With --device cpu it runs without measuring, which shows only that it runs.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gyre.core.records import TrainBatch, TrainSequence
from gyre.memory.pools.cuda_vmm import VirtualUsage
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import ModelSpec
from gyre.objectives.config import SftConfig
from gyre.planner.hardware import saving_on_cpu, saving_on_cuda
from gyre.planner.memory_model.activations import Checkpointing
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.memory_model.peaks import train_moments
from gyre.planner.memory_model.states import Layout, state_bytes
from gyre.planner.model_zoo import find_shape, model_numbers
from gyre.trainer.config import TrainerConfig
from gyre.trainer.trainer import NativeTrainer
from record import parser, say

LIMIT_PERCENT = 10.0
MIB = 1 << 20


class Watch:
    """The peak of each moment of a step: what was allocated at most since the moment before it
    ended."""

    def __init__(self, decoder: Decoder, device: torch.device, virtual_bytes: int) -> None:
        """`virtual_bytes`: of components whose memory torch's allocator does not see."""
        self.peaks: dict[str, int] = {}
        self._device, self._virtual_bytes = device, virtual_bytes
        decoder.layers[-1].register_forward_hook(
            lambda module, inputs, out: self._on_gradient(out, "loss")
        )
        decoder.layers[0].register_forward_pre_hook(
            lambda module, inputs: self._on_gradient(inputs[1], "deepest layer")
        )
        decoder.embed.weight.register_post_accumulate_grad_hook(
            lambda _: self._end("end of backward")
        )

    def begin(self) -> None:
        """Before a step."""
        self.peaks.clear()
        self._reset()

    def finish(self) -> None:
        """After a step; a step has one chunk or more, and then one update."""
        self._end("optimizer step")

    def _on_gradient(self, tensor: Tensor, moment: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self._end(moment))

    def _end(self, moment: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            here = torch.cuda.max_memory_allocated(self._device) + self._virtual_bytes
            self.peaks[moment] = max(self.peaks.get(moment, 0), here)
        else:
            self.peaks[moment] = 0
        self._reset()

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)


def main() -> None:
    args = read_arguments()
    device = torch.device(args.device)
    spec = find_shape(args.shape)
    spec = replace(spec, num_layers=args.layers or spec.num_layers)
    config = trainer_config(args)
    decoder = Decoder(spec, device=device, dtype=torch.bfloat16)
    init_weights(decoder, 0)
    compute = ThreadPoolExecutor(1)
    trainer = NativeTrainer(
        decoder=decoder,
        objective=SftConfig(),
        config=config,
        compute=compute,
        emit=lambda kind, **fields: None,
        seed=0,
    )
    virtual = (usage for usage in trainer.measure().values() if isinstance(usage, VirtualUsage))
    watch = Watch(decoder, device, sum(usage.device_bytes for usage in virtual))
    batch = make_batch(spec, args)
    for _ in range(args.steps):
        watch.begin()
        trainer.step_now(batch)
        watch.finish()
    compute.shutdown()
    report(args, spec, watch.peaks, device)


def read_arguments() -> argparse.Namespace:
    options = parser(__doc__ or "")
    options.add_argument("--shape", default="qwen3-0.6b")
    options.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    options.add_argument("--sequence", type=int, default=8192, help="tokens of a sequence")
    options.add_argument("--tokens", type=int, default=16_384, help="tokens of a chunk")
    options.add_argument("--chunks", type=int, default=2, help="of an update")
    options.add_argument("--steps", type=int, default=2)
    options.add_argument("--checkpointing", choices=["none", "selective", "full"], default="none")
    options.add_argument("--device", default="cuda")
    return options.parse_args()


def trainer_config(args: argparse.Namespace) -> TrainerConfig:
    settings: dict[str, Any] = {"tokens_per_chunk": args.tokens, "learning_rate": 1e-5}
    if "checkpointing" in TrainerConfig.model_fields:
        settings["checkpointing"] = args.checkpointing
    elif args.checkpointing != "none":
        raise SystemExit("this trainer has no checkpointing")
    return TrainerConfig(**settings)


def make_batch(spec: ModelSpec, args: argparse.Namespace) -> TrainBatch:
    """Whole chunks of random tokens."""
    random, count = np.random.default_rng(0), args.chunks * (args.tokens // args.sequence)
    mask = np.ones(args.sequence, dtype=bool)
    mask[0] = False
    sequences = tuple(
        TrainSequence(
            tokens=random.integers(0, spec.vocab_size, args.sequence, dtype=np.int32),
            columns={"loss_mask": mask},
        )
        for _ in range(count)
    )
    return TrainBatch(sequences=sequences, step=0)


def report(
    args: argparse.Namespace, spec: ModelSpec, measured: dict[str, int], device: torch.device
) -> None:
    on_gpu = device.type == "cuda"
    checkpointing: Checkpointing = args.checkpointing
    layout = Layout(
        gpus=1,
        zero=0,
        shard_ranks=1,
        checkpointing=checkpointing,
        tokens_per_chunk=args.tokens,
        offload_optimizer="none",
        offload_gradients=False,
    )
    tokens = args.chunks * args.tokens
    job = TrainingJob(
        model=model_numbers(spec),
        dtype="bfloat16",
        saving=saving_on_cuda(device) if on_gpu else saving_on_cpu(),
        longest=args.sequence,
        mean_tokens=args.sequence,
        tokens_per_update=tokens,
        most_tokens_per_update=tokens,
        target_share=1 - 1 / args.sequence,
    )
    moments = {moment.name: moment.allocated_bytes for moment in train_moments(job, layout)}
    assert set(measured) == set(moments), measured
    rows = {
        name: f"predicted {size / MIB:,.0f} MiB, measured {measured[name] / MIB:,.0f} MiB"
        + (f", {100 * (size / measured[name] - 1):+.1f}%" if measured[name] else "")
        for name, size in moments.items()
    }
    peak, real = max(moments.values()), max(measured.values())
    rows["states"] = (
        f"{sum(state_bytes(job.model, job.dtype, layout).values()) / MIB:,.0f} MiB predicted"
    )
    if on_gpu:
        reserved = torch.cuda.max_memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        rows["peak"] = f"predicted {peak / MIB:,.0f} MiB, measured {real / MIB:,.0f} MiB"
        rows["reserved / allocated"] = f"{reserved / real:.3f}"
        rows["outside torch"] = (
            f"{(total - free - torch.cuda.memory_reserved(device)) / MIB:,.0f} MiB"
        )
    settings = {
        name: getattr(args, name)
        for name in ("shape", "layers", "sequence", "tokens", "chunks", "checkpointing")
    }
    say(
        args,
        name=f"plan_{args.shape}_{args.layers or spec.num_layers}_{args.tokens}"
        f"_{args.checkpointing}",
        unit="% error of the peak",
        ours=100 * abs(peak / real - 1) if real else 0.0,
        peer=None,
        limit=LIMIT_PERCENT,
        settings={**settings, "saving": job.saving},
        detail=rows,
    )


if __name__ == "__main__":
    main()
