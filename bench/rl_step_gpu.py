"""One whole GRPO step on a GPU, by part, beside TRL with vLLM colocated on the same device in the same call: rollout,
rewards, update, weights back. In: a CUDA device; a peer's environment. Out: median seconds per step, ours and TRL's.
Run: python bench/rl_step_gpu.py --peer-path FOLDER --record; python bench/rl_step_gpu.py --shape 8b --record.

Qwen3 shapes with random weights in BF16; 64 prompts × 8 completions of exactly 512 tokens, no KL. Ours is `gyre train`
itself, read from its events. The limit adds up what must be done: products at the measured rate; of each decode step
one read of the weights and of the running sequences' keys and values at the measured copy rate; the optimizer's bytes.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gyre.models.decoder import Decoder
from gyre.models.export import export_hub
from gyre.models.flops import forward_flops
from gyre.models.init import init_weights
from gyre.models.spec import ModelSpec
from gyre.observe.events import read_events
from gyre.text.tokenizer import train_tokenizer
from gyre.wire.commands import train
from record import circumstances, parser, say

HERE = Path(__file__).parent
MATMUL_FLOPS, COPY_BYTES_PER_S = 794e12, 4.28e12  # measured on an H200: bfloat16 products, copy counted both ways
PROMPTS, GROUP, TOKENS = 64, 8, 512
OPTIMIZER_BYTES = 28  # per parameter of AdamW: master and moments read and written, gradient read, weight written
COMMON = {
    "family": "qwen3", "vocab_size": 151_936, "num_kv_heads": 8, "head_dim": 128, "context_tokens": 2048,
    "rope_theta": 1e6, "norm_eps": 1e-6, "qkv_bias": False, "qk_norm": True, "eos_ids": (1,),
}  # fmt: skip
SPECS = {
    "0.6b": ModelSpec(hidden_size=1024, num_layers=28, num_heads=16, mlp_size=3072, tied=True, **COMMON),
    "8b": ModelSpec(hidden_size=4096, num_layers=36, num_heads=32, mlp_size=12_288, tied=False, **COMMON),
}
# Of a model whose state does not fit beside its gradients on one device, it lies in host memory.
SETS = {
    "0.6b": (),
    "8b": ('trainer.offload_optimizer="host"', 'memory.residency="spill"', "memory.host_budget_bytes=118111600640"),
}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--shape", choices=tuple(SPECS), default="0.6b")
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--warm-up", type=int, default=2, help="steps that are not counted")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options.add_argument("--label", default="", help="behind the record's name, for a run with --set")
    options.add_argument("--peer-path", type=Path, help="folder with trl 1.16, vllm 0.25.1 and their needs")
    options.add_argument("--peer-batch", type=int, nargs="*", default=[16], help="sequences per pass; the best counts")
    options.add_argument("--peer-steps", type=int, default=4)
    args = options.parse_args()
    if args.record:
        circumstances(args.commit)  # what a record needs and this machine lacks is told before anything is measured
    spec = SPECS[args.shape]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        prompts = make_model(spec, folder)
        ours = run_ours(folder, args)
        peer = run_peers(folder, args, prompts) if args.peer_path else None
    limit = limit_parts(spec, ours.pop("prompt_tokens"))
    say(
        args,
        name="_".join(filter(None, ("rl_step_gpu", args.shape.replace(".", "_"), args.label))),
        unit="s",
        ours=ours["median_s"],
        peer=peer,
        limit=sum(limit.values()),
        settings={
            "parameters": spec.num_parameters,
            "prompts": PROMPTS,
            "completions": GROUP,
            "tokens": TOKENS,
            "set": [*SETS[args.shape], *args.set],
            "device": torch.cuda.get_device_name(),
        },
        detail={**ours, "limit_parts_s": {name: round(seconds, 3) for name, seconds in limit.items()}},
    )


def make_model(spec: ModelSpec, folder: Path) -> list[str]:
    """Write the random model with a tokenizer and the prompts; return the prompts."""
    draw = random.Random(0)
    texts = [" ".join(str(draw.randrange(10)) for _ in range(48)) for _ in range(2048)]
    tokenizer = train_tokenizer(texts, vocab_size=512)
    tokenizer.save(folder / "tokenizer")
    decoder = Decoder(spec, device=torch.device("cuda"), dtype=torch.bfloat16)
    init_weights(decoder, 0)
    export_hub(decoder, folder / "model", dtype=torch.bfloat16, tokenizer_files=folder / "tokenizer")
    del decoder
    torch.cuda.empty_cache()
    rows = [json.dumps({"prompt": text, "answer": ""}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    return texts


def run_ours(folder: Path, args: Any) -> dict[str, Any]:
    config = folder / "bench.toml"
    config.write_text(f"""
[run]
folder = "{folder}/runs"
device = "cuda"
dtype = "bfloat16"
[model]
path = "{folder}/model"
[data]
source = "jsonl"
path = "{folder}/prompts.jsonl"
held_out_fraction = 0.0
[objective]
kind = "grpo"
[trainer]
steps = {args.steps}
learning_rate = 1e-6
tokens_per_chunk = 16384
[rollout]
prompts_per_step = {PROMPTS}
completions_per_prompt = {GROUP}
max_tokens = {TOKENS}
ignore_eos = true
[engine]
max_running = {PROMPTS * GROUP}
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
    sys.path.insert(0, str(HERE))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    result = train(config, [*SETS[args.shape], *args.set], resume=None, stage="all", plain=True, say_stopped=print)
    return read_run(Path(result["run"]), args.warm_up)


def read_run(folder: Path, warm_up: int) -> dict[str, Any]:
    rows = list(read_events(folder / "events.jsonl"))
    done = [row for row in rows if row["kind"] == "step.done"][warm_up:]
    phases: dict[str, list[float]] = {}
    for row in rows:
        counted = row["kind"] == "phase.ended" and row.get("step", 0) > warm_up and row["depth"] == 0
        if counted and row["phase"] in ("rollout", "score", "train", "handover"):
            phases.setdefault(row["phase"], []).append(row["seconds"])
    last = done[-1]
    sampled = PROMPTS * GROUP * TOKENS
    assert last["metrics"]["length"] == TOKENS, last["metrics"]["length"]
    parts = {name: round(statistics.median(values), 3) for name, values in phases.items()}
    median_s = statistics.median(row["seconds"] for row in done)
    return {
        "median_s": median_s,
        "seconds": [round(row["seconds"], 3) for row in done],
        "phases_s": {**parts, "between": round(median_s - sum(parts.values()), 3)},
        "rollout_tokens_per_s": round(sampled / parts["rollout"]),
        "train_tokens_per_s": round(last["num_tokens"] / parts["train"]),
        "prompt_tokens": last["num_tokens"] - sampled,
        "memory_moves_s": round(sum(row["seconds"] for row in rows if row["kind"] == "memory.move") / len(done), 3),
        "last_step": last["metrics"],
    }


def limit_parts(spec: ModelSpec, prompt_tokens: int) -> dict[str, float]:
    """Seconds of one step if nothing but the necessary products and bytes took time. A backward pass is two forward
    passes; a completion's keys and values are read once per token, half of them on average."""
    sequences = PROMPTS * GROUP
    length = prompt_tokens // sequences + TOKENS
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2
    read = 2 * spec.num_parameters + sequences * (length - TOKENS / 2) * kv_bytes
    decode_flops = forward_flops(spec, [1] * sequences, num_outputs=sequences)
    forward = forward_flops(spec, [length] * sequences, num_outputs=sequences * TOKENS)
    return {
        "decode_bytes": TOKENS * read / COPY_BYTES_PER_S,
        "decode_products": TOKENS * decode_flops / MATMUL_FLOPS,
        "train_products": 3 * forward / MATMUL_FLOPS,
        "optimizer_bytes": OPTIMIZER_BYTES * spec.num_parameters / COPY_BYTES_PER_S,
    }


def run_peers(folder: Path, args: Any, prompts: list[str]) -> dict[str, Any]:
    """TRL on the same model, prompts and sizes, in a process of its own per batch size; the fastest counts."""
    found = [run_peer(folder, args, prompts, batch) for batch in args.peer_batch]
    best = min(found, key=lambda one: one["value"])
    return {**best, "value_by_batch": {one["batch"]: one["value"] for one in found}}


def run_peer(folder: Path, args: Any, prompts: list[str], batch: int) -> dict[str, Any]:
    settings = {
        "model": str(folder / "model"), "folder": str(folder / "trl"), "prompts": prompts, "dtype": "bfloat16",
        "prompts_per_step": PROMPTS, "completions_per_prompt": GROUP, "max_tokens": TOKENS, "kl_coef": 0.0,
        "learning_rate": 1e-6, "steps": args.peer_steps, "micro_batches": PROMPTS * GROUP // batch,
        "threads": os.cpu_count(), "vllm_memory_share": 0.35, "context_tokens": 1024,
    }  # fmt: skip
    path = folder / "peer.json"
    path.write_text(json.dumps(settings))
    environment = {**os.environ, "PYTHONPATH": str(args.peer_path), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    ran = subprocess.run(
        [sys.executable, str(HERE / "peers" / "trl_grpo.py"), str(path)],
        capture_output=True, text=True, env=environment, timeout=420,
    )  # fmt: skip
    if ran.returncode != 0:
        raise SystemExit(f"the peer failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    answer = json.loads(ran.stdout.strip().splitlines()[-1])
    versions = answer["versions"]
    return {
        "name": f"TRL {versions['trl']} with vLLM {versions['vllm']} colocated, {batch} sequences per pass",
        "value": statistics.median(answer["seconds"][1:]),
        "batch": batch,
        "seconds": [round(seconds, 2) for seconds in answer["seconds"]],
        "completion_tokens": answer["completion_tokens"],
        "versions": versions,
    }


if __name__ == "__main__":
    main()
