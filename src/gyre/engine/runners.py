"""Which runner serves a model on a device, and why. In: decoder, KV pool, config. Out: a StepRunner. Caller: native."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from gyre.core.errors import InputError
from gyre.engine.attention import KvPool
from gyre.engine.config import EngineConfig
from gyre.engine.runner import Runner, StepRunner
from gyre.models.decoder import Decoder

FUSED_DTYPES = (torch.bfloat16, torch.float16)
FUSED_HEAD_DIMS = (16, 32, 64, 128)


def choose_runner(decoder: Decoder, pool: KvPool, config: EngineConfig, *, emit: Callable[..., None]) -> StepRunner:
    """Return the fused runner on a CUDA device where its kernels fit, else the one in plain torch; say which."""
    reason = "not a CUDA device" if decoder.device.type != "cuda" else why_not_fused(decoder, pool)
    if config.batch_invariant and reason is not None:
        raise InputError(
            f"engine.batch_invariant needs the fused runner, which cannot run here: {reason}",
            hint="use a CUDA device and a model that the fused kernels take, or set engine.batch_invariant = false",
        )
    if decoder.device.type == "cuda":
        if reason is None:
            from gyre.engine.gpu_runner import GpuRunner  # here, since a CPU has no Triton

            runner = GpuRunner(
                decoder,
                pool,
                max_running=config.max_running,
                token_budget=config.token_budget,
                rows_at_once=config.rows_at_once,
                invariant=config.batch_invariant,
                emit=emit,
            )
            graphs = runner.capture_all()
            emit("engine.runner", runner="fused", graphs=graphs, batch_invariant=config.batch_invariant)
            return runner
        emit("engine.runner", runner="torch", reason=reason)
    return Runner(
        decoder,
        pool,
        max_running=config.max_running,
        device=decoder.device,
        dtype=decoder.dtype,
        rows_at_once=config.rows_at_once,
    )


def why_not_fused(decoder: Decoder, pool: KvPool) -> str | None:
    """Return why the fused kernels cannot serve this model, or None."""
    head_dim, page_tokens = decoder.spec.head_dim, pool.page_tokens
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if decoder.dtype not in FUSED_DTYPES:
        return f"dtype {decoder.dtype}: the fused kernels take bfloat16 and float16"
    if head_dim not in FUSED_HEAD_DIMS:
        return f"head_dim {head_dim}: the fused kernels take {', '.join(map(str, FUSED_HEAD_DIMS))}"
    if page_tokens < 16 or page_tokens & (page_tokens - 1):
        return f"page_tokens {page_tokens}: the fused kernels take powers of two from 16"
    return None
