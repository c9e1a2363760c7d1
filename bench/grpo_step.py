"""One GRPO step on a CPU, against TRL in the same call: rollout, rewards, reference pass, update, weights back. In: the
first time, the package index, for the peer's environment. Out: median seconds per step, ours and TRL's on the same
model and sizes. Run: python bench/grpo_step.py.

3.3 M-parameter Qwen3, 32 prompts × 8 completions of exactly 128 tokens, KL 0.04. Ours is measured by `gyre train`
itself, from its events. The limit is the time of the matrix products alone, run one after the other at their own sizes.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gyre.models.decoder import Decoder
from gyre.models.export import export_hub
from gyre.models.init import init_weights
from gyre.models.spec import ModelSpec
from gyre.observe.events import read_events
from gyre.text.tokenizer import train_tokenizer
from gyre.wire.commands import train
from peers.environment import peer_python
from record import kept_peer, parser, say

HERE = Path(__file__).parent
SPEC = ModelSpec(
    family="qwen3", vocab_size=512, hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64,
    mlp_size=768, tied=True, context_tokens=512, rope_theta=10_000.0, norm_eps=1e-6, qkv_bias=False, qk_norm=True,
    eos_ids=(1,),
)  # fmt: skip
PROMPTS, GROUP, TOKENS, KL = 32, 8, 128, 0.04
WARM_UP = 2  # steps left out of the median: allocations, first touches


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--kept-peer", action="store_true", help="measure no peer: show the record's, not comparable")
    options.add_argument("--steps", type=int, default=7)
    options.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    options.add_argument("--peer-dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options.add_argument("--peer-micro-batches", type=int, default=1)
    args = options.parse_args()
    python = None if args.kept_peer else peer_python("trl")
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prompts = make_model(folder)
        ours = run_ours(folder, args.dtype, args.steps)
        peer = kept_peer("grpo_step") if python is None else run_peer(python, folder, args, prompts, threads)
    say(
        args,
        name="grpo_step",
        unit="s",
        ours=ours["median_s"],
        peer=peer,
        limit=matrix_seconds(torch.bfloat16 if ours["dtype"] == "bfloat16" else torch.float32, ours["tokens"]),
        settings={"prompts": PROMPTS, "completions": GROUP, "tokens": TOKENS, "kl": KL, "threads": threads},
        detail={**ours, "load_average_1min": round(os.getloadavg()[0], 2)},
    )


def make_model(folder: Path) -> list[str]:
    """Write the random model with a tokenizer and the prompts; return the prompts."""
    rng = random.Random(0)
    texts = [" ".join(str(rng.randrange(10)) for _ in range(31)) for _ in range(512)]
    tokenizer = train_tokenizer(texts, vocab_size=512)
    tokenizer.save(folder / "tokenizer")
    decoder = Decoder(SPEC, device=torch.device("cpu"), dtype=torch.float32)
    init_weights(decoder, 0)
    export_hub(decoder, folder / "model", dtype=torch.float32, tokenizer_files=folder / "tokenizer")
    rows = [json.dumps({"prompt": text, "answer": ""}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    return texts


def run_ours(folder: Path, dtype: str, steps: int) -> dict[str, Any]:
    """`gyre train` for a few steps; the seconds are those of its step.done events."""
    config = folder / "bench.toml"
    config.write_text(f"""
[run]
folder = "{folder}/runs"
dtype = "{dtype}"
[model]
path = "{folder}/model"
[data]
source = "jsonl"
path = "{folder}/prompts.jsonl"
held_out_fraction = 0.0
[objective]
kind = "grpo"
kl_coef = {KL}
[trainer]
steps = {steps}
learning_rate = 1e-6
tokens_per_chunk = 4096
[rollout]
prompts_per_step = {PROMPTS}
completions_per_prompt = {GROUP}
max_tokens = {TOKENS}
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
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    result = train(config, [], resume=None, stage="all", plain=True, say_stopped=print)
    rows = list(read_events(Path(result["run"]) / "events.jsonl"))
    done = [row for row in rows if row["kind"] == "step.done"][WARM_UP:]
    phases: dict[str, list[float]] = {}
    for row in rows:
        if row["kind"] == "phase.ended" and row.get("step", 0) > WARM_UP and row["depth"] == 0:
            phases.setdefault(row["phase"], []).append(row["seconds"])
    started = next(row for row in rows if row["kind"] == "run.started")
    return {
        "median_s": statistics.median(row["seconds"] for row in done),
        "phases_s": {name: round(statistics.median(values), 3) for name, values in phases.items()},
        "dtype": started["dtype"],
        "tokens": done[-1]["num_tokens"],
        "logprob_gap": done[-1]["metrics"]["logprob_gap"],
        "completion_tokens": done[-1]["metrics"]["length"],
    }


def run_peer(python: Path, folder: Path, args: Any, prompts: list[str], threads: int) -> dict[str, Any]:
    settings = {
        "model": str(folder / "model"), "folder": str(folder / "trl"), "prompts": prompts, "threads": threads,
        "dtype": args.peer_dtype, "prompts_per_step": PROMPTS, "completions_per_prompt": GROUP, "max_tokens": TOKENS,
        "kl_coef": KL, "learning_rate": 1e-6, "steps": args.steps, "micro_batches": args.peer_micro_batches,
    }  # fmt: skip
    path = folder / "peer.json"
    path.write_text(json.dumps(settings))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [str(python), str(HERE / "peers" / "trl_grpo.py"), str(path)],
        capture_output=True, text=True, env=environment, timeout=1800,
    )  # fmt: skip
    if ran.returncode != 0:
        raise SystemExit(f"the peer failed:\n{ran.stderr[-3000:]}")
    answer = json.loads(ran.stdout.strip().splitlines()[-1])
    versions = answer["versions"]
    return {
        "name": f"TRL {versions['trl']} ({args.peer_dtype}, {args.peer_micro_batches} micro-batches)",
        "value": statistics.median(answer["seconds"][WARM_UP:]),
        "seconds": answer["seconds"],
        "versions": versions,
    }


def matrix_seconds(dtype: torch.dtype, num_tokens: int) -> float:
    """Seconds of the matrix products of one step: reference forward, training forward and backward (twice the forward)
    over all tokens, and one decode product per sampled token; attention products left out."""
    shapes = [shape for name, shape in SPEC.parameter_shapes().items() if len(shape) == 2]
    forward = sum(_product_seconds(dtype, 8192, shape) * num_tokens / 8192 for shape in shapes)
    decode = sum(_product_seconds(dtype, PROMPTS * GROUP, shape) * TOKENS for shape in shapes)
    return 4 * forward + decode


def _product_seconds(dtype: torch.dtype, rows: int, shape: tuple[int, ...]) -> float:
    left, right = torch.randn(rows, shape[1]).to(dtype), torch.randn(shape).to(dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        torch.nn.functional.linear(left, right)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
