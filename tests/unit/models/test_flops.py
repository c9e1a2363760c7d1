"""FLOPs of a forward pass against what torch's own counter sees of a transformers model."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gyre.models.config import ShapeConfig
from gyre.models.flops import forward_flops, seen_pairs
from gyre.models.spec import ModelSpec, spec_from_shape

SIZES = {
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_size": 40,
}


def make_spec(family: Literal["llama", "qwen3"], *, tied: bool) -> ModelSpec:
    shape = ShapeConfig(family=family, tied=tied, context_tokens=128, **SIZES)
    return spec_from_shape(shape, vocab_size=96, bos_id=None, eos_ids=(1,))


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3", False), ("llama", False)])
def test_counted_like_torchs_counter_sees_a_transformers_model(family, tied) -> None:
    spec = make_spec(family, tied=tied)
    kinds = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    config, model = kinds[family]
    theirs = model(
        config(
            vocab_size=96,
            hidden_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=40,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    )
    length = 21
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        theirs(torch.zeros(1, length, dtype=torch.long))
    # where its table of angles is an outer product; ours is no matrix's
    rotary = 2 * (spec.head_dim // 2) * length
    whole_attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * length**2
    ours = forward_flops(spec, [length], num_outputs=length)
    assert counter.get_total_flops() - (ours + whole_attention / 2) in (0, rotary)


def test_sequences_see_themselves_only_and_outputs_are_what_is_asked_for() -> None:
    spec = make_spec("qwen3", tied=True)
    packed = forward_flops(spec, [5, 9, 30], num_outputs=44)
    assert packed == sum(forward_flops(spec, [n], num_outputs=n) for n in (5, 9, 30))
    assert packed - forward_flops(spec, [5, 9, 30], num_outputs=10) == 2 * 96 * 24 * 34
    assert (
        forward_flops(spec, [7], num_outputs=1, output_rows=1)
        == forward_flops(spec, [7], num_outputs=0) + 2 * 24
    )


@pytest.mark.parametrize(("length", "window"), [(40, None), (40, 64), (40, 40), (40, 8), (40, 1)])
def test_pairs_are_half_of_the_mask_up_to_its_diagonal(length, window) -> None:
    mask = torch.ones(length, length).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    diagonal = min(length, window or length)
    assert seen_pairs(length, window) == mask.sum() - diagonal / 2
