"""Cases for the trainer's tests: a tiny model, random batches for every objective, a trainer on the
calling thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gyre.core.records import Evaluation, Support, TrainBatch, TrainSequence
from gyre.distributed.layout import BoxRun
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import ModelSpec
from gyre.objectives.config import DpoConfig, GrpoConfig, PpoConfig, RmConfig, SftConfig
from gyre.trainer.checkpoint.shards import HeldParts, Part
from gyre.trainer.config import TrainerConfig
from gyre.trainer.trainer import NativeTrainer

CPU = torch.device("cpu")
SPEC = ModelSpec(
    family="qwen3",
    vocab_size=48,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mlp_size=48,
    tied=True,
    context_tokens=256,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    bos_id=None,
    eos_ids=(0,),
)
OBJECTIVES = {
    "sft": SftConfig(),
    "rm": RmConfig(),
    "dpo": DpoConfig(),
    "grpo": GrpoConfig(kl_coef=0.04, entropy_coef=0.02),
    "ppo": PpoConfig(),
}


# what a processor lacks is no news of a test
OF_THE_MACHINE = ("trainer.torch_kernels", "trainer.c_kernels")


def make_decoder(dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    decoder = Decoder(SPEC, device=CPU, dtype=dtype)
    init_weights(decoder, seed)
    # larger than at the start of a real run, so that every path of the gradient matters
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(5.0)
    return decoder


def make_trainer(
    kind: str = "grpo", *, dtype: torch.dtype = torch.float32, **settings: Any
) -> NativeTrainer:
    """`settings` that TrainerConfig knows go there, the rest to the constructor."""
    known = {key: settings.pop(key) for key in list(settings) if key in TrainerConfig.model_fields}
    events: list = settings.pop("events", [])
    arguments: dict[str, Any] = {
        "decoder": settings.pop("decoder", None) or make_decoder(dtype),
        "objective": OBJECTIVES[kind],
        "config": TrainerConfig(**{"learning_rate": 1e-2, "tokens_per_chunk": 64, **known}),
        "compute": ThreadPoolExecutor(1),
        "emit": lambda name, **fields: (
            None if name in OF_THE_MACHINE else events.append((name, fields))
        ),
        "seed": 0,
    }
    return NativeTrainer(**{**arguments, **settings})


def random_sequence(rng: np.random.Generator, length: int, **extra: Any) -> TrainSequence:
    """A sequence with every column that any objective reads."""
    mask = rng.random(length) < 0.7
    mask[0] = False
    if length > 1:
        mask[-1] = True

    def column(scale: float) -> np.ndarray:
        return np.where(mask, rng.normal(0.0, scale, length), 0.0).astype(np.float32)

    columns = {
        "loss_mask": mask,
        "advantages": column(1.0),
        "logprobs": np.where(mask, column(0.3) - 3.8, 0.0).astype(np.float32),
        "values": column(1.0),
        "returns": column(1.0),
    }
    return TrainSequence(
        tokens=rng.integers(0, SPEC.vocab_size, length).astype(np.int32), columns=columns, **extra
    )


def make_batch(num_sequences: int = 12, *, seed: int = 0, step: int = 0) -> TrainBatch:
    """Sequences of 3 to 30 tokens; neighbors are siblings of a pair."""
    rng = np.random.default_rng(seed)
    sequences = tuple(
        random_sequence(
            rng, int(rng.integers(3, 31)), pair_id=i // 2, scalars={"chosen": float(i % 2)}
        )
        for i in range(num_sequences)
    )
    return TrainBatch(sequences=sequences, step=step)


def truncated(sequence: TrainSequence, rng: np.random.Generator) -> TrainSequence:
    """The sequence as truncation leaves it: some three tenths of the tokens were choosable."""
    mask = sequence.columns["loss_mask"]
    allowed = rng.random((int(mask.sum()), SPEC.vocab_size)) < 0.3
    allowed[np.arange(len(allowed)), sequence.tokens[mask]] = True
    offsets = np.concatenate([[0], allowed.sum(1).cumsum()])
    support = Support(offsets=offsets.astype(np.int64), ids=allowed.nonzero()[1].astype(np.int32))
    return replace(sequence, support=support)


def with_column(batch: TrainBatch, name: str, evaluation: Evaluation) -> TrainBatch:
    sequences = tuple(
        replace(sequence, columns={**sequence.columns, name: values})
        for sequence, values in zip(batch.sequences, evaluation.per_token, strict=True)
    )
    return replace(batch, sequences=sequences)


def weights_of(trainer: NativeTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.register_now().source.tensors.items()}


def assert_bits_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


def assert_same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def assert_close(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], *, relative: float
) -> None:
    """Equal within a part of each tensor's largest number."""
    assert found.keys() == expected.keys() and any(tensor.any() for tensor in expected.values())
    for name, tensor in expected.items():
        np.testing.assert_allclose(
            found[name], tensor, atol=relative * np.abs(tensor).max(), rtol=0, err_msg=name
        )


def whole_tensors(parts: Iterable[Part]) -> dict[str, torch.Tensor]:
    """The tensors of a snapshot, of the parts of all ranks."""
    held = HeldParts(parts)
    found = {}
    for name, kind in held.kinds().items():
        found[name] = torch.empty(kind.shape, dtype=kind.dtype)
        run = BoxRun(start=0, stop=found[name].numel())
        held.read(name, run, found[name].view(-1))
    return found


def saved_tensors(trainer: NativeTrainer) -> dict[str, torch.Tensor]:
    """What a snapshot of one process holds."""
    return whole_tensors(trainer.snapshot_now()["tensors"].values())
