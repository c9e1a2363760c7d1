"""The trainer's C kernels against the plain oracles in float64, forward and backward, in float32
and bfloat16. Memory that torch hands out is NaN throughout, so that what a kernel fails to write is
seen."""

# T tokens, E hidden size, H heads, K kv heads, D head dim, M mlp size, N rows, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference_kernels
from gyre.kernels import attention, logprobs, norm, silu
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.cpu.build import Unavailable
from gyre.kernels.cpu.chunks import ChunkKernels
from gyre.kernels.dispatch import kernels_for
from gyre.kernels.logprobs import token_logprobs
from gyre.kernels.norm import rms_norm_backward, rms_norm_forward
from gyre.kernels.rope import rope_frequencies, rope_tables
from gyre.kernels.silu import silu_mul_backward, silu_mul_forward
from gyre.models.layers import qk_norm_rope
from gyre.models.layers.qk_norm_rope import turn_heads, turn_heads_backward

CPU = torch.device("cpu")
EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
pytestmark = pytest.mark.usefixtures("instructions", "team")
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # new memory is NaN then
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor | None, want: Tensor | None, dtype: torch.dtype) -> None:
    """By the norm of the difference, since single numbers near zero are nothing but rounding."""
    assert got is not None and want is not None and got.shape == want.shape
    assert got.isfinite().all()
    size = want.norm().clamp_min(1e-30)
    assert (got.double() - want).norm() <= TOLERANCE[dtype] * size, float(
        (got.double() - want).norm() / size
    )


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    """Float64 leaves of the same values."""
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


@by_dtype
@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(1, 40),
    vectors=st.integers(1, 7),
    through=st.booleans(),
    seed=st.integers(0, 999),
)
def test_norm(dtype: torch.dtype, tokens: int, vectors: int, through: bool, seed: int) -> None:
    width = 16 * vectors
    x, weight = (
        randn(tokens, width, seed=seed, dtype=dtype),
        randn(width, seed=seed + 1, dtype=dtype),
    )
    upstream, other = (randn(tokens, width, seed=seed + i, dtype=dtype) for i in (2, 3))
    assert kernels_for(x, width) is not None
    y, rstd = rms_norm_forward(x, weight, EPS)
    got = rms_norm_backward(upstream, x, rstd, weight, other if through else None)
    x64, weight64 = leaves(x, weight)
    want = reference_kernels.rms_norm(x64, weight64, EPS)
    grad_x, grad_weight = torch.autograd.grad(want, (x64, weight64), upstream.double())
    close(y, want, dtype)
    close(got[0], grad_x + (other.double() if through else 0), dtype)
    close(got[1], grad_weight, dtype)


@by_dtype
@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(1, 30), kv_heads=st.integers(1, 3), group=st.integers(1, 3), dim=st.sampled_from([32, 64, 96]),
    normed=st.booleans(), seed=st.integers(0, 999),
)  # fmt: skip
def test_heads(
    dtype: torch.dtype, tokens: int, kv_heads: int, group: int, dim: int, normed: bool, seed: int
) -> None:
    counts = (kv_heads * group, kv_heads)
    qkv = randn(tokens, (counts[0] + 2 * kv_heads) * dim, seed=seed, dtype=dtype)
    norms = [randn(dim, seed=seed + i, dtype=dtype) if normed else None for i in (1, 2)]
    cos, sin = rope_tables(
        torch.arange(tokens) * 7, rope_frequencies(dim, 10_000.0, None, CPU), dtype
    )
    q, k, v, rstd = turn_heads(qkv, *norms, cos, sin, heads=counts, eps=EPS)
    upstream = [
        randn(tokens, count, dim, seed=seed + 3 + i, dtype=dtype)
        for i, count in enumerate((*counts, kv_heads))
    ]
    got = turn_heads_backward(
        (upstream[0], upstream[1], upstream[2]), qkv, rstd, *norms, cos, sin, heads=counts
    )
    qkv64, *norms64 = wide(qkv, *norms)
    assert qkv64 is not None
    q64, k64, v64 = qkv64.view(tokens, -1, dim).split([*counts, kv_heads], dim=1)
    if norms64[0] is not None and norms64[1] is not None:
        q64, k64 = (
            reference_kernels.rms_norm(q64, norms64[0], EPS),
            reference_kernels.rms_norm(k64, norms64[1], EPS),
        )
    angles = cos.double()[:, 0, : dim // 2], sin.double()[:, 0, dim // 2 :]
    wants = [reference_kernels.rope(q64, *angles), reference_kernels.rope(k64, *angles), v64]
    inputs = [t for t in (qkv64, *norms64) if t is not None]
    grads = torch.autograd.grad(wants, inputs, [grad.double() for grad in upstream])
    for mine, want in zip((q, k, v), wants, strict=True):
        close(mine, want, dtype)
    for mine, want in zip([grad for grad in got if grad is not None], grads, strict=True):
        close(mine, want, dtype)


@by_dtype
@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 30),
    vectors=st.integers(1, 6),
    seed=st.integers(0, 999),
    scale=st.sampled_from([1, 30]),
)
def test_silu_mul(dtype: torch.dtype, tokens: int, vectors: int, seed: int, scale: int) -> None:
    gate_up = randn(tokens, 32 * vectors, seed=seed, dtype=dtype) * scale
    upstream = randn(tokens, 16 * vectors, seed=seed + 1, dtype=dtype)
    product, kept = silu_mul_forward(gate_up)
    grad, again = silu_mul_backward(upstream.clone(), gate_up, kept)
    assert len(kept) == 1 and again is kept[0] is product, "the kernels want no silu(gate)"
    (gate_up64,) = leaves(gate_up)
    want = reference_kernels.silu_mul(gate_up64)
    close(product, want, dtype)
    close(grad, torch.autograd.grad(want, gate_up64, upstream.double())[0], dtype)


@by_dtype
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 130, 200]), min_size=1, max_size=5),
    kv_heads=st.integers(1, 2), group=st.integers(1, 3), dim=st.sampled_from([32, 64, 128]), seed=st.integers(0, 999),
)  # fmt: skip
def test_attention(
    dtype: torch.dtype, lengths: list[int], kv_heads: int, group: int, dim: int, seed: int
) -> None:
    tokens = sum(lengths)
    if tokens == 0:
        return
    q = randn(tokens, kv_heads * group, dim, seed=seed, dtype=dtype).requires_grad_()
    k = randn(tokens, kv_heads, dim, seed=seed + 1, dtype=dtype).requires_grad_()
    rows = randn(tokens, kv_heads + 2, dim, seed=seed + 2, dtype=dtype).requires_grad_()
    upstream = randn(*q.shape, seed=seed + 3, dtype=dtype)
    # values are a part of wider rows
    got = varlen_attention(q, k, rows[:, 1:-1], PackedLayout.of(lengths, CPU))
    got_grads = torch.autograd.grad(got, (q, k, rows), upstream)
    inputs = leaves(q, k, rows)
    want = reference_kernels.varlen_attention(inputs[0], inputs[1], inputs[2][:, 1:-1], lengths)
    want_grads = torch.autograd.grad(want, inputs, upstream.double())
    close(got, want, dtype)
    for index, (mine, theirs) in enumerate(zip(got_grads, want_grads, strict=True)):
        assert mine.isfinite().all()
        # of length-1 ones q's and k's are 0
        bound = TOLERANCE[dtype] * (theirs.norm() + 0.1 * want_grads[2].norm())
        assert (mine.double() - theirs).norm() <= bound, index


@by_dtype
@settings(max_examples=20, deadline=None)
@example(rows=1, vectors=17, seed=518, scale=3.0)  # one token has almost all the probability
@given(
    rows=st.integers(1, 30),
    vectors=st.integers(1, 40),
    seed=st.integers(0, 999),
    scale=st.sampled_from([0.1, 3.0]),
)
def test_logprobs(dtype: torch.dtype, rows: int, vectors: int, seed: int, scale: float) -> None:
    vocab, generator = 16 * vectors, torch.Generator().manual_seed(seed)
    hidden = (randn(rows, 8, seed=seed, dtype=dtype) * scale).requires_grad_()
    head = randn(vocab, 8, seed=seed + 1, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    temperature, upstream = (
        torch.rand(rows, generator=generator) + 0.5,
        torch.randn(rows, generator=generator),
    )
    assert kernels_for(hidden, vocab) is not None
    got, entropy = token_logprobs(hidden, head, targets, temperature)
    bonus = torch.randn(rows, generator=generator)
    found = [torch.autograd.grad(got, (hidden, head), upstream, retain_graph=True)]
    found.append(torch.autograd.grad(entropy, (hidden, head), bonus, retain_graph=True))
    found.append(torch.autograd.grad((got, entropy), (hidden, head), (upstream, bonus)))
    # The oracle starts from the product as rounded: near 20, a logit of bfloat16 is known to 0.06
    # only.
    logits, one = leaves((hidden @ head.t()).detach())[0], torch.eye(vocab, dtype=torch.float64)
    want, want_entropy = reference_kernels.token_logprobs(
        logits, one, targets, temperature.double()
    )
    (of_logprobs,) = torch.autograd.grad(want, logits, upstream.double(), retain_graph=True)
    (of_entropy,) = torch.autograd.grad(want_entropy, logits, bonus.double())
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 2)
    torch.testing.assert_close(
        entropy.double(), want_entropy, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 2
    )
    # log p + entropy is a difference of logits, which are known to the rounding of the largest one.
    # A gradient multiplies what is lost there by a row of the other factor.
    lost = 4 * torch.finfo(torch.float32).eps * float(logits.detach().abs().max())
    for got_grads, grad_logits, extra in zip(
        found, (of_logprobs, of_entropy, of_logprobs + of_entropy), (0.0, lost, lost), strict=True
    ):
        want_grads = [
            grad_logits @ head.detach().double(),
            grad_logits.t() @ hidden.detach().double(),
        ]
        rows_of = [float(factor.detach().norm(dim=1).max()) for factor in (head, hidden)]
        for mine, theirs, longest in zip(got_grads, want_grads, rows_of, strict=True):
            bound = (
                TOLERANCE[dtype] * (theirs.norm() + 0.1 * grad_logits.norm())
                + 1e-6
                + extra * bonus.norm() * max(1.0, longest)
            )
            assert mine.isfinite().all() and (mine.double() - theirs).norm() <= bound


def test_bits_do_not_depend_on_the_neighbors() -> None:
    """A sequence's attention is the same alone and packed; a row's norm and log-prob too."""
    lengths = [70, 5, 130]
    q, k, v = (
        randn(sum(lengths), qk_norm_rope, 32, seed=i, dtype=torch.bfloat16)
        for i, qk_norm_rope in enumerate((4, 2, 2))
    )
    whole = varlen_attention(q, k, v, PackedLayout.of(lengths, CPU))
    start = 0
    for length in lengths:
        span = slice(start, start + length)
        assert torch.equal(
            whole[span], varlen_attention(q[span], k[span], v[span], PackedLayout.of([length], CPU))
        )
        start += length


def test_large_logits_cost_no_digits() -> None:
    """Log-probs hang on differences: logits that all lie near 2,000 give what those near 0 give,
    and none above 0."""
    logits = 2000 + 3 * randn(60, 160, seed=5, dtype=torch.float32)
    temperature = torch.linspace(0.3, 1.7, 60)
    for targets in (logits.argmax(1), logits.argmin(1)):
        kernels = kernels_for(logits, 160)
        assert isinstance(kernels, ChunkKernels)
        got, entropy, _ = kernels.logprobs(logits, temperature, targets)
        want = (logits.double() / temperature.double()[:, None]).log_softmax(1)
        torch.testing.assert_close(
            got.double(), want.gather(1, targets[:, None])[:, 0], rtol=2e-6, atol=2e-6
        )
        torch.testing.assert_close(
            entropy.double(), -(want.exp() * want).sum(1), rtol=2e-5, atol=2e-5
        )
        assert (got <= 0).all()


@by_dtype
def test_rows_may_begin_anywhere(dtype: torch.dtype) -> None:
    """The same bits from tensors that begin one number past where memory is aligned."""

    def moved(tensor: Tensor) -> Tensor:
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
        return room.copy_(tensor)

    kernels = kernels_for(randn(1, seed=0, dtype=dtype))
    assert isinstance(kernels, ChunkKernels)
    x, weight, gate_up = (randn(*shape, seed=1, dtype=dtype) for shape in ((9, 48), (48,), (9, 96)))
    q, k, v, grad = (
        randn(70, qk_norm_rope, 32, seed=i, dtype=dtype)
        for i, qk_norm_rope in enumerate((4, 2, 2, 4))
    )
    offsets = torch.tensor([0, 67, 70], dtype=torch.int32)

    def run(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        qkv = [place(q), place(k), place(v)]
        out, total = kernels.attention(*qkv, offsets, 67)
        normed, rstd = kernels.norm(place(x), place(weight), EPS)
        return [
            out,
            *kernels.attention_backward(place(grad), *qkv, place(out), place(total), offsets, 67),
            normed,
            *kernels.norm_backward(place(x), place(x), place(rstd), place(weight), None),
            kernels.silu(place(gate_up)),
            kernels.silu_backward(place(x), place(gate_up))[0],
        ]

    for straight, askew in zip(run(torch.clone), run(moved), strict=True):
        assert torch.equal(straight, askew)


@pytest.mark.parametrize("without", ["kernels", "compiler"])
def test_without_the_kernels_torch_does_the_same(monkeypatch, without: str) -> None:
    """One layer's parts by both paths, in bfloat16: the same to rounding."""

    def both(compute: Callable[[], list[Tensor]]) -> None:
        mine = compute()
        with monkeypatch.context() as patch:
            for module in (norm, qk_norm_rope, silu, attention, logprobs):
                if without == "kernels":
                    name = "chunks_for" if module is attention else "kernels_for"
                    patch.setattr(module, name, lambda *given, **named: None)
                else:
                    patch.setattr(
                        "gyre.kernels.cpu.chunks.load_chunks",
                        lambda dtype: Unavailable(reason="gone"),
                    )
            theirs = compute()
        for got, want in zip(mine, theirs, strict=True):
            close(got, want.double(), torch.bfloat16)

    x, weight = randn(20, 64, seed=1, dtype=torch.bfloat16), randn(64, seed=2, dtype=torch.bfloat16)
    both(lambda: [rms_norm_forward(x, weight, EPS)[0]])
    q = randn(50, 2, 32, seed=3, dtype=torch.bfloat16)
    both(lambda: [varlen_attention(q, q[:, :1], q[:, 1:], PackedLayout.of([30, 20], CPU))])
    both(lambda: [silu_mul_forward(x)[0]])
