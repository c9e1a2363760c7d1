"""What the planner's tests share: specs, jobs, and what a pass really keeps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gyre.core.records import Checkpointing, Component, Matmul, Phase
from gyre.distributed.process_group import RankGroup
from gyre.engine.weights import read_weights
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.logprobs import token_logprobs
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import FreshWeights, init_weights
from gyre.models.layers.tensor_parallel import SequenceParallel, TensorParallel
from gyre.models.layers.vocabulary_logprobs import vocabulary_logprobs
from gyre.models.spec import ModelSpec, spec_from_shape
from gyre.planner.memory_model import components, peaks
from gyre.planner.memory_model import job as jobs
from gyre.planner.memory_model.engine import make_engine
from gyre.planner.memory_model.job import TrainingJob, layout_of
from gyre.planner.memory_model.states import Layout
from gyre.planner.model_zoo import find_shape, model_numbers
from gyre.planner.plan import (
    ComponentPlan,
    DeviceKind,
    Dtype,
    ModelNumbers,
    PlanInputs,
    Saving,
)

CPU = torch.device("cpu")
PAGE_BYTES = 4096  # of host memory, of which a component takes whole ones
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
    return spec_from_shape(
        ShapeConfig(**{**shape, **changes}), vocab_size=vocab_size, bos_id=None, eos_ids=(1,)
    )


def make_job(
    shape: str = "qwen3-8b", *, longest: int = 8192, update: int = 524_288, **changes: Any
) -> TrainingJob:
    base: dict[str, Any] = {
        "model": model_numbers(find_shape(shape)),
        "dtype": "bfloat16",
        "saving": "triton",
        "longest": longest,
        "mean_tokens": longest,
        "tokens_per_update": update,
        "most_tokens_per_update": update,
    }
    return TrainingJob(**{**base, **changes})


def job_of(
    inputs: PlanInputs,
    dtype: Dtype,
    *,
    saving: Saving = "torch_cpu",
    page_tokens: int = 16,
    max_running: int = 8,
) -> TrainingJob:
    engine = make_engine(
        inputs,
        dtype=dtype,
        saving=saving,
        page_tokens=page_tokens,
        max_running=max_running,
        running=max_running,
    )
    return jobs.make_job(inputs, dtype=dtype, saving=saving, engine=engine)


def predict_components(
    inputs: PlanInputs,
    *,
    dtype: Dtype,
    page_tokens: int,
    kv_pages: int,
    device: DeviceKind = "cpu",
) -> tuple[ComponentPlan, ...]:
    """What a run with these settings keeps."""
    return components.predict_components(
        job_of(inputs, dtype, page_tokens=page_tokens),
        layout_of(inputs, 0),
        kv_pages=kv_pages,
        device=device,
        disk_tier=inputs.disk_tier,
    )


def working_bytes(
    inputs: PlanInputs,
    *,
    dtype: Dtype,
    saving: Saving,
    tokens_per_chunk: int,
    page_tokens: int,
    max_running: int,
) -> dict[Phase, int]:
    """What a run with these settings has beside the components."""
    job = job_of(inputs, dtype, saving=saving, page_tokens=page_tokens, max_running=max_running)
    return peaks.working_bytes(job, layout_of(inputs, tokens_per_chunk))


def activation_bytes(
    model: ModelNumbers,
    dtype: Dtype,
    tokens: int,
    *,
    longest: int,
    saving: Saving,
    checkpointing: Checkpointing = "none",
    matmul: Matmul = "same",
) -> int:
    """What one chunk on one rank keeps for its backward pass, and the largest temporaries of that
    pass."""
    job = TrainingJob(
        model=model,
        dtype=dtype,
        saving=saving,
        longest=longest,
        mean_tokens=longest,
        tokens_per_update=tokens,
        most_tokens_per_update=tokens,
        matmul=matmul,
    )
    layout = Layout(
        gpus=1,
        zero=0,
        shard_ranks=1,
        checkpointing=checkpointing,
        tokens_per_chunk=tokens,
        offload_optimizer="none",
        offload_gradients=False,
    )
    return peaks.working_bytes(job, layout)["train"]


class Storages(TorchDispatchMode):
    """Every storage that is made under it, for as long as it lives; views of what was there before
    are none."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self._before = {StorageWeakRef(tensor.untyped_storage()) for tensor in before}
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if (reference := StorageWeakRef(storage)) not in self._before:
                    self._made[reference] = storage.nbytes()
        return found

    def alive_bytes(self) -> int:
        return sum(size for reference, size in self._made.items() if not reference.expired())


def kept_bytes(
    spec: ModelSpec,
    lengths: Sequence[int],
    dtype: torch.dtype,
    *,
    num_targets: int | None = None,
    device: torch.device = CPU,
    attention: Attention = varlen_attention,
    tensor: TensorParallel | None = None,
    **how: Any,
) -> int:
    """Bytes that live after the forward pass of one chunk because its backward pass wants them.
    `num_targets` as the trainer does it: the last layer goes on with these rows only. `tensor`
    joins the ranks that share the layers."""
    decoder = Decoder(spec, device=device, dtype=dtype, tensor=tensor)
    if tensor is None:
        init_weights(decoder, 0)
    else:
        read_weights(decoder, FreshWeights(spec, 0))
    layout = PackedLayout.of(lengths, device)
    num_rows = num_targets or sum(lengths)
    temperature_N = torch.ones(num_rows, device=device)

    def attend(_: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return attention(q_THD, k_TKD, v_TKD, layout)

    def run() -> Tensor:
        tokens_T = (torch.arange(sum(lengths)) % spec.vocab_size).to(device)
        rows_N = None if num_targets is None else torch.arange(num_targets, device=device)
        hidden_NE = decoder.hidden(tokens_T, layout.positions_T, attend, rows_N, **how)
        targets_N = tokens_T[:num_rows].clone()
        if tensor is not None:
            given = hidden_NE, decoder.head_weight, targets_N, temperature_N
            return vocabulary_logprobs(*given, vocab_size=spec.vocab_size, tensor=tensor)[0].sum()
        return token_logprobs(hidden_NE, decoder.head_weight, targets_N, temperature_N)[0].sum()

    with Storages(decoder.parameters()) as storages:
        loss = run()
    gc.collect()
    if tensor is not None:
        time.sleep(0.2)  # gloo's threads let go of a collective's tensors after it has ended
    assert loss.requires_grad
    return storages.alive_bytes()


def kept_by_rank(
    group: RankGroup, spec: ModelSpec, lengths: Sequence[int], dtype: torch.dtype, **how: Any
) -> int:
    """What `kept_bytes` says of a rank that splits the rows with the others."""
    return kept_bytes(spec, lengths, dtype, tensor=SequenceParallel(group), **how)


def assert_planned(
    found: Sequence[Component], inputs: PlanInputs, dtype: Dtype, *, relative: float, pages: int
) -> dict[str, Component]:
    """A trainer's components are those that the plan has, on the same tiers, and as large within
    both bounds; returns them by name."""
    planned = {
        c.name: c for c in predict_components(inputs, dtype=dtype, page_tokens=16, kv_pages=0)
    }
    by_name = {component.name: component for component in found}
    assert planned.keys() == by_name.keys()
    for name, component in by_name.items():
        bound = pytest.approx(component.size_bytes, rel=relative, abs=pages * PAGE_BYTES)
        assert planned[name].tiers == component.tiers, name
        assert planned[name].size_bytes == bound, name
    return by_name
