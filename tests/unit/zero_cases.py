"""Cases for trainers on several ranks; functions here run in rank processes (rank_pool), or in the test's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from trainer_cases import SPEC, make_batch, make_decoder, make_trainer

from gyre.core.records import StepReport, TrainBatch
from gyre.models.decoder import Decoder
from gyre.models.heads import ScalarHead
from gyre.parallel.group import Group, alone
from gyre.trainer.native import NativeTrainer


def scored_model(seed: int, device: torch.device, dtype: torch.dtype) -> tuple[Decoder, ScalarHead]:
    head = ScalarHead(SPEC.hidden_size, device=device)
    drawn = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        head.weight.copy_(drawn)
    return decoder_on(device, dtype, seed), head


def decoder_on(device: torch.device, dtype: torch.dtype, seed: int = 0) -> Decoder:
    decoder = Decoder(SPEC, device=device, dtype=dtype)
    decoder.load_state_dict(make_decoder(dtype, seed).state_dict())
    return decoder


def trainer_on(group: Group, kind: str, *, dtype: torch.dtype = torch.float32, **settings: Any) -> NativeTrainer:
    """A trainer whose weights differ from its reference's and whose heads are not zero, so that all paths matter."""
    device = group.device
    extra: dict[str, Any] = {}
    if kind == "ppo":
        extra["critic"] = scored_model(3, device, dtype)
    if kind == "rm":
        extra["head"] = scored_model(5, device, dtype)[1]
    return make_trainer(kind, decoder=decoder_on(device, dtype), group=group, **extra, **settings)


def batch_for(kind: str, num_sequences: int, seed: int) -> TrainBatch:
    """A batch that brings reference log-probs of another model, so that KL and DPO have a gradient."""
    batch = make_batch(num_sequences, seed=seed, step=seed)
    rng = np.random.default_rng(seed + 100)
    sequences = tuple(
        replace(s, columns={**s.columns, "reference_logprobs": np.where(
            s.columns["loss_mask"], rng.normal(-3.8, 0.3, len(s.tokens)), 0.0).astype(np.float32)})
        for s in batch.sequences
    )  # fmt: skip
    return replace(batch, sequences=sequences)


def numbers(state: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy().copy() for name, tensor in state["tensors"].items()}


def train(
    group: Group | None, kind: str, *, steps: int = 2, num_sequences: int = 12, **settings: Any
) -> tuple[list[StepReport], dict[str, np.ndarray]]:
    """Reports of some steps, and everything that a snapshot holds afterwards (rank 0 holds it)."""
    trainer = trainer_on(group or alone(), kind, **settings)
    reports = [trainer.step_now(batch_for(kind, num_sequences, seed=step)) for step in range(steps)]
    state = numbers(trainer.snapshot())
    return reports, state
