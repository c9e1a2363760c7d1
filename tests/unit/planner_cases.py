"""What the planner's tests share: specs, jobs, and what autograd really keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.logprobs import token_logprobs
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import ModelSpec, spec_from_shape
from gyre.planner.moments import Job
from gyre.planner.shapes import find_shape, model_numbers

CPU = torch.device("cpu")
Attention = Callable[[Tensor, Tensor, Tensor, PackedLayout], Tensor]


def make_spec(vocab_size: int = 512, **changes: Any) -> ModelSpec:
    shape = {
        "family": "qwen3",
        "hidden_size": 128,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "mlp_size": 384,
        "tied": True,
        "context_tokens": 4096,
    }
    return spec_from_shape(ShapeConfig(**{**shape, **changes}), vocab_size=vocab_size, bos_id=None, eos_ids=(1,))


def make_job(shape: str = "qwen3-8b", *, longest: int = 8192, update: int = 524_288, **changes: Any) -> Job:
    base: dict[str, Any] = {
        "model": model_numbers(find_shape(shape)),
        "dtype": "bfloat16",
        "saving": "triton",
        "longest": longest,
        "mean_tokens": longest,
        "tokens_per_update": update,
        "most_tokens_per_update": update,
    }
    return Job(**{**base, **changes})


def kept_bytes(
    spec: ModelSpec,
    lengths: Sequence[int],
    dtype: torch.dtype,
    *,
    num_targets: int | None = None,
    device: torch.device = CPU,
    attention: Attention = varlen_attention,
    **how: Any,
) -> int:
    """Distinct bytes that autograd keeps for one chunk, weights not counted. `num_targets` as the trainer does it: the
    last layer goes on with these rows only."""
    decoder = Decoder(spec, device=device, dtype=dtype)
    init_weights(decoder, 0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    layout = PackedLayout.of(lengths, device)
    tokens_T = (torch.arange(sum(lengths)) % spec.vocab_size).to(device)
    rows_N = None if num_targets is None else torch.arange(num_targets, device=device)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    def attend(_: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return attention(q_THD, k_TKD, v_TKD, layout)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_NE = decoder.hidden(tokens_T, layout.positions_T, attend, rows_N, **how)
        targets_N = tokens_T[: len(hidden_NE)].clone()
        logprobs_N, _ = token_logprobs(
            hidden_NE, decoder.head_weight, targets_N, torch.ones(len(hidden_NE), device=device)
        )
        logprobs_N.sum()
    return sum(storage.nbytes() for storage in kept.values())
