"""The whole ring on the GPUs of a host: seconds per phase and of each switch between phases, device
memory at each boundary. In: a config, a CUDA device or several. Out: the median step, by phase, and
the proof of release. Run: python bench/ring.py --record; python bench/ring.py --config
configs/grpo_8b_ray.toml --record.

`gyre train CONFIG` itself, read from its events. A switch is the time between two phases; from
training to rollout the hand-over of weights counts too. The limit adds up what must be done: matrix
work of the reference and training passes at the measured rate of products, and one read of the
weights per decode step.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gyre.launch.commands import train
from gyre.launch.train_args import read_train_args
from gyre.observability.events import read_events
from record import circumstances, parser, say

CONFIGS = Path(__file__).parent.parent / "configs"
# measured on an H200: bfloat16 products, copy counted both ways
MATMUL_FLOPS, COPY_BYTES_PER_S = 794e12, 4.28e12


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--config", type=Path, default=CONFIGS / "arith_grpo_1gpu.toml")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options.add_argument(
        "--label", default="", help="behind the record's name, for a run with --set"
    )
    options.add_argument(
        "--warm-up", type=int, default=2, help="steps of the main stage that are not counted"
    )
    options.add_argument(
        "--read", type=Path, help="a run's folder: read what it told so far, and train nothing"
    )
    args = options.parse_args()
    if args.record:
        # what a record needs and this machine lacks is told before anything is measured
        circumstances(args.commit)
    told = {"evals": None, "goal": None}
    if args.read:
        detail = read_run(args.read, args.warm_up)
    else:
        detail, told = run(args)
    say(
        args,
        name="_".join(
            filter(None, ("ring", args.config.stem, f"{torch.cuda.device_count()}x", args.label))
        ),
        unit="s",
        ours=detail["median_step_s"],
        peer=None,
        limit=detail.pop("limit_s"),
        settings={
            "config": args.config.name,
            "set": args.set,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        detail={**detail, **told},
    )


def run(args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what its events say, and what it answered."""
    sys.path.insert(0, str(Path(__file__).parent))  # for rewards of the configs
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        sets = [f"run.folder={folder}", "observe.report=false", *args.set]
        order = read_train_args(args.config, sets, resume=None, stage="all")
        result = train(order, plain=True, say_stopped=print)
        detail = read_run(Path(result["run"]), args.warm_up)
    evals = {name: numbers for name, numbers in result["evals"].items() if name == "accuracy"}
    return detail, {"evals": evals, "goal": result["goal"]}


def read_run(folder: Path, warm_up: int) -> dict[str, Any]:
    rows = list(read_events(folder / "events.jsonl"))
    main_from = next(
        i for i, row in enumerate(rows) if row["kind"] == "stage.started" and row["stage"] == "main"
    )
    cold, rows_main = rows[:main_from], rows[main_from:]
    warm = [row for row in rows_main if row.get("step", 0) > warm_up]
    steps = [row for row in rows_main if row["kind"] == "step.done"][warm_up:]
    phases: dict[str, list[float]] = {}
    for row in warm:
        if row["kind"] == "phase.ended" and row["depth"] == 0:
            phases.setdefault(row["phase"], []).append(row["seconds"])
    moves = [row for row in warm if row["kind"] == "memory.move"]
    started = next(row for row in rows if row["kind"] == "run.started")
    last, cold_steps = steps[-1], [row["seconds"] for row in cold if row["kind"] == "step.done"]
    gaps = [row["metrics"]["logprob_gap"] for row in rows_main if row["kind"] == "step.done"]
    return {
        "median_step_s": statistics.median(row["seconds"] for row in steps),
        "steps": len(steps) + warm_up,
        "run_s": round(rows[-1]["t"] - rows[0]["t"], 1),
        "made_s": made_seconds(rows),
        "phases_s": {name: round(statistics.median(values), 3) for name, values in phases.items()},
        "switches_s": switches(rows_main, warm_up),
        "moves_s_per_step": round(sum(row["seconds"] for row in moves) / len(steps), 3),
        "moved_bytes_per_step": sum(row["size_bytes"] for row in moves) // len(steps),
        "boundaries": boundaries(warm),
        "device_bytes": gates(warm),
        "graphs": sum(row["kind"] == "engine.graphs_captured" for row in rows),
        "graphs_again": sum(row["kind"] == "engine.graphs_recaptured" for row in rows),
        "cold_start_step_s": statistics.median(cold_steps) if cold_steps else None,
        "num_parameters": started["model"]["num_parameters"],
        "tokens_per_step": last["num_tokens"],
        "logprob_gap_by_step": [float(f"{gap:.3g}") for gap in gaps],
        "reward_by_step": [
            round(row["metrics"]["reward"], 3) for row in rows_main if row["kind"] == "step.done"
        ],
        "last_step": last["metrics"],
        "limit_s": limit_seconds(started["model"]["num_parameters"], last),
    }


def made_seconds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What the last stage's parts took to make, of the slowest worker."""
    found: dict[str, float] = {}
    for row in rows:
        if row["kind"] == "stage.started":
            found = {}
        elif row["kind"] == "device.made":
            found |= {
                part: max(took_s, found.get(part, 0.0)) for part, took_s in row["seconds"].items()
            }
    return found


def switches(rows: list[dict[str, Any]], warm_up: int) -> dict[str, list[float]]:
    """Seconds from the end of a phase to the start of the next one that is named, and what lies
    between and is no switch taken out: [median, largest] over the steps."""
    times: dict[int, dict[str, tuple[float, float]]] = {}
    for row in rows:
        if row["kind"] == "phase.ended" and row["depth"] == 0 and row.get("step", 0) > warm_up:
            times.setdefault(row["step"], {})[row["phase"]] = (row["t"] - row["seconds"], row["t"])
    found: dict[str, list[float]] = {"rollout_to_train": [], "train_to_rollout": []}
    for step, own in times.items():
        if {"rollout", "score", "train"} <= own.keys():
            scored_s = own["score"][1] - own["score"][0]
            found["rollout_to_train"].append(own["train"][0] - own["rollout"][1] - scored_s)
        following = times.get(step + 1, {})
        if "train" in own and "rollout" in following:
            between = [name for name in ("evaluate", "snapshot") if name in own]
            other_s = sum(own[name][1] - own[name][0] for name in between)
            found["train_to_rollout"].append(following["rollout"][0] - own["train"][1] - other_s)
    return {
        name: [round(statistics.median(values), 3), round(max(values), 3)]
        for name, values in found.items()
        if values
    }


def gates(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Device bytes of each worker as each phase begins, over the run: [least, most]."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if row["kind"] == "cluster.memory":
            for worker, size in row["device_bytes"].items():
                least, most = found.setdefault(row["phase"], {}).get(worker, (size, size))
                found[row["phase"]][worker] = [min(least, size), max(most, size)]
    return found


def boundaries(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Device bytes over the run, of all workers: as a phase begins, of owners by the ledger and of
    no owner; at most while it lasts, planned and measured."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if row["kind"] == "memory":
            told = {
                "owned": sum(tiers["device"] for tiers in row["owners"].values()),
                "unowned": row["unowned_bytes"],
                "free": row.get("device_free_bytes"),
                "planned_peak": row.get("planned_peak_device_bytes"),  # vLLM has no plan
            }
            for name, size in told.items():
                if size is None:
                    continue
                found.setdefault(row["phase"], {}).setdefault(name, []).append(size)
            found.setdefault(row["left"], {}).setdefault("peak", []).append(
                row["device_peak_bytes"]
            )
    return {
        phase: {name: [min(values), max(values)] for name, values in entry.items()}
        for phase, entry in found.items()
    }


def limit_seconds(num_parameters: int, step: dict[str, Any]) -> float:
    """On one GPU; of several, divided by their number."""
    products = 2 * num_parameters * step["num_tokens"] * 4 / MATMUL_FLOPS
    decode_steps = step["metrics"]["length"]  # of a mean completion; the longest takes more
    return (products + decode_steps * 2 * num_parameters / COPY_BYTES_PER_S) / max(
        1, torch.cuda.device_count()
    )


if __name__ == "__main__":
    main()
