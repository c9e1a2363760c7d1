"""Peer of bench/engine.py: vLLM on the same GPUs, shapes and workload, dummy weights. In: a folder
to write to. Out: peer_vllm.json there: output tokens per second, of all requests and of one of
1,024 tokens in and out, and seconds from start to the first token, by shape. Runs in vLLM's own
environment. Run: python peers/vllm_gpu.py FOLDER [shape ...]; 32b:2 is a shape over two GPUs.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
SHAPES = {
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    },
    "32b": {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "intermediate_size": 25_600,
        "tie_word_embeddings": False,
    },
    "70b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "intermediate_size": 28_672,
        "tie_word_embeddings": False,
    },
}
# NVLink multicast can disable the GPUs of a shared host, so both sides run without it
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}
ONE_STREAM_TOKENS = 1024
REQUESTS, SHORTEST, LONGEST, RUNS = 256, 100, 1024, 2
# for the whole of one shape; and for its process to end after its answer
DEADLINE_S, EXIT_DEADLINE_S = 500.0, 60.0


def main() -> None:
    folder = Path(sys.argv[1])
    measured: dict[str, Any] = {}
    for shape in sys.argv[2:] or ("0.6b", "8b"):
        measured[shape] = measure_apart(shape, folder)
        versions = measured[shape].pop("versions")
        record = {
            "version": versions["vllm"],
            "date": datetime.date.today().isoformat(),
            "versions": versions,
        }
        (folder / "peer_vllm.json").write_text(
            json.dumps({**record, "shapes": measured}, indent=2) + "\n"
        )
        print(json.dumps(measured[shape]), flush=True)


def measure_apart(shape: str, folder: Path) -> dict[str, Any]:
    """Measure in a process of its own, since vLLM keeps the device until its process ends."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=measure, args=(shape, str(folder), theirs))
    worker.start()
    theirs.close()
    try:
        ready = multiprocessing.connection.wait([ours, worker.sentinel], timeout=DEADLINE_S)
        if not ready:
            raise SystemExit(f"{shape}: no answer within {DEADLINE_S:.0f} s")
        try:
            # a child of it may hold the other end after its death
            found = ours.recv() if ours.poll() else None
        except EOFError:
            found = None
        worker.join(EXIT_DEADLINE_S)
        if found is None:
            raise SystemExit(
                f"{shape}: the process ended with exit code {worker.exitcode} and without an answer"
            )
        return found
    finally:
        if worker.is_alive():
            worker.kill()


def workload(run: int) -> tuple[list[list[int]], list[int]]:
    """The same numbers as bench/engine.py's, which cannot be imported here."""
    draw = random.Random(0)
    prompts = [
        [draw.randint(0, 10_000) for _ in range(draw.randint(SHORTEST, LONGEST))]
        for _ in range(REQUESTS)
    ]
    outputs = [draw.randint(SHORTEST, LONGEST) for _ in range(REQUESTS)]
    return [[token + run for token in prompt] for prompt in prompts], outputs


def measure(shape: str, folder: str, answer: Connection) -> None:
    sizes, _, ranks = shape.partition(":")
    model = Path(folder) / f"model_{sizes}"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps({**COMMON, **SHAPES[sizes]}))
    os.environ.update(NO_MULTICAST)
    begun_s = time.perf_counter()
    import torch
    import vllm

    engine = vllm.LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=REQUESTS,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=False,
        tensor_parallel_size=int(ranks or 1),
        seed=0,
    )
    one = vllm.SamplingParams(temperature=0.6, max_tokens=1, ignore_eos=True, detokenize=False)
    engine.generate([{"prompt_token_ids": [1, 2, 3]}], one, use_tqdm=False)
    start_s = time.perf_counter() - begun_s
    rates = []
    for run in range(RUNS + 1):
        prompts, outputs = workload(run)
        asked = [
            vllm.SamplingParams(
                temperature=0.6, max_tokens=count, ignore_eos=True, detokenize=False
            )
            for count in outputs
        ]
        run_begun_s = time.perf_counter()
        answers = engine.generate(
            [{"prompt_token_ids": tokens} for tokens in prompts], asked, use_tqdm=False
        )
        rates.append(sum(outputs) / (time.perf_counter() - run_begun_s))
        assert [len(answer.outputs[0].token_ids) for answer in answers] == outputs
        print(json.dumps({"shape": shape, "run": run, "tokens_per_s": rates[-1]}), flush=True)
    draw = random.Random(1)
    prompt = [draw.randint(0, 10_000) for _ in range(ONE_STREAM_TOKENS)]
    alone = vllm.SamplingParams(
        temperature=0.6, max_tokens=ONE_STREAM_TOKENS, ignore_eos=True, detokenize=False
    )
    stream_begun_s = time.perf_counter()
    engine.generate([{"prompt_token_ids": prompt}], alone, use_tqdm=False)
    one_stream = ONE_STREAM_TOKENS / (time.perf_counter() - stream_begun_s)
    answer.send(
        {
            "value": max(rates[1:]),
            "tokens_per_s_by_run": [round(rate) for rate in rates[1:]],
            "one_stream_tokens_per_s": round(one_stream, 1),
            "start_to_first_token_s": round(start_s, 2),
            "device": torch.cuda.get_device_name(),
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        }
    )


if __name__ == "__main__":
    main()
