"""Every kernel on a real CUDA device, forward and backward, against the oracles in float64 on the
CPU."""

# T tokens, H heads, K kv heads, D head dim, E hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import reference_kernels
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.logprobs import token_logprobs
from gyre.kernels.norm import rms_norm
from gyre.kernels.rope import rope_frequencies, rope_tables
from gyre.models.layers.blocks import attention_inputs, attention_output
from gyre.models.layers.mlp import mlp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
]

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
EPS = 1e-6
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the norm of what is compared


def check(
    ours: Callable, oracle: Callable, shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> None:
    """Compare outputs and the gradients of every input, for random inputs that `dtype` can hold."""
    generator = torch.Generator().manual_seed(0)
    narrow = [
        (0.5 * torch.randn(*shape, generator=generator)).to(GPU, dtype).requires_grad_()
        for shape in shapes
    ]
    wide = [x.detach().cpu().double().requires_grad_() for x in narrow]
    got, want = ours(*narrow), oracle(*wide)
    upstream = torch.randn(want.shape, generator=generator).to(got.dtype)
    got_all = [got, *torch.autograd.grad(got, narrow, upstream.to(GPU))]
    want_all = [want, *torch.autograd.grad(want, wide, upstream.double())]
    for a, b in zip(got_all, want_all, strict=True):
        assert (a.cpu().double() - b).norm() <= TOLERANCE[dtype] * b.norm()


def test_rms_norm(dtype: torch.dtype) -> None:
    check(
        lambda x, w: rms_norm(x, w, EPS),
        lambda x, w: reference_kernels.rms_norm(x, w, EPS),
        [(33, 64), (64,)],
        dtype,
    )


def test_attention_inputs(dtype: torch.dtype) -> None:
    heads, head_dim, tokens = (4, 2), 64, 40

    def flat(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.flatten() for part in parts])

    def ours(
        x: Tensor, norm: Tensor, qkv: Tensor, bias: Tensor, q_norm: Tensor, k_norm: Tensor
    ) -> Tensor:
        tables = rope_tables(
            torch.arange(tokens, device=GPU), rope_frequencies(head_dim, 1e4, None, GPU), dtype
        )
        return flat(
            attention_inputs(x, norm, qkv, bias, q_norm, k_norm, *tables, heads=heads, eps=EPS)
        )

    def oracle(
        x: Tensor, norm: Tensor, qkv: Tensor, bias: Tensor, q_norm: Tensor, k_norm: Tensor
    ) -> Tensor:
        cos, sin = rope_tables(
            torch.arange(tokens), rope_frequencies(head_dim, 1e4, None, CPU), torch.float64
        )
        tables = cos[:, 0, : head_dim // 2], sin[:, 0, head_dim // 2 :]
        projected = reference_kernels.rms_norm(x, norm, EPS) @ qkv.t() + bias
        q, k, v = projected.unflatten(1, (-1, head_dim)).split([4, 2, 2], dim=1)
        q, k = (
            reference_kernels.rope(reference_kernels.rms_norm(y, w, EPS), *tables)
            for y, w in ((q, q_norm), (k, k_norm))
        )
        return flat((x, q, k, v))

    check(ours, oracle, [(tokens, 32), (32,), (512, 32), (512,), (head_dim,), (head_dim,)], dtype)


def layer_output(
    x: Tensor, a: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """A dense layer after its attention."""
    return mlp(attention_output(x, a, out), norm, gate_up, down, eps=EPS)


def test_layer_output(dtype: torch.dtype) -> None:
    def oracle(
        x: Tensor, a: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        middle = x + a @ out.t()
        return (
            middle
            + reference_kernels.silu_mul(
                reference_kernels.rms_norm(middle, norm, EPS) @ gate_up.t()
            )
            @ down.t()
        )

    shapes = [(40, 32), (40, 64), (32, 64), (32,), (96, 32), (32, 48)]
    check(layer_output, oracle, shapes, dtype)


@pytest.mark.parametrize("lengths", [[64, 64], [1, 70, 0, 300, 33], [600, 129]])
def test_varlen_attention(dtype: torch.dtype, lengths: list[int]) -> None:
    layout, tokens = PackedLayout.of(lengths, GPU), sum(lengths)
    check(
        lambda q, k, v: varlen_attention(q, k, v, layout),
        lambda q, k, v: reference_kernels.varlen_attention(q, k, v, lengths),
        [(tokens, 4, 64), (tokens, 2, 64), (tokens, 2, 64)],
        dtype,
    )


@pytest.mark.parametrize("chunk", [0, 100])
@pytest.mark.parametrize("truncated", [False, True])
def test_token_logprobs(dtype: torch.dtype, chunk: int, truncated: bool) -> None:
    targets_T = torch.arange(30) * 7 % 256
    temperature_T = torch.linspace(0.5, 1.5, 30)
    offsets, ids = (
        torch.arange(31) * 2,
        torch.stack([targets_T // 2, targets_T // 2 + 128], 1).flatten().int(),
    )
    targets_T = ids.view(30, 2)[:, 1].long() if truncated else targets_T
    support = (offsets, ids) if truncated else None
    there = (offsets.to(GPU), ids.to(GPU)) if truncated else None
    check(
        lambda h, w: token_logprobs(
            h, w, targets_T.to(GPU), temperature_T.to(GPU), there, chunk=chunk
        )[0],
        lambda h, w: reference_kernels.token_logprobs(
            h, w, targets_T, temperature_T.double(), support
        )[0],
        [(30, 32), (256, 32)],
        dtype,
    )
