"""How fast several GPUs train together: whole steps of NativeTrainer (packing, forward, loss,
backward, sums over ranks, clipping, AdamW), one process per GPU. In: rows to measure. Out: tokens/s
per GPU, MFU, peak memory, exposed communication, time by part, row by row as they come. Run: python
bench/train_ranks.py --gpus 4 --rows 8b:none:same:8192 4b:selective:same:65536:grpo --record

A row is SHAPE:CHECKPOINTING:MATMUL:TOKENS, TOKENS of a chunk of each rank, and then any of: sft (as
without) or grpo, zero=0 to 3 (without: 3), sequence=TOKENS (all in one), chunks=N of an update
(one), layers=N (all that the shape has), sum=update (chunk): when gradients are summed; once per
update they travel in float32, also those of one chunk; tensor=N: ranks that share layers, and so a
chunk of TOKENS; offload=host: AdamW's state lives there (none: on the device). A row that fails or
is late loses no other. With --device cpu and the shape "tiny" everything runs over gloo, which
shows only that it runs.

A step takes as long as its slowest rank, from a barrier to the end of the device's work; the median
of the steps counts. MFU and its limit are those of bench/train.py. Exposed communication is the
part of a traced step in which kernels of NCCL ran and no other did; `wait_ms` is what the trainer
itself says of the steps that are not traced.
"""

# N numbers of a run

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch.profiler import ProfilerActivity, profile

from gyre.core.config import Section
from gyre.core.records import Checkpointing, Matmul, StepReport, TrainBatch, TrainSequence
from gyre.distributed.config import ParallelConfig, SumGradients, Zero
from gyre.distributed.process_group import RankGroup
from gyre.memory.pools.cuda_vmm import VirtualUsage
from gyre.models.decoder import Decoder
from gyre.models.flops import forward_flops
from gyre.models.spec import ModelSpec
from gyre.objectives.config import AnyObjective, GrpoConfig, SftConfig
from gyre.planner.hardware import saving_on_cpu, saving_on_cuda
from gyre.planner.memory_model.job import TrainingJob
from gyre.planner.memory_model.peaks import train_moments
from gyre.planner.memory_model.states import Layout
from gyre.planner.model_zoo import model_part
from gyre.trainer.config import TrainerConfig
from gyre.trainer.metrics.profiler import Work, summarize, works_of
from gyre.trainer.trainer import NativeTrainer
from ranks import Ranks, RanksFailed, Tell, print_line, settle, timed
from record import RECORDS, circumstances, parser, say
from train import FP8_FLOPS, MATMUL_FLOPS, PARTS, PEAK_FLOPS, SPECS

SHAPE_14B = replace(
    SPECS["8b"], hidden_size=5120, num_layers=40, num_heads=40, mlp_size=17_408
)  # of Qwen3
TINY = replace(
    SPECS["0.6b"],
    vocab_size=512,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    mlp_size=256,
)
SHAPES = SPECS | {"14b": SHAPE_14B, "tiny": TINY}
OBJECTIVES: dict[str, AnyObjective] = {"sft": SftConfig(), "grpo": GrpoConfig()}
TITAN = "torchtitan 0.2.2 on 8 H200, compiled, its best checkpointing"
PEERS = {  # tokens/s per GPU, by shape, matmul and tokens of a sequence; by its own counters
    ("8b", "same", 8192): 9_515,
    ("8b", "fp8", 8192): 12_218,
    ("4b", "same", 65_536): 4_818,
}
WARM_UP, STEPS_SHARE = 3, 0.6  # of a row's time, past which no further step is begun
PROMPT_SHARE = 64  # of a rollout one token in so many is prompt, and no target
LOGPROB = -8.0  # of a rollout's tokens; behind a fresh model they all look alike


class Row(Section):
    """What is measured."""

    shape: Literal["tiny", "0.6b", "4b", "8b", "14b"]
    checkpointing: Checkpointing
    matmul: Matmul
    tokens: int = Field(ge=16)  # of a chunk of each rank
    objective: Literal["sft", "grpo"] = "sft"
    zero: Zero = 3
    sequence: int = Field(default=0, ge=0)  # tokens of each; 0: all in one
    chunks: int = Field(default=1, ge=1)  # of each rank in an update
    layers: int = Field(default=0, ge=0)  # 0: all
    sum: SumGradients = "chunk"
    tensor: int = Field(default=1, ge=1)  # ranks that share layers
    offload: Literal["none", "host"] = "none"  # where AdamW's state lives

    @property
    def spec(self) -> ModelSpec:
        spec = SHAPES[self.shape]
        return replace(spec, num_layers=self.layers or spec.num_layers)

    @property
    def lengths(self) -> list[int]:
        """Of one rank's sequences; ranks that share layers have the same."""
        length = self.sequence or self.tokens
        return [length] * (self.tokens // length * self.chunks)

    @property
    def step_tokens(self) -> int:
        """Of each rank."""
        return self.tokens * self.chunks

    @property
    def name(self) -> str:
        """For a file."""
        parts = [
            self.shape.replace(".", "_"),
            self.tokens,
            self.checkpointing,
            self.matmul,
            self.objective,
        ]
        parts += [f"zero{self.zero}"] + ([f"by{self.sequence}"] if self.sequence else [])
        parts += [f"{self.chunks}chunks"] if self.chunks > 1 else []
        parts += ["summed_once"] if self.sum == "update" else []
        parts += [f"tensor{self.tensor}"] if self.tensor > 1 else []
        parts += [f"state_on_{self.offload}"] if self.offload != "none" else []
        return "_".join(
            str(part) for part in parts + ([f"{self.layers}layers"] if self.layers else [])
        )


def read_row(text: str) -> Row:
    """ArgumentTypeError that says what was wrong."""
    named = ("shape", "checkpointing", "matmul", "tokens")
    first, rest = text.split(":")[:4], text.split(":")[4:]
    found: dict[str, Any] = dict(zip(named, first, strict=False))
    for part in rest:
        key, _, value = part.rpartition("=")
        found[key or "objective"] = int(value) if value.isdigit() else value
    try:
        row = Row.model_validate(found, strict=False)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
        )
        raise argparse.ArgumentTypeError(f"{text}: {wrong}") from error
    if row.tokens % row.lengths[0]:
        raise argparse.ArgumentTypeError(
            f"{text}: sequences of {row.sequence} tokens do not fill {row.tokens}"
        )
    return row


class Drawn:
    """Random weights, a TensorSource that draws on the device that asks. Ranks that hold the same
    run get the same numbers; one run does not know of another, which speed does not care for."""

    def __init__(self, spec: ModelSpec) -> None:
        self.shapes = spec.parameter_shapes()

    def read(self, name: str, start: int, stop: int, out_N: torch.Tensor) -> None:
        if len(self.shapes[name]) == 1:
            out_N.fill_(1.0)
            return
        generator = torch.Generator(device=out_N.device).manual_seed(
            zlib.crc32(f"{name}@{start}".encode())
        )
        out_N.normal_(0.0, 0.02, generator=generator)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--gpus", type=int, default=torch.cuda.device_count(), help="ranks; left out, all there are"
    )
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument(
        "--rows", type=read_row, nargs="+", default=[read_row("8b:none:same:8192")], metavar="ROW"
    )
    options.add_argument("--steps", type=int, default=8, help="timed, after some that are not")
    options.add_argument("--row-s", type=float, default=150.0, help="longest that a row may take")
    options.add_argument("--wall-s", type=float, default=540.0, help="longest that all may take")
    args = options.parse_args()
    if args.record:
        # what a record needs and this machine lacks is told before anything is measured
        circumstances(args.commit)
    with Ranks(args.gpus, device=args.device, wall_s=args.wall_s) as ranks:
        for row in args.rows:
            budget_s = STEPS_SHARE * min(args.row_s, ranks.left_s())
            try:
                found = ranks.call(measure, row, args.steps, budget_s, deadline_s=args.row_s)[0]
            except RanksFailed as error:
                what = "out of memory" if error.out_of_memory else "failed"
                print_line(
                    {
                        "row": row.name,
                        what: {str(rank): dict(told) for rank, told in error.by_rank.items()},
                    }
                )
                continue
            report(args, row, found)


def report(args: argparse.Namespace, row: Row, found: dict[str, Any]) -> None:
    limit = (FP8_FLOPS if row.matmul == "fp8" else MATMUL_FLOPS) / (
        step_flops(row) / row.step_tokens
    )
    say(
        args,
        name=f"train_{args.gpus}x_{row.name}",
        unit="tokens/s per GPU",
        ours=found.pop("tokens_per_s"),
        peer=find_peer(row, args.gpus),
        limit=limit if args.device == "cuda" else None,
        settings={
            "gpus": args.gpus,
            **row.model_dump(),
            "layers": row.spec.num_layers,
            "sequence": row.lengths[0],
            "dtype": "bfloat16",
            "device": found.pop("device"),
            "kernels": found.pop("kernels"),
        },
        detail=found,
    )


def find_peer(row: Row, gpus: int) -> dict[str, Any] | None:
    """Its own record on as many GPUs, if there is one (bench/peers/torchtitan_gpu.py), else what
    was measured on 8."""
    if row.spec != SHAPES[row.shape]:
        return None
    path, key = RECORDS / "peer_torchtitan.json", (row.shape, row.matmul, row.lengths[0])
    if path.is_file():
        record = json.loads(path.read_text())
        like = [
            one
            for one in record["rows"]
            if (one["gpus"], one.get("tensor", 1)) == (gpus, row.tensor)
            and (one["shape"], one["matmul"], one["sequence"]) == key
            and "tokens_per_s" in one
        ]
        if like:
            best = max(like, key=lambda one: one["tokens_per_s"])
            name = (
                f"torchtitan {record['version']} on as many GPUs, checkpointing "
                f"{best['checkpointing']}"
            )
            return {"name": name, "kept_from": record["date"], "value": best["tokens_per_s"]}
    return {"name": TITAN, "value": PEERS[key]} if key in PEERS and row.tensor == 1 else None


def measure(group: RankGroup, tell: Tell, row: Row, steps: int, budget_s: float) -> dict[str, Any]:
    """On every rank. Past `budget_s` no further step is begun."""
    began_s, device, events = time.monotonic(), group.device, []
    trainer = make_trainer(group, row, events)
    batch = make_batch(row, group.size // row.tensor)
    settle(group)
    tell({"row": row.name, "made_s": round(time.monotonic() - began_s, 1)})
    for _ in range(WARM_UP):
        assert trainer.step_now(batch).num_updates == 1, (
            "an update was left out: a gradient was not finite"
        )
    settle(group)
    tell({"row": row.name, "warm_s": round(time.monotonic() - began_s, 1)})
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times_s, waits_s = [], []
    while len(times_s) < steps:
        times_s.append(timed(group, lambda: waits_s.append(wait_of(trainer.step_now(batch)))))
        if max(group.share(time.monotonic() - began_s)) > budget_s:
            break
    step_s = statistics.median(times_s)
    found = {
        "tokens_per_s": round(row.step_tokens / row.tensor / step_s, 1),
        "mfu": round(step_flops(row) / row.tensor / step_s / PEAK_FLOPS, 4)
        if device.type == "cuda"
        else None,
        "step_ms": [round(seconds * 1e3, 2) for seconds in times_s],
        "wait_ms": [round(seconds * 1e3, 2) for seconds in waits_s],
        **memory(group, trainer),
        "predicted_gib": predicted_gib(row, group),
    }
    tell({"row": row.name, **found})
    found |= traced(group, trainer, batch)
    kernels = {kind: fields for kind, fields in events if kind.startswith("trainer.")}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {**found, "kernels": kernels, "device": name}


def wait_of(report: StepReport) -> float:
    """Seconds that the rank waited longest for collectives, by the trainer's own clock; 0 on one
    rank."""
    return report.measured.get("communication_wait_seconds", 0.0)


def make_trainer(
    group: RankGroup, row: Row, events: list, decoder: Decoder | None = None
) -> NativeTrainer:
    """A `decoder` that is given is on the meta device."""
    config = TrainerConfig(
        learning_rate=1e-6,
        checkpointing=row.checkpointing,
        matmul=row.matmul,
        tokens_per_chunk=row.tokens,
        offload_optimizer=row.offload,
    )
    return NativeTrainer(
        decoder=decoder or blank_decoder(row),
        objective=OBJECTIVES[row.objective],
        config=config,
        compute=ThreadPoolExecutor(1),  # never asked: the bench calls step_now
        emit=lambda kind, **fields: events.append((kind, fields)),
        seed=0,
        weights=Drawn(row.spec),
        group=group,
        parallel=ParallelConfig(zero=row.zero, sum_gradients=row.sum, tensor_ranks=row.tensor),
    )


def blank_decoder(row: Row) -> Decoder:
    return Decoder(row.spec, device=torch.device("meta"), dtype=torch.bfloat16)


def make_batch(row: Row, ranks: int) -> TrainBatch:
    """Random tokens for so many ranks that see other data. With grpo each sequence is a rollout
    with an advantage."""
    rng, made = np.random.default_rng(0), []
    for index, length in enumerate(row.lengths * ranks):
        mask = np.arange(length) >= prompt_tokens(row)
        columns: dict[str, np.ndarray] = {"loss_mask": mask}
        if row.objective == "grpo":
            advantage = np.float32(1.0 if index % 2 else -1.0)
            columns |= {"advantages": np.where(mask, advantage, np.float32(0.0))}
            columns |= {"logprobs": np.where(mask, np.float32(LOGPROB), np.float32(0.0))}
        tokens = rng.integers(0, row.spec.vocab_size, length, dtype=np.int32)
        made.append(TrainSequence(tokens=tokens, columns=columns, group_id=str(index // 8)))
    return TrainBatch(sequences=tuple(made), step=0)


def prompt_tokens(row: Row) -> int:
    """Of a sequence, which are no targets."""
    return max(1, row.lengths[0] // PROMPT_SHARE) if row.objective == "grpo" else 1


def step_flops(row: Row) -> float:
    """Of the ranks that share layers: three forward passes' worth."""
    targets = sum(length - prompt_tokens(row) for length in row.lengths)
    return 3 * forward_flops(row.spec, row.lengths, num_outputs=targets)


def memory(group: RankGroup, trainer: NativeTrainer) -> dict[str, Any]:
    """By rank: what was allocated at most, weights in virtual memory included; what torch's
    allocator reserved; what the device has given away, for NCCL and the driver too."""
    if group.device.type != "cuda":
        return {}
    virtual = sum(
        usage.device_bytes
        for usage in trainer.measure().values()
        if isinstance(usage, VirtualUsage)
    )
    free, total = torch.cuda.mem_get_info(group.device)
    own = [torch.cuda.max_memory_allocated(group.device) + virtual]
    own += [torch.cuda.max_memory_reserved(group.device), total - free]
    by_rank = [[round(size / 2**30, 2) for size in sizes] for sizes in group.share(own)]
    return dict(
        zip(
            ("peak_gib", "reserved_gib", "device_gib"),
            map(list, zip(*by_rank, strict=True)),
            strict=True,
        )
    )


def predicted_gib(row: Row, group: RankGroup) -> dict[str, float]:
    """What the plan says is allocated, by moment of a step."""
    ranks = group.size // row.tensor
    layout = Layout(
        gpus=group.size,
        tensor_ranks=row.tensor,
        zero=row.zero if ranks > 1 else 0,
        sum_gradients=row.sum,
        shard_ranks=ranks if row.zero else 1,
        checkpointing=row.checkpointing,
        tokens_per_chunk=row.tokens,
        offload_optimizer=row.offload,
        offload_gradients=False,
    )
    tokens, length = row.step_tokens * ranks, row.lengths[0]
    job = TrainingJob(
        model=model_part(row.spec, row.tensor),
        dtype="bfloat16",
        saving=saving_on_cuda(group.device) if group.device.type == "cuda" else saving_on_cpu(),
        longest=length,
        mean_tokens=length,
        tokens_per_update=tokens,
        most_tokens_per_update=tokens,
        target_share=1 - prompt_tokens(row) / length,
        matmul=row.matmul,
    )
    return {
        moment.name: round(moment.allocated_bytes / 2**30, 2)
        for moment in train_moments(job, layout)
    }


def traced(group: RankGroup, trainer: NativeTrainer, batch: TrainBatch) -> dict[str, Any]:
    """One more step under the profiler, on every rank."""
    on_cuda = group.device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]
    ) as profiled:
        wall_s = timed(group, functools.partial(trainer.step_now, batch))
    works = works_of(profiled.events() or [], on_cuda=on_cuda)
    told = summarize(works, wall_s=wall_s)
    shares = group.share(told["exposed_s"] / wall_s)
    return {
        "exposed_share": round(max(shares), 4),
        "exposed_share_by_rank": [round(share, 4) for share in shares],
        "traced_ms": {
            key.removesuffix("_s"): round(seconds * 1e3, 2) for key, seconds in told.items()
        },
        "parts_ms": parts_ms(works),
    }


def parts_ms(works: list[Work]) -> dict[str, float]:
    """Milliseconds of kernels by part of the step. Kernels that ran beside each other all count."""
    parts: dict[str, float] = {}
    for work in works:
        words = "communication" if work.communicates else None
        name = words or next(
            (part for part, keys in PARTS.items() if any(key in work.name for key in keys)), "other"
        )
        parts[name] = parts.get(name, 0.0) + (work.end_s - work.start_s) * 1e3
    return {
        name: round(ms, 2)
        for name, ms in sorted(parts.items(), key=lambda p: -p[1])
        if not math.isclose(ms, 0.0)
    }


if __name__ == "__main__":
    main()
