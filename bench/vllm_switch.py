"""Switches between training and rollout with vLLM in its sidecar, on one device: parked by sleep
level 2, or terminated while the policy trains. In: a shape, vLLM's environment. Out: seconds from
registered weights to the first token and from the last token to a free device, by part. Run:
python bench/vllm_switch.py --shape 8b --record   (two versions of the weights in /dev/shm)

The publisher is this process, with the weights on the device beside vLLM, as a trainer has them. A
switch to rollout: memory is taken, the version is prepared, loaded and answers with a token. A
switch to training: memory is given back, by the device's own reading. What of a start hides behind
training is not counted. The limit is a copy of the weights from page-locked memory.

Prediction, before the first run: parked 2 s for 16 GB, of which the load takes one. Terminated
25 s: vLLM starts an engine of 8B in 65 to 75 s, of which compilation and imports are warm here.
Found: 1.9 s and 20 s. With a start that began behind training 17 s were expected, and 13.7 s found.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from gyre.cluster.engine_pool.pool import EnginePool, PoolSettings
from gyre.cluster.engine_pool.restarts import RestartPolicy
from gyre.cluster.process_cluster import ProcessCluster
from gyre.core.chunks import collect
from gyre.core.contracts import WorkerHandle
from gyre.core.offers import LocalTensors, Offer
from gyre.core.records import Request, RoleSpec, Sampling
from gyre.distributed.environment import child_environment
from gyre.launch.sidecar import BUILDER
from gyre.models.hub.export import write_json
from gyre.models.spec import ModelSpec, hub_config_from_spec
from gyre.sidecars.vllm.config import DuringTraining
from gyre.sidecars.vllm.environment import process_variables, python_of
from gyre.sidecars.vllm.llm import VllmRole, VllmSettings
from gyre.sidecars.vllm.requests import TokenLimits
from gyre.sidecars.vllm.versions import build_for
from gyre.weights.manifest import make_manifest
from gyre.weights.transports.publish import join_parts, publish_part
from gyre.weights.transports.shared_memory import SharedMemoryStore
from record import parser, say
from train_ranks import SHAPES
from weights_shm import make_tensors

REQUIRED_S = {"sleep": 5.0, "terminate": 20.0}
START_S, CALL_S = 400.0, 200.0


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    options.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--environment", type=Path, default=Path(".venvs/vllm"))
    options.add_argument("--ways", nargs="+", default=["sleep", "terminate"])
    options.add_argument("--switches", type=int, default=4, help="the first is not counted")
    options.add_argument("--kv-gib", type=float, default=16.0)
    options.add_argument(
        "--train-s", type=float, default=6.0, help="between a switch to training and the next"
    )
    options.add_argument("--eager", action="store_true", help="without CUDA graphs")
    args = options.parse_args()
    tensors = make_tensors(args)
    for way in args.ways:
        found = asyncio.run(asyncio.wait_for(measure(args, way, tensors), 560.0))
        report(args, way, tensors, found)


async def measure(
    args: argparse.Namespace, way: DuringTraining, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Switch to and fro; return seconds by part, of each switch."""
    spec = replace(SHAPES[args.shape], num_layers=args.layers or SHAPES[args.shape].num_layers)
    to_rollout: list[dict[str, float]] = []
    to_training: list[dict[str, float]] = []
    held: dict[str, list[int]] = {"rollout": [], "train": []}
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, closing(make_store(args)) as store:
        async with started(args, way, spec, Path(folder)) as (handle, pool):
            imports_s = time.monotonic() - began_s
            await call(handle, "begin", "main", "{}", 0, "")
            for version in range(args.switches):
                offer, register_s = await timed(
                    asyncio.to_thread(register, tensors, version, store)
                )
                told, take_s = await timed(call(handle, "enter", "handover", version))
                _, prepare_s = await timed(pool.prepare(offer))
                _, load_s = await timed(pool.commit(version, policy="drain"))
                _, token_s = await timed(ask(pool, spec, version))
                to_rollout.append(
                    {
                        "register": register_s,
                        "take_memory": take_s,
                        "prepare": prepare_s,
                        "load": load_s,
                        "first_token": token_s,
                    }
                )
                held["rollout"].append(told.process_bytes)
                told, give_s = await timed(call(handle, "enter", "train", version))
                to_training.append({"give_back": give_s})
                held["train"].append(told.process_bytes)
                await asyncio.sleep(args.train_s)
                print(way, version, to_rollout[-1], to_training[-1], told, flush=True)
    return {
        "process_start_s": round(imports_s, 2),
        "train_to_rollout": by_part(to_rollout),
        "rollout_to_train": by_part(to_training),
        "process_bytes": held,
        "plain_copy_s": plain_copy_s(tensors),
    }


def by_part(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Seconds of the first switch, and medians of the others, by part and in all."""
    rows = [{**row, "all": sum(row.values())} for row in rows]
    return {
        "first_s": {name: round(value, 3) for name, value in rows[0].items()},
        "median_s": {
            name: round(statistics.median(row[name] for row in rows[1:]), 3) for name in rows[0]
        },
        "all_s": [round(row["all"], 3) for row in rows],
    }


def register(tensors: dict[str, Tensor], version: int, store: SharedMemoryStore) -> Offer:
    """Register a version that differs from the one before in each tensor."""
    for tensor in tensors.values():
        tensor.view(-1)[:1].fill_(float(version) / 1024)
    manifest = make_manifest(version, tensors, shared=False, checksums=False)
    offer = Offer(manifest=manifest, source=LocalTensors(tensors=tensors))
    part = publish_part(offer, rank=0, num_ranks=1, store=store)
    return join_parts(version, 0, [part])


async def ask(pool: EnginePool, spec: ModelSpec, version: int) -> None:
    """Have one token, of this version."""
    request = Request(
        request_id=f"first-{version}",
        tokens=np.arange(1, 9, dtype=np.int32) % spec.vocab_size,
        sampling=Sampling(max_tokens=1, temperature=0.0),
    )
    (completion,) = await collect(pool.submit(request))
    assert completion.versions.tolist() == [version], completion


async def timed(work: Awaitable[Any]) -> tuple[Any, float]:
    began_s = time.monotonic()
    result = await work
    return result, time.monotonic() - began_s


async def call(handle: WorkerHandle, method: str, *given: Any) -> Any:
    return await asyncio.wait_for(asyncio.wrap_future(handle.begin(method, *given)), START_S)


def make_store(args: argparse.Namespace) -> SharedMemoryStore:
    return SharedMemoryStore(
        run_id=uuid.uuid4().hex[:8],
        owner=0,
        emit=lambda kind, **fields: None,
        pin=args.device == "cuda",
    )


@asynccontextmanager
async def started(
    args: argparse.Namespace, way: DuringTraining, spec: ModelSpec, folder: Path
) -> AsyncIterator[tuple[WorkerHandle, EnginePool]]:
    """Start the sidecar's process, whose vLLM is not started yet."""

    def note(worker: str, kind: str, **fields: Any) -> None:
        print(kind, fields, flush=True)

    is_cuda = args.device == "cuda"
    write_json(folder / "config.json", {**hub_config_from_spec(spec), "dtype": "bfloat16"})
    cluster = ProcessCluster(gpus=int(is_cuda), on_event=note)
    try:
        handle = await cluster.start(role_spec(args, way, spec, folder))
        settings = PoolSettings(
            call_deadline_s=CALL_S,
            hang_s=CALL_S,
            progress_tokens=64,
            restarts=RestartPolicy(max_restarts=0),
        )
        yield (
            handle,
            EnginePool(
                cluster, [handle], settings=settings, emit=lambda kind, **fields: None, revive=None
            ),
        )
    finally:
        await cluster.close()


def role_spec(
    args: argparse.Namespace, way: DuringTraining, spec: ModelSpec, folder: Path
) -> RoleSpec:
    settings = VllmSettings(
        folder=str(folder),
        dtype="bfloat16",
        context_tokens=spec.context_tokens,
        max_running=256,
        token_budget=8192,
        prefix_cache=True,
        gpu_memory_utilization=0.8,
        kv_bytes=int(args.kv_gib * 2**30),
        enforce_eager=args.eager,
        start_deadline_s=START_S,
        update_deadline_s=CALL_S,
    )
    role = VllmRole(
        settings=settings,
        limits=TokenLimits(
            vocab_size=spec.vocab_size, context_tokens=spec.context_tokens, most_completions=512
        ),
        drain_deadline_s=60.0,
        during_training=way,
    )
    return RoleSpec(
        name="vllm",
        builder=BUILDER,
        arguments={"role_json": msgspec.json.encode(role).decode()},
        environment={
            **process_variables(build_for(args.device), threads=1, eager=args.eager),
            **child_environment(),
            "VLLM_LOGGING_LEVEL": "INFO",
        },
        interpreter=str(python_of(args.environment.absolute())),
        gpus=float(args.device == "cuda"),
        deadline_s=START_S,
    )


def plain_copy_s(tensors: dict[str, Tensor]) -> float:
    """Seconds of a copy of as many bytes from page-locked memory of this process."""
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    is_cuda = next(iter(tensors.values())).is_cuda
    chunk = torch.ones(min(size_bytes, 1 << 30), dtype=torch.uint8, pin_memory=is_cuda)
    landed = torch.empty_like(chunk, device="cuda" if is_cuda else "cpu")
    times_s = []
    for _ in range(3):
        began_s = time.monotonic()
        for start in range(0, size_bytes, len(chunk)):
            part = slice(0, min(len(chunk), size_bytes - start))
            landed[part].copy_(chunk[part], non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize()
        times_s.append(time.monotonic() - began_s)
    return round(min(times_s), 4)


def report(
    args: argparse.Namespace, way: str, tensors: dict[str, Tensor], found: dict[str, Any]
) -> None:
    say(
        args,
        name=f"vllm_switch_{args.shape.replace('.', '_')}_{way}_{args.device}",
        unit="s from trained weights to the first token",
        ours=found["train_to_rollout"]["median_s"]["all"],
        peer={
            "name": "vLLM's first start in this run, its cache cold",
            "value": found["train_to_rollout"]["first_s"]["take_memory"],
        },
        limit=found["plain_copy_s"],
        settings={
            "shape": args.shape,
            "layers": args.layers or SHAPES[args.shape].num_layers,
            "dtype": "bfloat16",
            "device": args.device,
            "during_training": way,
            "cuda_graphs": not args.eager,
            "train_s": args.train_s,
            "kv_gib": args.kv_gib,
            "vllm": build_for(args.device).version,
            "required_s": REQUIRED_S.get(way),
        },
        detail={
            "size_bytes": sum(tensor.nbytes for tensor in tensors.values()),
            **found,
        },
    )


if __name__ == "__main__":
    main()
