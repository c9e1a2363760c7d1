"""RL step: a random model with its prompts, and `gyre train` on them for a few GRPO steps, read
from its events.

In: a model's shape, prompts × completions × tokens of a step. Out: median seconds, by phase; TRL's
on the same. Callers: grpo_step, rl_step_gpu.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gyre
from gyre.models.decoder import Decoder
from gyre.models.hub.export import export_hub
from gyre.models.init import init_weights
from gyre.models.spec import ModelSpec
from gyre.observability.events import read_events
from gyre.text.tokenizer import train_tokenizer

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step samples: each completion has exactly `tokens`."""

    prompts: int
    completions: int
    tokens: int

    @property
    def sampled_tokens(self) -> int:
        return self.prompts * self.completions * self.tokens


def make_model(
    spec: ModelSpec, folder: Path, *, device: str, dtype: torch.dtype, prompts: int, words: int
) -> list[str]:
    """Write the random model with a tokenizer and the prompts, of so many words each; return the
    prompts."""
    draw = random.Random(0)
    texts = [" ".join(str(draw.randrange(10)) for _ in range(words)) for _ in range(prompts)]
    tokenizer = train_tokenizer(texts, vocab_size=512)
    tokenizer.save(folder / "tokenizer")
    decoder = Decoder(spec, device=torch.device(device), dtype=dtype)
    init_weights(decoder, 0)
    export_hub(decoder, folder / "model", dtype=dtype, tokenizer_files=folder / "tokenizer")
    del decoder
    if device == "cuda":
        torch.cuda.empty_cache()
    rows = [json.dumps({"prompt": text, "answer": ""}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    return texts


def train_steps(
    folder: Path, step: Step, *, steps: int, sets: list[str], deadline_s: float
) -> Path:
    """Run `gyre train` on what make_model wrote until `steps` steps are done, then end it: the
    snapshot of a stage's end is not measured, and 8B's needs 98 GB of disk. `sets` are further
    KEY=VALUE of the config. Return the run."""
    config = folder / "bench.toml"
    config.write_text(f"""
[run]
name = "run"
folder = "{folder}/runs"
[model]
path = "{folder}/model"
[data]
source = "jsonl"
path = "{folder}/prompts.jsonl"
held_out_fraction = 0.0
[objective]
kind = "grpo"
[trainer]
steps = {steps + 1}
learning_rate = 1e-6
[rollout]
prompts_per_step = {step.prompts}
completions_per_prompt = {step.completions}
max_tokens = {step.tokens}
ignore_eos = true
[engine]
token_budget = 8192
[[rewards.parts]]
kind = "function"
path = "bench_reward:digit_share"
[snapshot]
every_steps = 0
[observe]
report = false
sample_groups_per_step = 0
""")
    run = folder / "runs" / "run"
    paths = [str(HERE), str(Path(gyre.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [
        sys.executable,
        "-c",
        "from gyre.cli.main import main; main()",
        "train",
        str(config),
        "--plain",
    ]
    command += [word for key_value in sets for word in ("--set", key_value)]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    )
    try:
        wait_for_steps(process, run / "events.jsonl", steps, deadline_s)
    finally:
        process.kill()
        process.wait()
    return run


def wait_for_steps(
    process: subprocess.Popen[bytes], events: Path, steps: int, deadline_s: float
) -> None:
    ends = time.monotonic() + deadline_s
    while (
        not events.exists()
        or sum(row["kind"] == "step.done" for row in read_events(events)) < steps
    ):
        if process.poll() is not None:
            raise SystemExit(f"gyre train ended with {process.returncode} before step {steps}")
        if time.monotonic() > ends:
            raise SystemExit(f"gyre train was not at step {steps} after {deadline_s:.0f} s")
        time.sleep(0.5)


def read_steps(run: Path, step: Step, *, warm_up: int) -> dict[str, Any]:
    """Seconds of the steps after the first `warm_up`, by phase; the last step's tokens and metrics;
    all event rows."""
    rows = list(read_events(run / "events.jsonl"))
    done = [row for row in rows if row["kind"] == "step.done"][warm_up:]
    phases: dict[str, list[float]] = {}
    for row in rows:
        counted = (
            row["kind"] == "phase.ended" and row.get("step", 0) > warm_up and row["depth"] == 0
        )
        if counted and row["phase"] in ("rollout", "score", "train", "handover"):
            phases.setdefault(row["phase"], []).append(row["seconds"])
    last = done[-1]
    assert last["metrics"]["length"] == step.tokens, last["metrics"]["length"]
    parts = {name: round(statistics.median(values), 3) for name, values in phases.items()}
    median_s = statistics.median(row["seconds"] for row in done)
    return {
        "median_s": median_s,
        "seconds": [round(row["seconds"], 3) for row in done],
        "phases_s": {**parts, "between": round(median_s - sum(parts.values()), 3)},
        "tokens": last["num_tokens"],
        "last_step": last["metrics"],
        "memory_moves_s": round(
            sum(row["seconds"] for row in rows if row["kind"] == "memory.move") / len(done), 3
        ),
        "dtype": next(row["dtype"] for row in rows if row["kind"] == "run.started"),
    }


def run_trl(
    python: str,
    folder: Path,
    settings: dict[str, Any],
    environment: Mapping[str, str],
    *,
    timeout_s: float,
) -> Any:
    """TRL's trainer in a process of its own: its seconds per step, completion tokens and
    versions."""
    path = folder / "peer.json"
    path.write_text(json.dumps(settings))
    ran = subprocess.run(
        [python, str(HERE / "peers" / "trl_grpo.py"), str(path)],
        capture_output=True, text=True, env=environment, timeout=timeout_s,
    )  # fmt: skip
    if ran.returncode != 0:
        raise SystemExit(f"the peer failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    return json.loads(ran.stdout.strip().splitlines()[-1])
