"""A trainer on a CUDA device compiles its kernels in its first steps and none after, however many
tokens, targets and sequences a chunk has: Triton would compile anew for a count that is 1 or that
16 divides, FlashAttention-4 where all sequences are shorter than a tile."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gyre.core.records import TrainBatch
from gyre.kernels.dispatch import why_torch
from gyre.kernels.float8 import CAPABILITY
from gyre.kernels.gpu.flash4 import is_installed
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from trainer_cases import SPEC, make_trainer, random_sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
if torch.cuda.is_available():
    from gyre.trainer.passes.batch_invariant import InvariantLogprobs

GPU = torch.device("cuda", 0)
ABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY
MODEL = replace(
    SPEC,
    hidden_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=512,
    context_tokens=4096,
)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    # blocks of the vocabulary, as many as rows ask for
    "selective": {"checkpointing": "selective"},
    "8_bit": {"matmul": "fp8", "checkpointing": "full"},
    "invariant": {},
}
# Lengths of sequences, one chunk per batch. The first ones meet every tile of the batch-invariant
# products.
FIRST = ((2000, 1500), (300, 17), (40, 3))
REST = (
    (2,),
    (3,),
    (5, 11),
    (16,),
    (17,),
    (13, 19),
    (63,),
    (64,),
    (65, 2),
    (2,) * 16,
    (100, 28, 129),
    (512,),
    (7,) * 33,
    (1000, 24),
    (1025, 6),
    (3001, 333),
    (2048, 1024),
    (1500, 1400, 90),
)


def batch_of(lengths: tuple[int, ...], step: int) -> TrainBatch:
    rng = np.random.default_rng(step)
    return TrainBatch(
        sequences=tuple(random_sequence(rng, length) for length in lengths), step=step
    )


def flash4_kernels() -> int:
    """How many FlashAttention-4 has compiled or loaded."""
    if not is_installed():
        return 0
    from flash_attn.cute import interface

    found = (getattr(interface, name) for name in ("_flash_attn_fwd", "_flash_attn_bwd"))
    return sum(len(function.compile_cache.cache) for function in found)


@pytest.mark.parametrize("vocab_size", [1000, 151_936])
@pytest.mark.parametrize("kind", SETTINGS)
def test_steps_compile_nothing_after_the_first(
    kind: str, vocab_size: int, compiled: list[str]
) -> None:
    if kind == "8_bit" and not ABLE:
        pytest.skip("the device does not multiply 8-bit floats")
    assert why_torch(GPU, torch.bfloat16) is None
    decoder = Decoder(replace(MODEL, vocab_size=vocab_size), device=GPU, dtype=torch.bfloat16)
    init_weights(decoder, 0)
    logprobs = InvariantLogprobs(page_tokens=64) if kind == "invariant" else None
    trainer = make_trainer(
        "grpo", decoder=decoder, tokens_per_chunk=4096, logprobs=logprobs, **SETTINGS[kind]
    )

    def pass_through(step: int, lengths: tuple[int, ...]) -> None:
        batch = batch_of(lengths, step)
        for which in ("policy", "reference"):
            trainer.evaluate_now(batch, which)
        assert trainer.step_now(batch).num_updates == 1

    for step, lengths in enumerate(FIRST):
        pass_through(step, lengths)
    compiled.clear()
    before = flash4_kernels()
    for step, lengths in enumerate(REST, len(FIRST)):
        pass_through(step, lengths)
        assert not compiled, (lengths, compiled)
    assert flash4_kernels() == before
