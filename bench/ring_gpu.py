"""The whole ring on one GPU at the size of Qwen3-0.6B: seconds per phase, device memory at each boundary. In: a CUDA
device. Out: the median GRPO step, by phase, and the proof of release. Run: python bench/ring_gpu.py --record.

`gyre train configs/arith_grpo_1gpu.toml` itself, read from its events. The limit adds up what must be done: matrix work
of the reference and training passes at the measured rate of products, and one read of the weights per decode step.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from gyre.observe.events import read_events
from gyre.wire.commands import train
from record import parser, say

CONFIG = Path(__file__).parent.parent / "configs" / "arith_grpo_1gpu.toml"
MATMUL_FLOPS, COPY_BYTES_PER_S = 794e12, 4.28e12  # measured on an H200: bfloat16 products, copy counted both ways
WARM_UP = 2


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sets = [f"run.folder={folder}", "observe.report=false", *args.set]
        result = train(CONFIG, sets, resume=None, stage="all", plain=True)
        detail = read_run(Path(result["run"]))
    evals = {name: numbers for name, numbers in result["evals"].items() if name == "accuracy"}
    say(
        args,
        name="ring_gpu",
        unit="s",
        ours=detail["median_step_s"],
        peer=None,
        limit=detail.pop("limit_s"),
        settings={"config": CONFIG.name, "set": args.set, "device": torch.cuda.get_device_name()},
        detail={**detail, "evals": evals, "goal": result["goal"]},
    )


def read_run(folder: Path) -> dict[str, Any]:
    rows = list(read_events(folder / "events.jsonl"))
    main_from = next(i for i, row in enumerate(rows) if row["kind"] == "stage.started" and row["stage"] == "main")
    cold, rows_main = rows[:main_from], rows[main_from:]
    steps = [row for row in rows_main if row["kind"] == "step.done"][WARM_UP:]
    phases: dict[str, list[float]] = {}
    for row in rows_main:
        if row["kind"] == "phase.ended" and row["depth"] == 0 and row.get("step", 0) > WARM_UP:
            phases.setdefault(row["phase"], []).append(row["seconds"])
    moves = [row for row in rows_main if row["kind"] == "memory.move" and row.get("step", 0) > WARM_UP]
    started = next(row for row in rows if row["kind"] == "run.started")
    last = steps[-1]
    return {
        "median_step_s": statistics.median(row["seconds"] for row in steps),
        "phases_s": {name: round(statistics.median(values), 3) for name, values in phases.items()},
        "moves_s_per_step": round(sum(row["seconds"] for row in moves) / len(steps), 3),
        "moved_bytes_per_step": sum(row["size_bytes"] for row in moves) // len(steps),
        "boundaries": boundaries(rows_main),
        "cold_start_step_s": statistics.median(row["seconds"] for row in cold if row["kind"] == "step.done"),
        "num_parameters": started["model"]["num_parameters"],
        "tokens_per_step": last["num_tokens"],
        "logprob_gap": last["metrics"]["logprob_gap"],
        "limit_s": limit_seconds(started["model"]["num_parameters"], last),
    }


def boundaries(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Device bytes at the boundaries of each phase over the run: owners by the ledger, and what no owner holds."""
    found: dict[str, Any] = {}
    for row in rows:
        if row["kind"] == "memory" and row.get("step", 0) > WARM_UP:
            entry = found.setdefault(row["phase"], {"owned": [], "unowned": [], "free": [], "peak": []})
            entry["owned"].append(sum(tiers["device"] for tiers in row["owners"].values()))
            entry["unowned"].append(row["unowned_bytes"])
            entry["free"].append(row["device_free_bytes"])
            entry["peak"].append(row["device_peak_bytes"])
    return {
        phase: {name: [min(values), max(values)] for name, values in entry.items()} for phase, entry in found.items()
    }


def limit_seconds(num_parameters: int, step: dict[str, Any]) -> float:
    products = 2 * num_parameters * step["num_tokens"] * 4 / MATMUL_FLOPS
    decode_steps = 80
    return products + decode_steps * 2 * num_parameters / COPY_BYTES_PER_S


if __name__ == "__main__":
    main()
