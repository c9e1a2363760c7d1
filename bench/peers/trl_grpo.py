"""Peer of bench/grpo_step.py: TRL's GRPOTrainer on the same model, prompts and sizes. In: a JSON settings file.
Out: one JSON line with the seconds of each step. Runs in TRL's own environment. Caller: bench/grpo_step.py.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def digit_share(completions: list[str], **_: object) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


class Clock(TrainerCallback):
    """Seconds from the end of one optimiser step to the end of the next: generation, scoring, both passes, update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings["dtype"]]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    prompts, group, tokens = settings["prompts_per_step"], settings["completions_per_prompt"], settings["max_tokens"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        per_device_train_batch_size=prompts * group // settings["micro_batches"],
        gradient_accumulation_steps=settings["micro_batches"],
        num_generations=group,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},
        beta=settings["kl_coef"],
        learning_rate=settings["learning_rate"],
        max_steps=settings["steps"],
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=0,
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
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps({"seconds": clock.seconds, "versions": versions}))


if __name__ == "__main__":
    main()
