"""The Triton kernels of a training pass against their oracles in float64: fuzzed shapes, poisoned outputs, fresh random
inputs. The oracle is the torch code that runs where there are no kernels.
"""

# N rows, E features, T tokens, H heads, K kv heads, D head dim, M mlp size, V vocabulary

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from gyre.kernels import heads, logprobs, norm, reference, silu
from gyre.kernels.choose import kernels_for
from gyre.kernels.logprobs import token_logprobs
from gyre.kernels.rope import rope_frequencies, rope_tables

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda", 0)
EPS = 1e-6
HEADS = [(16, 8, 128), (32, 8, 128), (28, 4, 128), (8, 8, 64), (14, 2, 64), (6, 3, 32), (5, 5, 128), (2, 1, 256)]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
by_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is NaN then
    assert torch.empty(3, device=GPU).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fresh_inputs(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=GPU) * scale).to(dtype)


def close(got: Tensor | None, want: Tensor | None, dtype: torch.dtype) -> None:
    """By the norm of the difference, since single numbers near zero are nothing but rounding."""
    assert got is not None and want is not None and got.shape == want.shape, (got, want)
    assert got.isfinite().all()
    size = want.norm().clamp_min(1e-30)
    assert (got.double() - want.double()).norm() <= TOLERANCE[dtype] * size, float((got.double() - want).norm() / size)


def by_torch(compute: Callable, *modules) -> object:
    """Compute without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (norm, heads, silu, logprobs):
            patch.setattr(module, "kernels_for", lambda *given, **named: None)
        return compute()


@by_dtype
@pytest.mark.parametrize("width", [64, 100, 1024, 2560, 4096, 12288])
@pytest.mark.parametrize("rows", [0, 1, 7, 133, 3001])
def test_norm(dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = randn(rows, width, dtype=dtype, scale=3.0), randn(width, dtype=dtype)
    upstream, through = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
    assert kernels_for(x, width) is not None
    y, rstd = norm.rms_norm_forward(x, weight, EPS)
    torch_y, torch_rstd = by_torch(lambda: norm.rms_norm_forward(x, weight, EPS))
    assert (y != torch_y).float().sum() <= 0.02 * y.numel(), "another order of addition moves a rounding, no more"
    torch.testing.assert_close(rstd, torch_rstd.float(), rtol=1e-5, atol=0)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    want = reference.rms_norm(x64, weight64, EPS)
    close(y, want.detach(), dtype)
    want_x, want_weight = torch.autograd.grad(want, (x64, weight64), upstream.double())
    got_x, got_weight = norm.rms_norm_backward(upstream, x, rstd, weight)
    close(got_x, want_x, dtype)
    close(got_weight, want_weight, dtype)
    both, again = norm.rms_norm_backward(upstream, x, rstd, weight, through)
    close(both, want_x + through.double(), dtype)
    assert torch.equal(got_weight, again), "no atomics: the same bits each time"


@by_dtype
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("shape", HEADS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 257, 2050])
def test_heads(dtype: torch.dtype, tokens: int, shape: tuple[int, int, int], norms: bool) -> None:
    num_heads, num_kv, dim = shape
    qkv = randn(tokens, (num_heads + 2 * num_kv) * dim, dtype=dtype)
    weights = [randn(dim, dtype=dtype) if norms else None for _ in range(2)]
    positions = torch.randint(0, 40_000, (tokens,), device=GPU)
    tables = rope_tables(positions, rope_frequencies(dim, 1e6, None, GPU), dtype)
    grads = tuple(randn(tokens, count, dim, dtype=dtype) for count in (num_heads, num_kv, num_kv))
    assert kernels_for(qkv, head_dim=dim) is not None
    named = {"heads": (num_heads, num_kv)}
    q, k, v, rstd = heads.turn_heads(qkv, *weights, *tables, **named, eps=EPS)
    torch_q, torch_k, torch_v, _ = by_torch(lambda: heads.turn_heads(qkv, *weights, *tables, **named, eps=EPS))
    for mine, theirs in ((q, torch_q), (k, torch_k)):
        assert (mine != theirs).float().sum() <= 0.02 * mine.numel()
        close(mine, theirs, dtype)
    assert torch.equal(v, torch_v)
    wide = [None if weight is None else weight.double() for weight in weights]
    wide_tables = [table.double() for table in tables]

    def oracle() -> tuple:
        rstd64 = heads.turn_heads(qkv.double(), *wide, *wide_tables, **named, eps=EPS)[3]
        wide_grads = tuple(grad.double() for grad in grads)
        return heads.turn_heads_backward(wide_grads, qkv.double(), rstd64, *wide, *wide_tables, **named)

    want = by_torch(oracle)
    got = heads.turn_heads_backward(grads, qkv, rstd, *weights, *tables, **named)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            close(mine, theirs, dtype)
    again = heads.turn_heads_backward(grads, qkv, rstd, *weights, *tables, **named)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, again, strict=True))


@by_dtype
@pytest.mark.parametrize("width", [16, 1000, 3072, 12288])
@pytest.mark.parametrize("tokens", [0, 1, 5, 1031])
def test_silu(dtype: torch.dtype, tokens: int, width: int) -> None:
    gate_up, upstream = randn(tokens, 2 * width, dtype=dtype, scale=4.0), randn(tokens, width, dtype=dtype)
    product, kept = silu.silu_mul_forward(gate_up)
    assert kept == (), "the backward pass makes the product again"
    torch_product, _ = by_torch(lambda: silu.silu_mul_forward(gate_up))
    assert (product != torch_product).float().sum() <= 0.02 * product.numel()
    grad, again = silu.silu_mul_backward(upstream.clone(), gate_up, kept)
    assert torch.equal(again, product)
    gate_up64 = gate_up.double().requires_grad_()
    want = reference.silu_mul(gate_up64)
    close(product, want.detach(), dtype)
    close(grad, torch.autograd.grad(want, gate_up64, upstream.double())[0], dtype)


@by_dtype
@pytest.mark.parametrize(("rows", "vocab", "chunk"), [(1, 512, 0), (33, 5003, 0), (257, 32000, 9000), (64, 151936, 0)])
@pytest.mark.parametrize("keep", [True, False])
def test_token_logprobs(dtype: torch.dtype, rows: int, vocab: int, chunk: int, keep: bool) -> None:
    hidden = randn(rows, 64, dtype=dtype).requires_grad_()
    weight = randn(vocab, 64, dtype=dtype, scale=0.3).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device=GPU)
    targets[0] = vocab - 1
    temperature = torch.linspace(0.5, 1.5, rows, device=GPU)
    got, entropy = token_logprobs(hidden, weight, targets, temperature, chunk=chunk, keep_logits=keep)
    upstream = torch.randn(rows, device=GPU)
    grads = torch.autograd.grad(got, (hidden, weight), upstream)
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want, want_entropy = reference.token_logprobs(*wide, targets, temperature.double())
    torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.05)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=0.02, atol=0.05)
    for mine, theirs in zip(grads, torch.autograd.grad(want, wide, upstream.double()), strict=True):
        close(mine, theirs, dtype)


def test_kept_logits_serve_one_backward_pass() -> None:
    hidden, weight = (randn(count, 64, dtype=torch.bfloat16).requires_grad_() for count in (8, 512))
    targets, ones = torch.arange(8, device=GPU), torch.ones(8, device=GPU)
    total = token_logprobs(hidden, weight, targets, ones, keep_logits=True)[0].sum()
    total.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="one backward pass"):
        total.backward()


def test_certain_targets_keep_their_gradient() -> None:
    """Where a target's probability is nearly 1, 1 - p comes from the log-prob and not from a rounded p."""
    hidden = torch.eye(16, 64, device=GPU, dtype=torch.bfloat16).requires_grad_()
    weight = torch.zeros(256, 64, device=GPU, dtype=torch.bfloat16)
    weight[:16, :16] = 12.0 * torch.eye(16)
    logprobs_N, _ = token_logprobs(hidden, weight, torch.arange(16, device=GPU), torch.ones(16, device=GPU))
    grad = torch.autograd.grad(logprobs_N.sum(), hidden)[0]
    assert (grad.diagonal() > 0).all() and np.isfinite(float(grad.float().sum()))
