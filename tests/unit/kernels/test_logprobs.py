"""Token log-probs: against the oracle forward and backward, in one vocabulary block and in many."""

# N rows, E hidden size, V vocabulary

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import reference_kernels
from gyre.kernels.logprobs import BLOCK_LOGITS, token_logprobs


def make_case(
    rows: int, vocab: int, seed: int, *, size: float = 1.0, dtype: torch.dtype = torch.float64
):
    """Hidden rows, head weight, targets and temperatures."""
    generator = torch.Generator().manual_seed(seed)
    hidden = (
        (size * torch.randn(rows, 5, generator=generator, dtype=torch.float64))
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(vocab, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    temperatures = 0.5 + torch.rand(rows, generator=generator)
    return hidden, weight, targets, temperatures


def make_support(targets: Tensor, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a random set of allowed tokens per row that holds the target, as offsets and ascending
    ids."""
    allowed = torch.rand(len(targets), vocab, generator=torch.Generator().manual_seed(seed)) < 0.4
    allowed[torch.arange(len(targets)), targets] = True
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), allowed.sum(1).cumsum(0)])
    return offsets, allowed.nonzero()[:, 1].int()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 12),
    vocab=st.integers(1, 40),
    chunk=st.integers(0, 45),
    truncated=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_logprobs_entropy_and_gradients_are_the_oracle(
    rows: int, vocab: int, chunk: int, truncated: bool, seed: int
) -> None:
    hidden, weight, targets, temperatures = make_case(rows, vocab, seed)
    temperatures = temperatures.double()
    support = make_support(targets, vocab, seed) if truncated else None
    got, entropy = token_logprobs(hidden, weight, targets, temperatures, support, chunk=chunk)
    want, want_entropy = reference_kernels.token_logprobs(
        hidden, weight, targets, temperatures, support
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(entropy, want_entropy)
    upstream, bonus = torch.randn(
        2, rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    # Of the log-probs alone, of the entropies alone, of both.
    for weights in ((upstream, None), (None, bonus), (upstream, bonus)):
        ours, theirs = (
            torch.autograd.grad(
                [out for out, w in zip(outs, weights, strict=True) if w is not None],
                (hidden, weight),
                [w for w in weights if w is not None],
                retain_graph=True,
            )
            for outs in ((got, entropy), (want, want_entropy))
        )
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chunk", [0, 3])
def test_gradcheck(chunk: int) -> None:
    hidden, weight, targets, temperatures = make_case(4, 7, 1)
    support = make_support(targets, 7, 2)
    for case in (None, support):
        assert torch.autograd.gradcheck(
            lambda h, w, case=case: token_logprobs(
                h, w, targets, temperatures.double(), case, chunk=chunk
            ),
            (hidden, weight),
        )


class Products(TorchDispatchMode):
    """How many matrix products and exponentials an operation takes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::mm", "aten::matmul", "aten::exp", "aten::exp_")
        return func(*args, **(kwargs or {}))


def test_an_entropy_that_is_only_reported_costs_the_backward_pass_nothing() -> None:
    hidden, weight, targets, temperatures = make_case(6, 30, 3)
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperatures.double())
    with Products() as alone:
        torch.autograd.backward(logprobs, torch.ones_like(logprobs), retain_graph=True)
    assert alone.count == 2, "the two products of the gradients; probabilities were kept"
    with Products() as both:
        torch.autograd.backward(
            (logprobs, entropy), (torch.ones_like(logprobs), torch.ones_like(entropy))
        )
    assert both.count > alone.count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [0, 16])
def test_the_entropys_gradient_stays_finite_where_probabilities_underflow(
    dtype: torch.dtype, chunk: int
) -> None:
    """p log p is 0 where p is: for logits far below the largest, and outside a support."""
    hidden = torch.tensor([[300.0], [1.0]], dtype=dtype, requires_grad=True)
    weight = torch.linspace(1.0, -1.0, 32, dtype=dtype)[:, None].requires_grad_()
    targets, ones = torch.tensor([20, 3]), torch.ones(2)
    offsets, ids = (
        torch.tensor([0, 32, 35]),
        torch.cat([torch.arange(32), torch.tensor([3, 9, 31])]),
    )
    for support in (None, (offsets, ids.int())):
        _, entropy = token_logprobs(hidden, weight, targets, ones, support, chunk=chunk)
        ours = torch.autograd.grad(entropy.sum(), (hidden, weight))
        wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        want = reference_kernels.token_logprobs(*wide, targets, ones.double(), support)[1]
        for mine, theirs in zip(ours, torch.autograd.grad(want.sum(), wide), strict=True):
            error = (mine.double() - theirs).norm() / theirs.norm()
            assert mine.isfinite().all() and error < (1e-3 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("chunk", [0, 16])
def test_a_token_without_hope_keeps_a_finite_logprob_and_gradient(chunk: int) -> None:
    """Its probability underflows to 0 in float32; its log-prob and gradient must not."""
    hidden = torch.tensor([[300.0]], requires_grad=True)
    weight = torch.cat([torch.ones(1, 1), -torch.ones(31, 1)]).requires_grad_()
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([20]), torch.ones(1), chunk=chunk)
    torch.testing.assert_close(logprobs.detach(), torch.tensor([-600.0]))
    logprobs.sum().backward()
    torch.testing.assert_close(hidden.grad, torch.tensor([[-2.0]]))


def test_a_sure_token_keeps_its_small_gradient_in_bfloat16() -> None:
    """1 - p is taken from the log-prob: p rounded to bfloat16 would be 1 and the gradient rows
    would not sum to 0."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[7.0], [0.0]], dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([0]), torch.ones(1))
    logprobs.sum().backward()
    rest = torch.sigmoid(torch.tensor(-7.0))
    torch.testing.assert_close(
        weight.grad.float(), torch.stack([rest, -rest])[:, None], rtol=0.01, atol=0
    )


@pytest.mark.parametrize("chunk", [0, 10])
def test_bfloat16_weights_have_a_float32_softmax(chunk: int) -> None:
    hidden, weight, targets, temperatures = make_case(64, 33, 4, dtype=torch.bfloat16)
    logits = (hidden @ weight.t()).detach().float() / temperatures[:, None]
    got, entropy = token_logprobs(hidden, weight, targets, temperatures, chunk=chunk)
    assert got.dtype == entropy.dtype == torch.float32
    want = logits.log_softmax(-1)
    torch.testing.assert_close(got.detach(), want.gather(1, targets[:, None]).squeeze(1))
    got.sum().backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    reference_kernels.token_logprobs(*wide, targets, temperatures.double())[0].sum().backward()
    for narrow, exact in zip((hidden, weight), wide, strict=True):
        assert (narrow.grad.double() - exact.grad).norm() < 0.02 * exact.grad.norm()


def test_the_only_allowed_token_has_probability_one_and_no_gradient() -> None:
    hidden, weight, targets, temperatures = make_case(3, 6, 8, dtype=torch.float32)
    support = (torch.arange(4), targets.int())
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperatures, support)
    logprobs.sum().backward()
    assert torch.equal(logprobs.detach(), torch.zeros(3)) and torch.equal(entropy, torch.zeros(3))
    assert not hidden.grad.any() and not weight.grad.any()


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        made = [
            leaf.untyped_storage().nbytes() // leaf.itemsize
            for leaf in tree_leaves(found)
            if isinstance(leaf, Tensor)
        ]
        self.numbers = max(self.numbers, *made, 0)
        return found


def test_logits_of_a_large_vocabulary_never_exist_whole() -> None:
    rows, vocab = 200, 3 * BLOCK_LOGITS // 200
    hidden, weight, targets, temperatures = make_case(rows, vocab, 0, dtype=torch.float32)
    with Largest() as seen:
        logprobs_N, entropy_N = token_logprobs(hidden, weight, targets, temperatures)
    assert max(weight.numel(), BLOCK_LOGITS // 2) < seen.numbers <= BLOCK_LOGITS < rows * vocab
    for outputs in ((logprobs_N,), (logprobs_N, entropy_N)):
        weight.grad = None
        with Largest() as seen:
            torch.autograd.backward(outputs, [torch.ones(rows)] * len(outputs), retain_graph=True)
        assert seen.numbers <= BLOCK_LOGITS and weight.grad is not None and bool(weight.grad.any())
