"""Accuracy per hour of the arithmetic model on a CPU: one process, a pod, and a pod whose rollouts
run beside training. In: configs/arith_grpo_cpu.toml, a number of steps. Out: held-out accuracy
before and after GRPO, minutes, points per hour. Run: python bench/accuracy.py --record

The three have the same cold start, prompts and number of updates. Time is that of the main stage,
from its first step's begin to its last step's end. On two cores trainer and engine share the
arithmetic, so a second process gains little; one step off learns from older rollouts.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from gyre.launch.commands import train
from gyre.launch.train_args import read_train_args
from gyre.observability.events import read_events
from record import parser, say
from ring import CONFIGS

POD = ["cluster.kind=pod", "cluster.num_workers=1", "cluster.engine_workers=1"]
LEGS = {
    "one process": [],
    "pod": POD,
    "pod, one step off": [*POD, "cluster.colocated=false", "rollout.max_staleness=1"],
}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, default=30)
    args = options.parse_args()
    found = {}
    for name, sets in LEGS.items():
        found[name] = measure([*sets, f"trainer.steps={args.steps}"])
        print(name, found[name], flush=True)
    say(
        args,
        name="accuracy_arith_cpu",
        unit="points of accuracy per hour, one step off",
        ours=found["pod, one step off"]["points_per_hour"],
        peer={"name": "one process", "value": found["one process"]["points_per_hour"]},
        limit=None,
        settings={"config": "arith_grpo_cpu.toml", "steps": args.steps},
        detail=found,
    )


def measure(sets: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        sets = [f"run.folder={folder}", "observe.report=false", *sets]
        result = train(
            read_train_args(CONFIGS / "arith_grpo_cpu.toml", sets, resume=None, stage="all"),
            plain=True,
            say_stopped=print,
        )
        rows = list(read_events(Path(result["run"]) / "events.jsonl"))
    begun = max(number for number, row in enumerate(rows) if row["kind"] == "stage.started")
    done = [row for row in rows[begun:] if row["kind"] == "step.done"]
    hours = (done[-1]["t"] - done[0]["t"] + done[0]["seconds"]) / 3600
    before, after = (result["evals"]["accuracy"][when] for when in ("before", "after"))
    return {
        "before": round(before, 4),
        "after": round(after, 4),
        "minutes": round(hours * 60, 2),
        "points_per_hour": round(100 * (after - before) / hours, 1),
    }


if __name__ == "__main__":
    main()
