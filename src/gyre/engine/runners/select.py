"""Which runner serves a model on a device, and why. In: decoder, KV pool, config. Out: a
StepRunner, or the reason why the fused kernels cannot serve."""

from __future__ import annotations

import importlib.util
import time

import torch

from gyre.core.errors import InputError
from gyre.core.events import Emit
from gyre.engine.config import EngineConfig
from gyre.engine.kv_cache.pool import KvPool
from gyre.engine.runners.cpu_runner import CpuRunner
from gyre.engine.runners.cpu_step import why_not_c
from gyre.engine.runners.torch_runner import Runner
from gyre.engine.sampling.shard_sampler import ShardSampler
from gyre.engine.sampling.vocabulary_shard import VocabularyShard
from gyre.engine.scheduler.step import StepRunner
from gyre.kernels.dispatch import why_too_old
from gyre.models.decoder import Decoder
from gyre.models.spec import ModelSpec

FUSED_DTYPES = (torch.bfloat16, torch.float16)
TOKENWISE_DTYPES = (torch.float32, torch.bfloat16)
FUSED_HEAD_DIMS = (16, 32, 64, 128)


def choose_runner(
    decoder: Decoder,
    pool: KvPool,
    config: EngineConfig,
    *,
    capture: torch.cuda.Stream | None = None,
    emit: Emit,
) -> StepRunner:
    """Make the runner and emit its kind: the fused one on a CUDA device, with graphs captured on
    `capture`; the C kernels on a CPU; plain torch where neither serves. Torch over several ranks of
    a CPU can be batch-invariant, token by token."""
    on_gpu = decoder.device.type == "cuda"
    reason = find_torch_reason(decoder, config, device=decoder.device, page_tokens=pool.page_tokens)
    if reason is not None:
        emit("engine.torch_kernels", reason=reason)
        return Runner(
            decoder,
            pool,
            max_running=config.max_running,
            device=decoder.device,
            dtype=decoder.dtype,
            rows_at_once=config.rows_at_once,
            deadline_s=config.step_deadline_s,
            tokenwise=config.batch_invariant,
            # the trainer's log-probs are of the whole vocabulary in one order
            sharded=None if config.batch_invariant else _sharded(decoder, emit),
        )
    if not on_gpu:
        cpu_runner = CpuRunner(decoder, pool, rows_at_once=config.rows_at_once)
        emit("engine.c_kernels", instructions=cpu_runner.instructions)
        return cpu_runner
    assert capture is not None
    from gyre.engine.runners.gpu_runner import GpuRunner  # here, since a CPU has no Triton

    runner = GpuRunner(
        decoder,
        pool,
        max_running=config.max_running,
        token_budget=config.token_budget,
        rows_at_once=config.rows_at_once,
        invariant=config.batch_invariant,
        deadline_s=config.step_deadline_s,
        capture=capture,
        emit=emit,
        sharded=_sharded(decoder, emit) if config.sharded_sampling else None,
    )
    begun_s = time.monotonic()
    first_s = runner.capture_all()
    emit(
        "engine.graphs_captured",
        graphs=len(runner.graphs),
        batch_invariant=config.batch_invariant,
        seconds=time.monotonic() - begun_s,
        first_s=first_s,
    )
    return runner


def _sharded(decoder: Decoder, emit: Emit) -> ShardSampler | None:
    """Return what chooses where each rank has a part of the vocabulary, or None."""
    if decoder.tensor is None:
        return None
    vocab_size = decoder.whole_spec.vocab_size
    return ShardSampler(
        VocabularyShard(group=decoder.tensor.group, vocab_size=vocab_size), emit=emit
    )


def find_torch_reason(
    decoder: Decoder, config: EngineConfig, *, device: torch.device, page_tokens: int
) -> str | None:
    """Return why torch must serve a decoder on `device`, or None where our own kernels do.
    InputError where it must, and cannot with engine.batch_invariant."""
    if device.type == "cuda":
        reason = why_too_old(device) or why_not_fused(decoder.spec, decoder.dtype, page_tokens)
    else:
        reason = why_not_kernels(decoder, config)
    refused = reason
    if device.type == "cpu" and decoder.tensor is not None:
        refused = why_not_tokenwise(decoder.spec, decoder.dtype)
    if config.batch_invariant and refused is not None:
        raise InputError(
            "engine.batch_invariant needs the engine's own kernels, which cannot run here: "
            f"{refused}",
            hint="run `gyre doctor` for what this machine lacks, or set engine.batch_invariant = "
            "false",
        )
    return reason


def why_not_kernels(decoder: Decoder, config: EngineConfig) -> str | None:
    """Return why the C kernels cannot serve, or None."""
    if not config.c_kernels:
        return "engine.c_kernels = false"
    if decoder.tensor is not None:
        return "several tensor ranks: the C step is one call, without a point to sum at"
    if decoder.spec.window_tokens is not None:
        return "sliding windows: the C kernels look at everything"
    if config.overlap:
        return "engine.overlap = true: the C kernels read the last tokens from the host"
    return why_not_c(decoder)


def why_not_tokenwise(spec: ModelSpec, dtype: torch.dtype) -> str | None:
    """Return why torch cannot be batch-invariant over several ranks of a CPU, or None."""
    if spec.window_tokens is not None:
        return "sliding windows: token by token everything is looked at"
    if dtype not in TOKENWISE_DTYPES:
        return f"dtype {dtype}: over ranks of a CPU the mode takes float32 and bfloat16"
    return None


def why_not_fused(spec: ModelSpec, dtype: torch.dtype, page_tokens: int) -> str | None:
    """Return why the fused kernels cannot serve this model on a CUDA device, or None."""
    if spec.window_tokens is not None:
        return "sliding windows: the fused kernels look at everything"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in FUSED_DTYPES:
        return f"dtype {dtype}: the fused kernels take bfloat16 and float16"
    if spec.head_dim not in FUSED_HEAD_DIMS:
        return (
            f"head_dim {spec.head_dim}: the fused kernels take "
            f"{', '.join(map(str, FUSED_HEAD_DIMS))}"
        )
    if page_tokens < 16 or page_tokens & (page_tokens - 1):
        return f"page_tokens {page_tokens}: the fused kernels take powers of two from 16"
    return None
