"""Peer of bench/train_ranks.py: torchtitan on the same GPUs, Qwen3 shapes of its own, random tokens, no tokenizer. In:
a folder, rows. Out: peer_torchtitan.json there: tokens/s per GPU by its own metrics, row by row as they come. Runs
without Gyre, with torchtitan on the path.
Run: python peers/torchtitan_gpu.py FOLDER --gpus 4 --rows 8b:none:same:8192 8b:selective:same:8192 4b:full:same:65536

A row is SHAPE:CHECKPOINTING:MATMUL:TOKENS[:BATCH], one sequence of TOKENS, or BATCH of them, per GPU. FSDP over all of
them, float32 parameters, BF16 compute, compiled layers and loss, fused AdamW; selective is its per-operator kind. fp8
(which needs torchao) is its tensorwise recipe with 8-bit all-gathers, all layers but the output. Each row has processes
and a deadline of its own; compiled code is kept in FOLDER/inductor from row to row.

Its metrics are read every four steps, each time after the device has ended. Those of the steps from the fifth on count,
in the median; the first four compile and warm up.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
import traceback
import types
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

FLAVORS = {"0.6b": "0.6B", "4b": "4B", "8b": "8B", "tiny": "debugmodel"}
STEPS, WINDOW = 16, 4
EXIT_S = 20.0
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",  # multicast can put the GPUs of a shared host out of service
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as its own start script does
}
UNUSED = {  # what it imports and these runs don't use, by name: put in its place where it is not installed
    "datasets": ("Dataset", "load_dataset"),
    "datasets.distributed": ("split_dataset_by_node",),
    "tokenizers": ("AddedToken", "Tokenizer"),
    "torch.utils.tensorboard": ("SummaryWriter",),
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    options.add_argument("--rows", nargs="+", default=["8b:none:same:8192"])
    options.add_argument("--row-s", type=float, default=240.0, help="longest that a row may take")
    options.add_argument("--wall-s", type=float, default=560.0, help="longest that all may take")
    args = options.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + args.wall_s
    for row in [read_row(text) | {"gpus": args.gpus} for text in args.rows]:
        found = measure_apart(row, args.folder, min(args.row_s, ends_at - time.monotonic() - EXIT_S))
        if "tokens_per_s" in found:
            keep(args.folder / "peer_torchtitan.json", row | found)
        print(json.dumps(row | found), flush=True)


def read_row(text: str) -> dict[str, Any]:
    shape, checkpointing, matmul, tokens, *batch = text.split(":")
    if shape not in FLAVORS or checkpointing not in ("none", "selective", "full") or matmul not in ("same", "fp8"):
        raise SystemExit(
            f"{text}: a row is SHAPE:CHECKPOINTING:MATMUL:TOKENS[:BATCH], SHAPE one of {', '.join(FLAVORS)}"
        )
    sequence, batch_size = int(tokens), int(batch[0]) if batch else 1
    return {
        "shape": shape, "checkpointing": checkpointing, "matmul": matmul, "sequence": sequence, "batch": batch_size,
    }  # fmt: skip


def keep(path: Path, row: dict[str, Any]) -> None:
    """Put a row into the record, in the place of an earlier one of its kind."""
    key = ("shape", "checkpointing", "matmul", "sequence", "batch", "gpus")
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    rows = [one for one in rows if any(one[name] != row[name] for name in key)] + [row]
    packages = ("torchtitan", "torch", "torchao")
    versions = {name: version for name in packages if (version := version_of(name)) is not None}
    record = {"version": versions.get("torchtitan"), "date": datetime.date.today().isoformat(), "versions": versions}
    path.write_text(json.dumps(record | {"rows": rows}, indent=2) + "\n")


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure_apart(row: dict[str, Any], folder: Path, row_s: float) -> dict[str, Any]:
    """A process per GPU; what rank 0 tells is printed at once, and counts even if the row does not end."""
    context, windows, failed = multiprocessing.get_context("spawn"), [], {}
    began_s, port, ends, processes = time.monotonic(), free_port(), {}, []
    for rank in range(row["gpus"]):
        ours, theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=serve, args=(theirs, row, str(folder), rank, port), daemon=True))
        processes[-1].start()
        theirs.close()
        ends[ours] = rank
    while ends:
        left_s = row_s - (time.monotonic() - began_s)
        ready = [end for end in ends if end in wait(list(ends), timeout=max(0.0, left_s))]
        if not ready:
            failed = failed or {"all": f"not done within {row_s:.0f} s"}
            break
        for end in ready:
            try:
                kind, told = end.recv()
            except (EOFError, ConnectionResetError):
                ends.pop(end)
                continue
            if kind == "failed":
                failed[str(ends.pop(end))] = told
                row_s = min(row_s, time.monotonic() - began_s + EXIT_S)  # the others wait for it in vain
            elif kind == "done":
                ends.pop(end)
            else:
                windows.append(told | {"at_s": round(time.monotonic() - began_s, 1)})
                print(json.dumps(told), flush=True)
    for process in processes:
        process.join(0.0 if failed else EXIT_S)
        process.kill()
    return summarise(windows) | ({"failed": failed} if failed else {})


def summarise(windows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of what its metrics said at each look."""
    found: dict[str, Any] = {"first_step_after_s": windows[0]["at_s"]} if windows else {}
    timed = [one for one in windows if one["step"] > WINDOW]
    if not timed:
        return found
    return found | {
        "tokens_per_s": statistics.median(one["throughput(tps)"] for one in timed),
        "tokens_per_s_by_window": [round(one["throughput(tps)"], 1) for one in timed],
        "its_mfu": round(statistics.median(one["mfu(%)"] for one in timed) / 100, 4),
        "reserved_gib": max(one["memory/max_reserved(GiB)"] for one in timed),
        "loss": timed[-1]["loss_metrics/global_avg_loss"],
    }


def serve(end: Connection, row: dict[str, Any], folder: str, rank: int, port: int) -> None:
    """A rank's process."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(row["gpus"])}
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    os.environ.update({**ENVIRONMENT, **address, **own})
    try:
        train(row, folder, lambda told: end.send(("told", told)) if rank == 0 else None)
    except Exception as error:  # noqa: BLE001  the parent prints it
        trace = "".join(traceback.format_tb(error.__traceback__)[-3:])
        end.send(("failed", f"{type(error).__name__}: {str(error)[:800]}\n{trace}"))
        return
    end.send(("done", None))


def train(row: dict[str, Any], folder: str, tell: Any) -> None:
    """torchtitan's own Trainer, from its start to its last step."""
    stand_in_for_unused()
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    init_logger()
    register_train_spec("bench", make_spec(tell))
    trainer = Trainer(make_config(row, folder))
    try:
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


def stand_in_for_unused() -> None:
    for name, attributes in UNUSED.items():
        try:
            importlib.import_module(name)
        except ImportError:
            module = types.ModuleType(name)
            for attribute in attributes:
                setattr(module, attribute, type(attribute, (), {}))
            sys.modules[name] = module


def make_spec(tell: Any) -> Any:
    """Its Qwen3, with data and metrics of ours."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.metrics import BaseLogger, MetricsProcessor
    from torchtitan.models.qwen3 import get_train_spec, qwen3_args

    class RandomBatches(BaseDataLoader):
        """(inputs, labels) without end; every token is a label."""

        def __init__(self, *, dp_rank: int, job_config: Any, **_: Any) -> None:
            self._size = job_config.training.local_batch_size, job_config.training.seq_len + 1
            self._vocab_size = qwen3_args[job_config.model.flavor].vocab_size
            self._generator = torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                tokens = torch.randint(0, self._vocab_size, self._size, generator=self._generator)
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    class Told(BaseLogger):
        def log(self, metrics: dict[str, Any], step: int) -> None:
            tell({"step": step, **{name: float(value) for name, value in metrics.items()}})

        def close(self) -> None:
            pass

    class ToldMetrics(MetricsProcessor):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.logger = Told()

    spec = get_train_spec()
    spec.build_dataloader_fn, spec.build_tokenizer_fn = RandomBatches, None
    spec.build_metrics_processor_fn, spec.state_dict_adapter = ToldMetrics, None
    return spec


def make_config(row: dict[str, Any], folder: str) -> Any:
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.job.dump_folder = folder
    config.metrics.log_freq, config.metrics.disable_color_printing = WINDOW, True
    config.model.name, config.model.flavor = "bench", FLAVORS[row["shape"]]
    config.training.local_batch_size, config.training.seq_len = row["batch"], row["sequence"]
    config.training.steps, config.lr_scheduler.warmup_steps = STEPS, 2
    config.activation_checkpoint.mode = row["checkpointing"]
    config.activation_checkpoint.selective_ac_option = "op"
    config.compile.enable = True
    if row["matmul"] == "fp8":
        config.model.converters = ["float8"]
        float8 = config.quantize.linear.float8
        float8.enable_fsdp_float8_all_gather = float8.precompute_float8_dynamic_scale_for_fsdp = True
        float8.filter_fqns = ["output"]
    return config


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
