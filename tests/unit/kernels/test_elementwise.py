"""Norm, rotary, gated activation and the blocks made of them, against the plain oracles: forward
and backward."""

# T tokens, E hidden size, H heads, K kv heads, D head dim, M mlp size

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference_kernels
from gyre.kernels.norm import rms_norm
from gyre.kernels.rope import rope_frequencies, rope_tables, turn, turn_back
from gyre.kernels.silu import silu_mul_backward, silu_mul_forward
from gyre.models.layers.blocks import attention_inputs, attention_output
from gyre.models.layers.mlp import mlp as dense_mlp

CPU = torch.device("cpu")
EPS = 1e-6
sizes = st.integers(min_value=1, max_value=9)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64, grad: bool = True) -> Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype).requires_grad_(grad)


def agree(got: Tensor, want: Tensor, inputs: list[Tensor], seed: int = 99) -> None:
    """Same values, and the same gradients of every input for a random upstream gradient."""
    torch.testing.assert_close(got, want)
    upstream = randn(*got.shape, seed=seed, grad=False)
    got_grads = torch.autograd.grad(got, inputs, upstream)
    want_grads = torch.autograd.grad(want, inputs, upstream)
    for got_grad, want_grad in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got_grad, want_grad)


@settings(max_examples=30, deadline=None)
@given(tokens=sizes, features=st.integers(1, 40), seed=st.integers(0, 1000))
def test_rms_norm_is_the_oracle(tokens: int, features: int, seed: int) -> None:
    x_TE, weight_E = randn(tokens, features, seed=seed), randn(features, seed=seed + 1)
    agree(
        rms_norm(x_TE, weight_E, EPS),
        reference_kernels.rms_norm(x_TE, weight_E, EPS),
        [x_TE, weight_E],
    )


def test_rms_norm_gradcheck() -> None:
    assert torch.autograd.gradcheck(
        lambda x, w: rms_norm(x, w, EPS), (randn(3, 5, seed=1), randn(5, seed=2))
    )


def test_rms_norm_survives_rows_of_zeros() -> None:
    x_TE, weight_E = torch.zeros(2, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    y_TE = rms_norm(x_TE, weight_E, EPS)
    y_TE.sum().backward()
    assert torch.equal(y_TE, torch.zeros(2, 4))
    assert x_TE.grad is not None and x_TE.grad.isfinite().all()


@settings(max_examples=30, deadline=None)
@given(tokens=sizes, heads=st.integers(1, 4), half=st.integers(1, 8), seed=st.integers(0, 1000))
def test_turn_is_the_oracle_and_turn_back_its_gradient(
    tokens: int, heads: int, half: int, seed: int
) -> None:
    positions_T = torch.randint(0, 5000, (tokens,), generator=torch.Generator().manual_seed(seed))
    inv_freq_F = rope_frequencies(2 * half, 10_000.0, None, CPU)
    cos_T1D, sin_T1D = rope_tables(positions_T, inv_freq_F, torch.float64)
    x_THD, upstream = (
        randn(tokens, heads, 2 * half, seed=seed),
        randn(tokens, heads, 2 * half, seed=seed + 1),
    )
    want = reference_kernels.rope(x_THD, cos_T1D[:, 0, :half], sin_T1D[:, 0, half:])
    torch.testing.assert_close(turn(x_THD, cos_T1D, sin_T1D), want)
    torch.testing.assert_close(
        turn_back(upstream, cos_T1D, sin_T1D),
        torch.autograd.grad(want, x_THD, upstream.detach())[0],
    )
    torch.testing.assert_close(
        turn_back(turn(x_THD, cos_T1D, sin_T1D), cos_T1D, sin_T1D), x_THD, rtol=0, atol=1e-6
    )


def test_llama3_scaling_keeps_short_waves_and_slows_long_ones() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192.0,
    }
    plain_F, scaled_F = (rope_frequencies(128, 500_000.0, s, CPU) for s in (None, scaling))
    waves_F = 2 * torch.pi / plain_F
    torch.testing.assert_close(scaled_F[waves_F < 8192 / 4], plain_F[waves_F < 8192 / 4])
    torch.testing.assert_close(scaled_F[waves_F > 8192], plain_F[waves_F > 8192] / 8)
    assert (scaled_F <= plain_F).all() and (scaled_F.diff() < 0).all()


@settings(max_examples=30, deadline=None)
@given(tokens=sizes, width=st.integers(1, 33), seed=st.integers(0, 1000))
def test_silu_mul_is_the_oracle(tokens: int, width: int, seed: int) -> None:
    gate_up, upstream = (
        randn(tokens, 2 * width, seed=seed),
        randn(tokens, width, seed=seed + 1, grad=False),
    )
    want = reference_kernels.silu_mul(gate_up)
    with torch.no_grad():
        got, kept = silu_mul_forward(gate_up)
        got_grad, product = silu_mul_backward(upstream.clone(), gate_up, kept)
    torch.testing.assert_close(got, want)
    assert torch.equal(product, got)
    torch.testing.assert_close(got_grad, torch.autograd.grad(want, gate_up, upstream)[0])


def plain_inputs(x, norm, qkv, bias, q_norm, k_norm, cos, sin, heads):
    """attention_inputs by the oracles."""
    num_heads, num_kv_heads = heads
    half = cos.shape[-1] // 2
    projected = reference_kernels.rms_norm(x, norm, EPS) @ qkv.t()
    if bias is not None:
        projected = projected + bias
    q, k, v = projected.unflatten(1, (-1, 2 * half)).split(
        [num_heads, num_kv_heads, num_kv_heads], dim=1
    )
    if q_norm is not None:
        q, k = (
            reference_kernels.rms_norm(q, q_norm, EPS),
            reference_kernels.rms_norm(k, k_norm, EPS),
        )
    cos_TF, sin_TF = cos[:, 0, :half], sin[:, 0, half:]
    return (
        x,
        reference_kernels.rope(q, cos_TF, sin_TF),
        reference_kernels.rope(k, cos_TF, sin_TF),
        v,
    )


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_norms", [False, True])
@settings(max_examples=8, deadline=None)
@given(
    tokens=sizes,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    half=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_attention_inputs_is_the_oracle(
    with_bias: bool, with_norms: bool, tokens: int, kv_heads: int, group: int, half: int, seed: int
) -> None:
    heads, hidden, head_dim = (group * kv_heads, kv_heads), 6, 2 * half
    rows = (heads[0] + 2 * kv_heads) * head_dim
    x, norm, qkv = (
        randn(tokens, hidden, seed=seed),
        randn(hidden, seed=seed + 1),
        randn(rows, hidden, seed=seed + 2),
    )
    bias = randn(rows, seed=seed + 3) if with_bias else None
    q_norm, k_norm = (randn(head_dim, seed=seed + i) if with_norms else None for i in (4, 5))
    cos, sin = rope_tables(
        torch.arange(tokens), rope_frequencies(head_dim, 100.0, None, CPU), torch.float64
    )
    got = attention_inputs(x, norm, qkv, bias, q_norm, k_norm, cos, sin, heads=heads, eps=EPS)
    want = plain_inputs(x, norm, qkv, bias, q_norm, k_norm, cos, sin, heads)
    inputs = [t for t in (x, norm, qkv, bias, q_norm, k_norm) if t is not None]
    agree(*(torch.cat([part.flatten() for part in parts]) for parts in (got, want)), inputs)


def layer_output(
    x: Tensor, a: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """A dense layer after its attention."""
    return dense_mlp(attention_output(x, a, out), norm, gate_up, down, eps=EPS)


@settings(max_examples=15, deadline=None)
@given(
    tokens=sizes,
    hidden=st.integers(1, 8),
    attended=st.integers(1, 8),
    mlp=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_layer_output_is_the_oracle(
    tokens: int, hidden: int, attended: int, mlp: int, seed: int
) -> None:
    shapes = [
        (tokens, hidden),
        (tokens, attended),
        (hidden, attended),
        (hidden,),
        (2 * mlp, hidden),
        (hidden, mlp),
    ]
    inputs = [randn(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    x, a, out, norm, gate_up, down = inputs
    middle = x + a @ out.t()
    want = (
        middle
        + reference_kernels.silu_mul(reference_kernels.rms_norm(middle, norm, EPS) @ gate_up.t())
        @ down.t()
    )
    agree(layer_output(x, a, out, norm, gate_up, down), want, inputs)


def test_layer_output_in_bfloat16_stays_within_its_rounding() -> None:
    shapes = [(64, 32), (64, 32), (32, 32), (32,), (96, 32), (32, 48)]
    wide = [
        randn(*shape, seed=i) * (0.2 if len(shape) == 2 and i > 1 else 1.0)
        for i, shape in enumerate(shapes)
    ]
    wide = [t.detach().bfloat16().double().requires_grad_() for t in wide]
    narrow = [t.detach().bfloat16().requires_grad_() for t in wide]
    upstream = randn(64, 32, seed=50, grad=False).bfloat16()
    results = []
    for inputs, up in ((narrow, upstream), (wide, upstream.double())):
        out = layer_output(*inputs)
        results.append([out, *torch.autograd.grad(out, inputs, up)])
    for got, want in zip(*results, strict=True):
        error = (got.double() - want).norm() / want.norm()
        assert error < 0.01, error
