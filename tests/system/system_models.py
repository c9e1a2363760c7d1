"""Small checkpoints in hub layout, as transformers saves them, with a tokenizer and GSM8K-shaped data beside them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Literal

Family = Literal["llama", "qwen2", "qwen3"]


def save_checkpoint(folder: Path, family: Family, *, context_tokens: int = 256) -> Path:
    """A random model of this family, written by transformers, with a tokenizer of ours."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from gyre.text.tokenizer import train_tokenizer

    texts = [f"{row['question']}\n{row['answer']}" for row in gsm8k_rows(60)]
    tokenizer = train_tokenizer(texts, vocab_size=400)
    tokenizer.save(folder)
    numbers = {
        "vocab_size": tokenizer.vocab_size + 8,  # hub models pad their vocabulary
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_tokens,
        "tie_word_embeddings": family != "llama",
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_ids[0],
        "pad_token_id": tokenizer.pad_id,
    }
    torch.manual_seed(5)
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**numbers))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**numbers))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**numbers, head_dim=16))
    model.save_pretrained(folder)
    return folder


def gsm8k_rows(number: int) -> list[dict[str, str]]:
    draws = random.Random(number)
    rows = []
    for _ in range(number):
        a, b = draws.randint(2, 99), draws.randint(2, 99)
        rows.append(
            {
                "question": f"Anna has {a} apples and buys {b} more. How many apples does she have?",
                "answer": f"She has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}",
            }
        )
    return rows


def save_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
