"""Peer of bench/grpo_step.py and rl_step_gpu.py: TRL's GRPOTrainer on the same model, prompts and
sizes, with vLLM in its process where the settings give it a share of the device. In: a JSON
settings file. Out: one JSON line with the seconds of each step. Runs in TRL's own environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from datasets.fingerprint import Hasher
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def digit_share(completions: list[str], **_: object) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


class Clock(TrainerCallback):
    """Seconds from the end of one optimizer step to the end of the next: generation, scoring, both
    passes, update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.completion_tokens = 0.0
        self._last = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        self.completion_tokens = logs.get("completions/mean_length", self.completion_tokens)


def hash_at_random() -> None:
    """Name caches at random: hashing functions by content needs another release of dill than there
    may be."""
    Hasher.hash = classmethod(lambda cls, value: os.urandom(8).hex())
    Hasher.update = lambda self, value: self.m.update(os.urandom(8))


def generation(settings: dict[str, Any]) -> dict[str, Any]:
    """By vLLM on a share of the device, or by transformers on the CPU; completions of exactly
    max_tokens either way."""
    tokens = settings["max_tokens"]
    if "vllm_memory_share" not in settings:
        return {"use_cpu": True, "bf16": False, "generation_kwargs": {"min_new_tokens": tokens}}
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": settings["vllm_memory_share"],
        "vllm_max_model_length": settings["context_tokens"],
        "bf16": True,
        "generation_kwargs": {"ignore_eos": True},
    }


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    hash_at_random()
    torch.set_num_threads(settings["threads"])
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings["dtype"]]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    prompts, group, tokens = (
        settings["prompts_per_step"],
        settings["completions_per_prompt"],
        settings["max_tokens"],
    )
    config = GRPOConfig(
        output_dir=settings["folder"],
        per_device_train_batch_size=prompts * group // settings["micro_batches"],
        gradient_accumulation_steps=settings["micro_batches"],
        num_generations=group,
        max_completion_length=tokens,
        beta=settings["kl_coef"],
        learning_rate=settings["learning_rate"],
        max_steps=settings["steps"],
        temperature=1.0,
        fp16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=0,
        **generation(settings),
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=digit_share,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in settings["prompts"]]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    versions = {
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    if "vllm_memory_share" in settings:
        versions["vllm"] = importlib.metadata.version("vllm")
    answer = {
        "seconds": clock.seconds,
        "completion_tokens": clock.completion_tokens,
        "versions": versions,
    }
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
