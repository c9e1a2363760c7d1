"""Asynchronous training against the synchronous order, on two GPUs of a host. In: how many
completions and layers. Out: seconds per step, tokens per second and who was idle, by leg. Run:
python bench/async_ring.py --layers 12 --record; on a CPU: --device cpu.

Three legs, each `gyre train` with `cluster.kind = "pod"` at the width of Qwen3-8B on random
weights, with the same rollouts. Synchronous: trainer and engine have a GPU each, max_staleness 0.
Asynchronous: the same, max_staleness 1. Colocated: two ranks and two engines share both GPUs.

Lengths of completions are drawn from a log-normal that is cut at its bounds of 128 and 8,192, by
the completion's own number: the same in every leg. The run's engine pool is one that gives each
completion its length as max_tokens, and end tokens are ignored; the rest is `gyre train`.
The pool's router sees these bounds, which spread the load over two engines a little better.

A step lasts from one `step.done` to the next. The first `--warm-up` steps are left out: they lock
pages and capture graphs. A leg is killed at its last step, before it saves anything, and at
`--leg-s`; the steps that it has done by then count. The limit is the longer of rollout and
training.

Prediction, before the first run, with 128 completions: rollouts take 1.6 times as long as training,
since the longest completion decodes alone for most of them. So 1.6 times the synchronous rate, less
a hand-over. Colocated is between them: its training is halved, its rollouts are hardly shorter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from gyre.cluster.engine_pool.pool import EnginePool
from gyre.core.chunks import TokenStream
from gyre.core.records import Request
from gyre.core.seeds import derive_seed
from gyre.launch.commands import train
from gyre.launch.placement import worker_placement
from gyre.launch.train_args import read_train_args
from gyre.observability.events import read_events
from gyre.weights.transports.addresses import SHARED_MEMORY
from gyre.weights.transports.shared_memory import remove_leftovers
from record import circumstances, parser, say
from ring import CONFIGS, gates

APART = {"cluster.colocated": False, "cluster.num_workers": 1, "cluster.engine_workers": 1}
LEGS: dict[str, dict[str, Any]] = {
    "synchronous": {**APART, "rollout.max_staleness": 0},
    "asynchronous": {**APART, "rollout.max_staleness": 1},
    "colocated": {"cluster.num_workers": 2, "cluster.engine_workers": 2},
}
# 12 bytes per parameter and rank, pinned. A machine whose memory grows as it is used says less.
HOST_BYTES = {"synchronous": 120 << 30, "asynchronous": 120 << 30, "colocated": 60 << 30}
LEARNER = ("score", "train", "handover")  # phases
TINY = {
    "run.device": "cpu",
    "run.dtype": "float32",
    "model.shape.hidden_size": 64,
    "model.shape.num_heads": 4,
    "model.shape.num_kv_heads": 2,
    "model.shape.head_dim": 16,
    "model.shape.mlp_size": 128,
    "model.shape.vocab_size": 512,
    "trainer.offload_optimizer": "none",
    "memory.host_budget_bytes": "auto",
}
COMPLETIONS_PER_PROMPT = 8
PROMPT_TOKENS = 128  # at most
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
LOOK_S, GONE_S = 0.25, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Lengths whose logarithms are normal, from `least` to `most`, which are two deviations from
    the median."""

    least: int
    most: int

    def of(self, request_id: str) -> int:
        rng = np.random.default_rng(derive_seed("length", request_id))
        low, high = math.log(self.least), math.log(self.most)
        while True:
            drawn = math.exp(rng.normal((low + high) / 2, (high - low) / 4))
            if self.least <= drawn <= self.most:
                return round(drawn)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--config", type=Path, default=CONFIGS / "grpo_8b_ray.toml")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--layers", type=int, default=0, help="0: 36, and 2 on a CPU")
    options.add_argument("--completions", type=int, default=0, help="0: 128, and 16 on a CPU")
    options.add_argument("--least", type=int, default=0, help="tokens; 0: 128, and 8 on a CPU")
    options.add_argument("--most", type=int, default=0, help="tokens; 0: 8,192, and 64 on a CPU")
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--warm-up", type=int, default=1, help="steps that are not counted")
    options.add_argument("--legs", default=",".join(LEGS), help="as far as wanted")
    options.add_argument("--leg-s", type=float, default=190.0, help="longest that one may take")
    options.add_argument("--scratch", type=Path, help="keep logs there, and legs for a next call")
    options.add_argument("--leg", choices=tuple(LEGS), help="(what this script starts)")
    args = options.parse_args()
    on_cpu = args.device == "cpu"
    for name, here, there in (
        ("layers", 2, 36),
        ("completions", 16, 128),
        ("least", 8, 128),
        ("most", 64, 8192),
    ):
        setattr(args, name, getattr(args, name) or (here if on_cpu else there))
    assert args.completions % COMPLETIONS_PER_PROMPT == 0
    if args.leg:
        run_leg(args)
        return
    if args.record:
        circumstances(args.commit)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.scratch or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        bench(args, folder)


def bench(args: argparse.Namespace, folder: Path) -> None:
    kept = folder / "legs.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    for leg in args.legs.split(","):
        found[leg] = measure_leg(args, leg, folder)
        kept.write_text(json.dumps(found, indent=2) + "\n")
        print(leg, json.dumps(found[leg]), flush=True)
    report(args, found)


def report(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    rates = {leg: one["tokens_per_s"] for leg, one in found.items() if "tokens_per_s" in one}
    if "asynchronous" not in rates:
        raise SystemExit(f"the asynchronous leg measured no step: {found.get('asynchronous')}")
    detail: dict[str, Any] = dict(found)
    for leg in ("synchronous", "colocated"):
        if leg in rates:
            detail[f"times_{leg}"] = round(rates["asynchronous"] / rates[leg], 3)
    step_s = {leg: one["step_s"] for leg, one in found.items() if leg in rates}
    peer, limit_s = None, None
    if "synchronous" in rates:
        peer = {"name": "the synchronous order", "value": step_s["synchronous"]}
        phases_s = found["synchronous"]["phases_s"]
        limit_s = max(phases_s["rollout"], sum(phases_s.get(name, 0.0) for name in LEARNER))
    say(
        args,
        name=f"async_ring_{args.device}_{args.layers}_layers_{args.completions}_completions",
        unit="s per step",
        ours=step_s["asynchronous"],
        peer=peer,
        limit=limit_s,
        settings={
            "config": args.config.name,
            "set": overrides(args, "asynchronous"),
            "layers": args.layers,
            "completions": args.completions,
            "lengths": f"log-normal, {args.least} to {args.most}",
            "steps": args.steps,
            "warm_up": args.warm_up,
            "device": args.device,
        },
        detail=detail,
    )


def overrides(args: argparse.Namespace, leg: str) -> list[str]:
    settings = {
        "cluster.kind": "pod",
        "model.shape.num_layers": args.layers,
        "model.shape.context_tokens": args.most + PROMPT_TOKENS + 128,
        "trainer.steps": args.steps,
        "trainer.tokens_per_chunk": args.most + PROMPT_TOKENS,
        "trainer.checkpointing": "selective",
        # 16 bytes per parameter are more than a GPU of 80 GB has
        "trainer.offload_optimizer": "host",
        "memory.host_budget_bytes": HOST_BYTES[leg],
        "cluster.hang_s": 120,  # such memory is slow when it is first touched
        "rollout.prompts_per_step": args.completions // COMPLETIONS_PER_PROMPT,
        "rollout.completions_per_prompt": COMPLETIONS_PER_PROMPT,
        "rollout.max_tokens": args.most,
        "rollout.max_tokens_per_iteration": args.most,  # each completion is a request of its own
        "rollout.ignore_eos": True,
        "engine.max_running": max(args.completions, 8),
        "eval.num_problems": 0,
        "observe.report": False,
        **(TINY if args.device == "cpu" else {}),
        **LEGS[leg],
    }
    return [f"{key}={_toml(value)}" for key, value in settings.items()] + args.set


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- a leg


def measure_leg(args: argparse.Namespace, leg: str, folder: Path) -> dict[str, Any]:
    """Start a leg in a process of its own, and read its events until its last step is done."""
    run_folder, log = folder / f"run_{leg}_{time.monotonic_ns()}", folder / f"{leg}.log"
    argv = [sys.executable, __file__, "--leg", leg, "--scratch", str(run_folder)]
    for name in ("config", "device", "layers", "completions", "least", "most", "steps"):
        argv += [f"--{name}", str(getattr(args, name))]
    argv += [part for change in args.set for part in ("--set", change)]
    here = str(Path(__file__).parent)  # for rewards of the configs
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH", ""))))
    began_s, ended = time.monotonic(), "at its last step"
    with log.open("w") as output:
        process = subprocess.Popen(
            argv,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **MULTICAST_OFF, "PYTHONPATH": path},
        )
        try:
            while len(steps_of(run_folder)) < args.steps:
                if process.poll() is not None:
                    ended = f"with {process.returncode}"
                    break
                if time.monotonic() - began_s > args.leg_s:
                    ended = f"after {args.leg_s:g} s"
                    break
                time.sleep(LOOK_S)
        finally:
            kill_all(process)
            remove_leftovers(SHARED_MEMORY, keep_run=None, emit=lambda kind, **fields: None)
    told = {"ended": ended, "leg_s": round(time.monotonic() - began_s, 1)}
    rows = rows_of(run_folder)
    if not steps_of(run_folder):
        return {**told, "log": log.read_text()[-2000:]}
    return {**told, **read_leg(rows, args.warm_up)}


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a driver and the processes that it started."""
    family = [process.pid]
    with suppress(psutil.NoSuchProcess):
        family += [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
    members = []
    for pid in family:
        with suppress(psutil.NoSuchProcess):
            members.append(psutil.Process(pid))
    for one in members:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(GONE_S)
    psutil.wait_procs(members, timeout=GONE_S)


def rows_of(run_folder: Path) -> list[dict[str, Any]]:
    logs = sorted(run_folder.glob("*/events.jsonl"))
    return list(read_events(logs[-1])) if logs else []


def steps_of(run_folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(run_folder) if row["kind"] == "step.done"]


def read_leg(rows: list[dict[str, Any]], warm_up: int) -> dict[str, Any]:
    """Return a leg's numbers, of its steps behind the warm-up or of the last one."""
    steps = [row for row in rows if row["kind"] == "step.done"]
    first = min(warm_up, len(steps) - 1)
    begun, counted = steps[first - 1] if first else None, steps[first:]
    from_t = begun["t"] if begun else steps[0]["t"] - steps[0]["seconds"]
    took_s = counted[-1]["t"] - from_t
    numbers = {row["step"] for row in counted}
    phases: dict[str, list[float]] = {}
    for row in rows:
        if row["kind"] == "phase.ended" and row["depth"] == 0 and row.get("step") in numbers:
            phases.setdefault(row["phase"], []).append(row["seconds"])
    step_s = took_s / len(counted)
    phases_s = {name: statistics.fmean(values) for name, values in phases.items()}
    return {
        "step_s": round(step_s, 3),
        "tokens_per_s": round(sum(row["num_tokens"] for row in counted) / took_s, 1),
        "steps": len(counted),
        "warm": first >= warm_up,
        "step_done_s": [round(row["t"] - rows[0]["t"], 1) for row in steps],
        "tokens": [row["num_tokens"] for row in steps],
        "mean_length": [round(row["metrics"]["length"], 1) for row in steps],
        "phases_s": {name: round(value, 3) for name, value in phases_s.items()},
        "idle_s": idle_by_role(rows, numbers, phases_s, step_s),
        "device_bytes": gates([row for row in rows if row.get("step") in numbers]),
    }


def idle_by_role(
    rows: list[dict[str, Any]], numbers: set[int], phases_s: Mapping[str, float], step_s: float
) -> dict[str, float]:
    """Seconds of a step in which each role waited: as the run says it, or, where the two take
    turns, all that is not its own phase."""
    told = [row for row in rows if row["kind"] == "step.roles" and row["step"] in numbers]
    if told:
        means: Callable[[str], float] = lambda key: statistics.fmean(row[key] for row in told)  # noqa: E731
        return {
            "collector": round(means("collector_idle_s"), 3),
            "learner": round(means("learner_idle_s"), 3),
            "synchronous_order": round(means("synchronous_s"), 3),
        }
    learner_s = sum(phases_s.get(name, 0.0) for name in LEARNER)
    return {
        "collector": round(step_s - phases_s.get("rollout", 0.0), 3),
        "learner": round(step_s - learner_s, 3),
    }


# -- in the process of a leg


def run_leg(args: argparse.Namespace) -> None:
    lengths = LogNormal(least=args.least, most=args.most)

    class LengthPool(EnginePool):
        """Gives each completion the length that is drawn for it."""

        def submit(self, request: Request) -> TokenStream:
            length = lengths.of(request.request_id)
            sampling = replace(request.sampling, max_tokens=length)
            return super().submit(replace(request, sampling=sampling))

    worker_placement.EnginePool = LengthPool
    sets = [f"run.folder={args.scratch}", *overrides(args, args.leg)]
    order = read_train_args(args.config, sets, resume=None, stage="all")
    train(order, plain=True, say_stopped=print)


if __name__ == "__main__":
    main()
