"""Peer of bench/train_ranks.py: torchtitan 0.2.2 trains Qwen3 shapes on the GPUs of one host,
weights and tokens at random. In: a folder to write to. Out: peer_torchtitan.json there: tokens/s
per GPU, MFU, peak memory, a row a case, and each row as a line at once. Runs in torchtitan's own
environment. Run: python peers/torchtitan_gpu.py FOLDER [case ...].

FSDP over all ranks, compiled blocks and loss, fused AdamW, BF16 over FP32 parameters, as its
defaults have it. Without FSDP it has no mixed precision: where tensor parallel takes all GPUs,
parameters, gradients and moments are BF16, which is less work than ours. Speed is by its own
counters. Each case has fresh processes and a deadline; one out of memory or out of time is a result
too. MFU = model FLOPs / seconds / 989e12 with gyre's FLOPs (models/flops.py): causal attention at
half, output projection counted. torchtitan's own counts attention in full, and no output projection
where it is tied.
"""

# This file is not torchtitan.py, since a script's own folder comes first among those that Python
# imports from.

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    flavor: str  # of torchtitan's qwen3
    sequence: int  # tokens of each
    batch: int = 1  # sequences of each GPU in a step
    checkpointing: str = "none"  # "selective": by operation, as its Qwen3 configurations have it
    # "fp8": the layers' products, scaled by tensor, weights gathered in 8 bits; needs torchao
    matmul: str = "same"
    steps: int = 12
    window: int = 3  # steps between two readings of its counters, which wait for the GPU
    tensor: int = 1  # GPUs that share layers, with sequence parallel; no FSDP where these are all


CASES = {
    "8b": Case("8B", 8192),
    "8b_fp8": Case("8B", 8192, matmul="fp8"),
    "4b_64k": Case("4B", 65_536, checkpointing="full", steps=5, window=1),
    "8b_selective_batch2": Case("8B", 8192, batch=2, checkpointing="selective"),
    "8b_fp8_selective_batch2": Case("8B", 8192, batch=2, checkpointing="selective", matmul="fp8"),
    "8b_selective": Case("8B", 8192, checkpointing="selective"),
    "8b_batch2": Case("8B", 8192, batch=2),
    "4b_64k_selective": Case("4B", 65_536, checkpointing="selective", steps=5, window=1),
    "8b_tensor2": Case("8B", 8192, tensor=2),
    "8b_tensor2_selective": Case("8B", 8192, checkpointing="selective", tensor=2),
    "4b_32k": Case("4B", 32_768, checkpointing="full", steps=8, window=2),
    # is all there? not among the default ones (DEBUG)
    "debug": Case("debugmodel", 256, batch=2, checkpointing="selective"),
    "debug_tensor2": Case("debugmodel", 256, batch=2, tensor=2),
}
DEBUG = ("debug", "debug_tensor2")
WARM_UP = 2  # steps; a window that begins earlier does not count
PEAK_FLOPS = 989e12  # dense BF16 of an H100 or H200 by its data sheet
PACKAGES = ("torchtitan", "torchao", "triton")
EXIT_DEADLINE_S = 15.0  # for a case's processes to end after their answers
ENVIRONMENT = {
    # NVLink multicast can put the GPUs of a shared host out of service
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    # as torchrun and its script have them
    "PYTORCH_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "1",
    # training in 8 bits is Python; its libraries are for other versions
    "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument(
        "cases",
        nargs="*",
        metavar="case",
        help=f"of {', '.join(CASES)}; left out, all but {', '.join(DEBUG)}",
    )
    options.add_argument("--gpus", type=int, default=0, help="0: all of this host")
    options.add_argument(
        "--deadline",
        type=float,
        default=170.0,
        help="seconds of one case, start and compilation too",
    )
    args = options.parse_args()
    names = args.cases or [name for name in CASES if name not in DEBUG]
    if unknown := sorted(set(names) - set(CASES)):
        options.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    gpus = args.gpus or count_gpus()
    args.folder.mkdir(parents=True, exist_ok=True)
    version, date = importlib.metadata.version("torchtitan"), datetime.date.today().isoformat()
    record: dict[str, Any] = {
        "version": version,
        "date": date,
        "unit": "tokens/s per GPU",
        "versions": versions(),
    }
    record |= {"device": "", "environment": ENVIRONMENT, "rows": []}
    for name in names:
        begun_s = time.perf_counter()
        found = measure_apart(name, gpus, args.folder, args.deadline)
        record["device"] = found.pop("device", record["device"])
        found["whole_case_s"] = round(time.perf_counter() - begun_s, 1)
        settings = {"shape": CASES[name].flavor.lower(), **dataclasses.asdict(CASES[name])}
        settings["dtype"] = dtype_of(CASES[name], gpus)
        record["rows"].append({"case": name, "gpus": gpus, **settings, **found})
        (args.folder / "peer_torchtitan.json").write_text(json.dumps(record, indent=2) + "\n")
        print(json.dumps(record["rows"][-1]), flush=True)


def count_gpus() -> int:
    import torch

    if count := torch.cuda.device_count():
        return count
    raise SystemExit("this host has no CUDA device; torchtitan's trainer needs one")


def versions() -> dict[str, str]:
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
    }
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def measure_apart(name: str, gpus: int, folder: Path, deadline_s: float) -> dict[str, Any]:
    """One process a GPU, each the leader of a process group, none of which outlives this call."""
    if CASES[name].matmul == "fp8" and importlib.util.find_spec("torchao") is None:
        return {
            "outcome": "not run",
            "error": "torchao cannot be imported; install 0.17.0 (for torch 2.11)",
        }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ends, workers = [], []
    try:
        for rank in range(gpus):
            ours, theirs = context.Pipe(duplex=False)
            seat = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": gpus, "LOCAL_WORLD_SIZE": gpus}
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            seat_env = {key: str(value) for key, value in {**seat, **address}.items()}
            worker = context.Process(target=train, args=(name, seat_env, str(folder), theirs))
            worker.start()
            theirs.close()
            ends.append(ours)
            workers.append(worker)
        answers = collect(ends, workers, deadline_s)
        if all(answer["outcome"] == "measured" for answer in answers):
            for end_s, worker in (
                (time.monotonic() + EXIT_DEADLINE_S, worker) for worker in workers
            ):
                worker.join(max(0.0, end_s - time.monotonic()))
        return together(answers)
    finally:
        for worker in workers:
            # ended with all its children, or not yet a leader
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.kill()
            worker.join(EXIT_DEADLINE_S)


def collect(
    ends: list[Connection], workers: list[BaseProcess], deadline_s: float
) -> list[dict[str, Any]]:
    """The answer of each rank, or the one that ended the case: a rank without which the others
    would wait."""
    waiting, answers = dict(zip(ends, workers, strict=True)), []
    end_s = time.monotonic() + deadline_s
    while waiting:
        sentinels = {worker.sentinel: end for end, worker in waiting.items()}
        ready = multiprocessing.connection.wait(
            [*waiting, *sentinels], timeout=max(0.0, end_s - time.monotonic())
        )
        if not ready:
            return [
                {
                    "outcome": "timed out",
                    "error": f"{len(answers)} of {len(ends)} ranks within {deadline_s:.0f} s",
                }
            ]
        end = ready[0] if isinstance(ready[0], Connection) else sentinels[ready[0]]
        worker = waiting.pop(end)
        try:
            answer = end.recv() if end.poll() else None
        except EOFError:
            answer = None
        if answer is None:
            worker.join(1.0)
            answer = {
                "outcome": "failed",
                "error": f"a rank ended with exit code {worker.exitcode} and no answer",
            }
        if answer["outcome"] != "measured":
            return [answer]
        answers.append(answer)
    return answers


def together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed of rank 0, which runs in step with all; memory of the rank that needs most."""
    peaks = {
        key: max(answer[key] for answer in answers) for key in answers[0] if key.startswith("peak_")
    }
    return {**min(answers, key=lambda answer: answer.get("rank", 0)), **peaks}


def train(name: str, seat: dict[str, str], folder: str, answer: Connection) -> None:
    """A rank's whole life."""
    os.setsid()
    with open(Path(folder) / f"{name}_rank{seat['RANK']}.log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update({**ENVIRONMENT, **seat})
    try:
        trainer, found = measure(CASES[name], folder)
        answer.send({"outcome": "measured", "rank": int(seat["RANK"]), **found})
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        outcome = "out of memory" if "out of memory" in said.lower() else "failed"
        answer.send({"outcome": outcome, "rank": int(seat["RANK"]), "error": said[:600]})
        raise
    import torch

    trainer.close()
    torch.distributed.destroy_process_group()


def measure(case: Case, folder: str) -> tuple[Any, dict[str, Any]]:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.metrics import BaseLogger, build_metrics_processor
    from torchtitan.models import qwen3
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    class Readings(BaseLogger):
        """Takes what its trackers of experiments would."""

        def __init__(self) -> None:
            self.taken: dict[int, dict[str, float]] = {}

        def log(self, metrics: dict[str, Any], step: int) -> None:
            self.taken[step] = metrics

    class RandomTokens(BaseDataLoader):
        def __init__(
            self, *, dp_world_size: int, dp_rank: int, tokenizer: None, job_config: Any
        ) -> None:
            self.rank = dp_rank

        def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
            return random_batches(case, qwen3.qwen3_args[case.flavor].vocab_size, self.rank)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            assert not state_dict

    readings = Readings()

    def build_metrics(*args: Any, **kwargs: Any) -> Any:
        processor = build_metrics_processor(*args, **kwargs)
        processor.logger = readings
        return processor

    init_logger()
    spec = dataclasses.replace(
        qwen3.get_train_spec(),
        build_dataloader_fn=RandomTokens,
        build_metrics_processor_fn=build_metrics,
        build_tokenizer_fn=None,
        build_validator_fn=None,
        state_dict_adapter=None,
    )
    register_train_spec("qwen3", spec)  # a registered one goes before its own of that name
    trainer = Trainer(job_config(case, folder))
    trainer.train()
    return trainer, {"device": trainer.metrics_processor.device_memory_monitor.device_name} | read(
        case, readings.taken, trainer.model_args
    )


def random_batches(case: Case, vocab_size: int, rank: int) -> Iterator[tuple[dict[str, Any], Any]]:
    """No tokenizer and no data set: input and the tokens after it, both of shape batch × tokens."""
    import torch

    draw = torch.Generator().manual_seed(rank)
    while True:
        ids = torch.randint(vocab_size, (case.batch, case.sequence + 1), generator=draw)
        yield {"input": ids[:, :-1]}, ids[:, 1:]


def dtype_of(case: Case, gpus: int) -> str:
    """Of parameters and moments; products are in bfloat16."""
    return "bfloat16" if case.tensor == gpus > 1 else "float32"


def job_config(case: Case, folder: str) -> Any:
    """Its defaults, but for what a case says."""
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name, config.model.flavor = "qwen3", case.flavor
    config.metrics.log_freq, config.metrics.disable_color_printing = case.window, True
    config.training.local_batch_size, config.training.seq_len = case.batch, case.sequence
    config.training.steps = case.steps
    config.activation_checkpoint.mode = case.checkpointing
    config.activation_checkpoint.selective_ac_option = "op"
    config.compile.enable = True
    config.parallelism.tensor_parallel_degree = case.tensor
    config.training.dtype = dtype_of(case, int(os.environ["WORLD_SIZE"]))
    if case.matmul == "fp8":
        config.model.converters = ["quantize.linear.float8"]
        float8 = config.quantize.linear.float8
        float8.enable_fsdp_float8_all_gather = float8.precompute_float8_dynamic_scale_for_fsdp = (
            True
        )
        float8.filter_fqns = ["output"]
    return config


def read(case: Case, taken: dict[int, dict[str, float]], shape: Any) -> dict[str, Any]:
    """Numbers of one rank from its counters, read at step 1 and at every `window`-th."""
    counted = {step: row for step, row in taken.items() if step - case.window >= WARM_UP}
    assert counted, f"no window of {case.window} of {case.steps} steps begins after step {WARM_UP}"
    rates = [row["throughput(tps)"] for row in counted.values()]
    rate, last = statistics.median(rates), taken[max(taken)]
    return {
        "tokens_per_s": round(rate, 1),
        "tokens_per_s_by_window": [round(found, 1) for found in rates],
        "step_ms": round(1e3 * case.batch * case.sequence / rate, 1),
        "mfu": round(rate * flops_per_token(shape, case.sequence) / PEAK_FLOPS, 4),
        "mfu_by_its_counter": round(
            statistics.median(row["mfu(%)"] for row in counted.values()) / 100, 4
        ),
        "peak_reserved_gib": round(
            max(row["memory/max_reserved(GiB)"] for row in counted.values()), 2
        ),
        "peak_active_gib": round(max(row["memory/max_active(GiB)"] for row in counted.values()), 2),
        "allocation_retries": last["memory/num_alloc_retries"],
        "model_and_first_step_s": round(taken[1]["time_metrics/end_to_end(s)"] * case.window, 1),
        "loss": [
            round(taken[1]["loss_metrics/global_avg_loss"], 3),
            round(last["loss_metrics/global_avg_loss"], 3),
        ],
    }


def flops_per_token(shape: Any, tokens: int) -> float:
    """Model FLOPs of forward and backward, as the head of this file says."""
    # rows of query, key, value, columns of output
    heads = (2 * shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
    layer = (
        2 * shape.dim * (heads + 3 * shape.hidden_dim)
        + 4 * shape.n_heads * shape.head_dim * tokens / 2
    )
    return 3.0 * (shape.n_layers * layer + 2 * shape.vocab_size * shape.dim)


if __name__ == "__main__":
    main()
