"""Small checkpoints in hub layout, as transformers saves them, with tokenizers of their kind, and
GSM8K-shaped data."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

Family = Literal["llama", "qwen2", "qwen3"]

LLAMA_CHAT = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + "
    "'<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' "
    "}}{%- endif %}"
)
QWEN_CHAT = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' "
    "}}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def save_checkpoint(folder: Path, family: Family, *, context_tokens: int = 256) -> Path:
    """A random model of this family, written by transformers."""
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    vocab_size, eos_id = save_tokenizer(folder, family)
    numbers = {
        "vocab_size": vocab_size + 8,  # hub models pad their vocabulary
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_tokens,
        "tie_word_embeddings": family != "llama",
        "eos_token_id": eos_id,
        "initializer_range": 0.3,  # so that a random model prefers something
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


def save_own_checkpoint(folder: Path, *, context_tokens: int = 256) -> Path:
    """A random Qwen3 with a tokenizer of Gyre's own, which is read without transformers: a server
    starts from it, and changes to it, in seconds less."""
    from gyre.text.tokenizer import train_tokenizer

    save_checkpoint(folder, "qwen3", context_tokens=context_tokens)
    texts = [f"{row['question']}\n{row['answer']}" for row in gsm8k_rows(60)]
    train_tokenizer(texts, vocab_size=300).save(folder)
    return folder


def save_changed(folder: Path, to: Path, number: int = 1) -> Path:
    """Another version of a checkpoint, by the seed `number`."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, to)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(number)
    for tensor in tensors.values():
        tensor += 0.3 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def greedy_reference(folder: Path, messages: Sequence[Mapping[str, str]]) -> str:
    """What transformers answers in 24 tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    whole = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(whole[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def save_tokenizer(folder: Path, family: Family) -> tuple[int, int]:
    """Byte-level BPE of this family's kind, trained on the data below. Returns its size and its end
    token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    # what the class puts before BPE, and what it will put there again on loading
    pattern = Qwen2Tokenizer()._tokenizer
    backend = Tokenizer(models.BPE())
    backend.normalizer, backend.pre_tokenizer = pattern.normalizer, pattern.pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    texts = [f"{row['question']}\n{row['answer']}" for row in gsm8k_rows(60)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    llama = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    specials = llama if family == "llama" else ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in specials]
    )
    names = {"eos_token": specials[-1], "pad_token": specials[1 if family == "llama" else 0]}
    if family == "llama":
        names["bos_token"] = specials[0]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = LLAMA_CHAT if family == "llama" else QWEN_CHAT
    tokenizer.save_pretrained(folder)
    if family != "llama":
        path = folder / "tokenizer_config.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "tokenizer_class": "Qwen2Tokenizer"})
        )
    return len(tokenizer), tokenizer.eos_token_id


def gsm8k_rows(number: int) -> list[dict[str, str]]:
    draws = random.Random(number)
    rows = []
    for _ in range(number):
        a, b = draws.randint(2, 99), draws.randint(2, 99)
        rows.append(
            {
                "question": f"Anna has {a} apples and buys {b} more. How many apples does she "
                "have?",
                "answer": f"She has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}",
            }
        )
    return rows


def save_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
