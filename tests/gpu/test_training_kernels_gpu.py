"""The Triton kernels of a training pass against their oracles in float64: fuzzed shapes, poisoned
outputs, fresh random inputs. The oracle is the torch code that runs where there are no kernels.
"""

# N rows, E features, T tokens, H heads, K kv heads, D head dim, M mlp size, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

import reference_kernels
from gyre.core.records import Checkpointing
from gyre.distributed.mesh import make_mesh
from gyre.distributed.process_group import alone
from gyre.kernels import attention, dispatch, flash, logprobs, norm, silu
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.dispatch import kernels_for
from gyre.kernels.float8 import Amax, largest
from gyre.kernels.logprobs import token_logprobs
from gyre.kernels.rope import rope_frequencies, rope_tables
from gyre.kernels.sums import add_up
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.layers import qk_norm_rope
from gyre.models.spec import spec_from_shape
from gyre.trainer.adamw.adamw import Numbers, Span, update_block, update_spans
from gyre.trainer.optim.flat import FlatOptimizer, takes_decay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
EPS = 1e-6
HEADS = [
    (16, 8, 128),
    (32, 8, 128),
    (28, 4, 128),
    (8, 8, 64),
    (14, 2, 64),
    (6, 3, 32),
    (5, 5, 128),
    (2, 1, 256),
]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # a few roundings one after the other
by_bad = pytest.mark.parametrize("bad", [1.0, float("nan"), float("inf"), float("-inf")], ids=str)
by_dtype = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"]
)


@pytest.fixture(autouse=True, scope="module")
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is NaN then
    assert torch.empty(3, device=GPU).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=GPU) * scale).to(dtype)


def close(got: Tensor | None, want: Tensor | None, dtype: torch.dtype) -> None:
    """By the norm of the difference, since single numbers near zero are nothing but rounding."""
    assert got is not None and want is not None and got.shape == want.shape, (got, want)
    assert got.isfinite().all()
    size = want.norm().clamp_min(1e-30)
    assert (got.double() - want.double()).norm() <= TOLERANCE[dtype] * size, float(
        (got.double() - want).norm() / size
    )


def by_torch(compute: Callable[[], Any]) -> Any:
    """Compute without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (norm, qk_norm_rope, silu, logprobs):
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
    assert (y != torch_y).float().sum() <= 0.02 * y.numel(), (
        "another order of addition moves a rounding, no more"
    )
    torch.testing.assert_close(rstd, torch_rstd.float(), rtol=1e-5, atol=0)
    x64, weight64 = x.double().requires_grad_(), weight.double().requires_grad_()
    want = reference_kernels.rms_norm(x64, weight64, EPS)
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
    q, k, v, rstd = qk_norm_rope.turn_heads(qkv, *weights, *tables, **named, eps=EPS)
    torch_q, torch_k, torch_v, _ = by_torch(
        lambda: qk_norm_rope.turn_heads(qkv, *weights, *tables, **named, eps=EPS)
    )
    for mine, theirs in ((q, torch_q), (k, torch_k)):
        assert (mine != theirs).float().sum() <= 0.02 * mine.numel()
        close(mine, theirs, dtype)
    assert torch.equal(v, torch_v)
    wide = [None if weight is None else weight.double() for weight in weights]
    wide_tables = [table.double() for table in tables]

    def oracle() -> tuple:
        rstd64 = qk_norm_rope.turn_heads(qkv.double(), *wide, *wide_tables, **named, eps=EPS)[3]
        wide_grads = tuple(grad.double() for grad in grads)
        return qk_norm_rope.turn_heads_backward(
            wide_grads, qkv.double(), rstd64, *wide, *wide_tables, **named
        )

    want = by_torch(oracle)
    got = qk_norm_rope.turn_heads_backward(grads, qkv, rstd, *weights, *tables, **named)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            close(mine, theirs, dtype)
    again = qk_norm_rope.turn_heads_backward(grads, qkv, rstd, *weights, *tables, **named)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, again, strict=True))


@by_dtype
@pytest.mark.parametrize("width", [16, 1000, 3072, 12288])
@pytest.mark.parametrize("tokens", [0, 1, 5, 1031])
def test_silu(dtype: torch.dtype, tokens: int, width: int) -> None:
    gate_up, upstream = (
        randn(tokens, 2 * width, dtype=dtype, scale=4.0),
        randn(tokens, width, dtype=dtype),
    )
    product, kept = silu.silu_mul_forward(gate_up)
    assert kept == (), "the backward pass makes the product again"
    torch_product, _ = by_torch(lambda: silu.silu_mul_forward(gate_up))
    assert (product != torch_product).float().sum() <= 0.02 * product.numel()
    grad, again = silu.silu_mul_backward(upstream.clone(), gate_up, kept)
    assert torch.equal(again, product)
    gate_up64 = gate_up.double().requires_grad_()
    want = reference_kernels.silu_mul(gate_up64)
    close(product, want.detach(), dtype)
    close(grad, torch.autograd.grad(want, gate_up64, upstream.double())[0], dtype)


def spoilt(x: Tensor, bad: float) -> Tensor:
    """With one such number in the middle."""
    x.view(-1)[x.numel() // 2 :][:1] = bad
    return x


def finds(make: Callable[[Amax | None], Tensor]) -> None:
    """Of what it makes a kernel finds the number that reading it finds, and to ask changes no bit.
    What is no number counts for none."""
    amax = Amax()
    made, plain = make(amax), make(None)
    assert amax.found is not None and amax.found.dtype == torch.float32 and amax.found.shape == ()
    assert torch.equal(amax.found, largest(made))
    numbers = made[~made.isnan()]
    assert float(amax.found) == (float(numbers.abs().max()) if numbers.numel() else 0.0)
    assert torch.equal(made.view(torch.int16), plain.view(torch.int16))


@by_bad
@by_dtype
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 100), (7, 4096), (133, 48), (1031, 2560)])
def test_the_largest_number_of_a_norm(
    dtype: torch.dtype, rows: int, width: int, bad: float
) -> None:
    x, weight = spoilt(randn(rows, width, dtype=dtype, scale=3.0), bad), randn(width, dtype=dtype)
    finds(lambda amax: norm.rms_norm_forward(x, weight, EPS, amax)[0])
    upstream, clean = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
    upstream[rows // 2 :, 0] = bad  # after rows that are good, as a program walks over them
    _, rstd = norm.rms_norm_forward(clean, weight, EPS)
    for through in (None, randn(rows, width, dtype=dtype, scale=5.0)):
        finds(
            lambda amax, through=through: norm.rms_norm_backward(
                upstream, clean, rstd, weight, through, amax
            )[0]
        )


@by_bad
@by_dtype
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    ("tokens", "shape"), [(0, (8, 8, 64)), (1, (6, 3, 32)), (37, (5, 5, 128)), (259, (8, 2, 64))]
)
def test_the_largest_number_of_a_gradient_of_heads(
    dtype: torch.dtype,
    tokens: int,
    shape: tuple[int, int, int],
    which: int,
    norms: bool,
    bad: float,
) -> None:
    """Of queries, keys or values, whichever has it."""
    num_heads, num_kv, dim = shape
    qkv = randn(tokens, (num_heads + 2 * num_kv) * dim, dtype=dtype)
    weights = [randn(dim, dtype=dtype) if norms else None for _ in range(2)]
    tables = rope_tables(
        torch.arange(tokens, device=GPU), rope_frequencies(dim, 1e6, None, GPU), dtype
    )
    rstd = qk_norm_rope.turn_heads(qkv, *weights, *tables, heads=(num_heads, num_kv), eps=EPS)[3]
    q, k, v = (
        randn(tokens, count, dim, dtype=dtype, scale=7.0 if place == which else 1.0)
        for place, count in enumerate((num_heads, num_kv, num_kv))
    )
    spoilt((q, k, v)[which], bad)

    def make(amax: Amax | None) -> Tensor:
        given = (q, k, v), qkv, rstd, *weights, *tables
        return qk_norm_rope.turn_heads_backward(*given, heads=(num_heads, num_kv), amax=amax)[0]

    finds(make)


@by_bad
@by_dtype
@pytest.mark.parametrize("of_gate", [True, False])
@pytest.mark.parametrize(("tokens", "width"), [(0, 64), (1, 1000), (7, 4104), (1031, 48)])
def test_the_largest_number_of_silu(
    dtype: torch.dtype, tokens: int, width: int, of_gate: bool, bad: float
) -> None:
    gate_up, upstream = (
        randn(tokens, 2 * width, dtype=dtype, scale=4.0),
        randn(tokens, width, dtype=dtype),
    )
    finds(lambda amax: silu.silu_mul_forward(spoilt(gate_up.clone(), bad), amax)[0])
    # the gradient of the other one is the larger
    gate_up[:, width if of_gate else 0 :][:, :width] *= 4.0
    finds(lambda amax: silu.silu_mul_backward(spoilt(upstream.clone(), bad), gate_up, (), amax)[0])


@by_dtype
@pytest.mark.parametrize(
    ("rows", "vocab", "chunk"), [(1, 512, 0), (33, 5003, 0), (257, 32000, 9000), (64, 151936, 0)]
)
@pytest.mark.parametrize("keep", [True, False])
def test_token_logprobs(dtype: torch.dtype, rows: int, vocab: int, chunk: int, keep: bool) -> None:
    hidden = randn(rows, 64, dtype=dtype).requires_grad_()
    weight = randn(vocab, 64, dtype=dtype, scale=0.3).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device=GPU)
    targets[0] = vocab - 1
    temperature = torch.linspace(0.5, 1.5, rows, device=GPU)
    got, entropy = token_logprobs(
        hidden, weight, targets, temperature, chunk=chunk, keep_logits=keep
    )
    upstream = torch.randn(rows, device=GPU)
    grads = torch.autograd.grad(got, (hidden, weight), upstream)
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want, want_entropy = reference_kernels.token_logprobs(*wide, targets, temperature.double())
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
    """Where a target's probability is nearly 1, 1 - p comes from the log-prob and not from a
    rounded p."""
    hidden = torch.eye(16, 64, device=GPU, dtype=torch.bfloat16).requires_grad_()
    weight = torch.zeros(256, 64, device=GPU, dtype=torch.bfloat16)
    weight[:16, :16] = 12.0 * torch.eye(16)
    logprobs_N, _ = token_logprobs(
        hidden, weight, torch.arange(16, device=GPU), torch.ones(16, device=GPU)
    )
    grad = torch.autograd.grad(logprobs_N.sum(), hidden)[0]
    assert (grad.diagonal() > 0).all() and np.isfinite(float(grad.float().sum()))


def small_decoder(
    family: str, device: torch.device, dtype: torch.dtype, num_layers: int = 3
) -> Decoder:
    shape = ShapeConfig(
        family=family,
        hidden_size=256,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        mlp_size=704,
        tied=family != "llama",
        context_tokens=4096,
    )
    decoder = Decoder(
        spec_from_shape(shape, vocab_size=1000, bos_id=None, eos_ids=(1,)),
        device=device,
        dtype=dtype,
    )
    init_weights(decoder, 3)
    return decoder


def model_gradients(
    decoder: Decoder, lengths: list[int], mode: Checkpointing = "none"
) -> list[Tensor]:
    """Of the sum of log-probs of random tokens, some rows of the last layer left out."""
    layout = PackedLayout.of(lengths, decoder.device)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, decoder.spec.vocab_size, (sum(lengths),), generator=generator).to(
        decoder.device
    )
    rows = torch.arange(0, sum(lengths), 3, device=decoder.device)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, layout)

    hidden = decoder.hidden(tokens, layout.positions_T, attend, rows, checkpointing=mode)
    temperatures = torch.ones(len(rows), device=decoder.device)
    got = token_logprobs(
        hidden, decoder.head_weight, tokens[rows], temperatures, keep_logits=mode == "none"
    )[0]
    return list(torch.autograd.grad(got.sum(), list(decoder.parameters())))


def gap(got: Tensor, want: Tensor) -> float:
    return float(
        (got.cpu().double() - want.cpu().double()).norm()
        / want.double().norm().cpu().clamp_min(1e-30)
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_models_gradients_are_as_near_to_float64_as_those_of_torchs_operations(
    family: str,
) -> None:
    decoder, lengths = small_decoder(family, GPU, torch.bfloat16), [300, 1, 77, 131]
    wide = small_decoder(family, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(wide.parameters(), decoder.parameters(), strict=True):
            mine.copy_(theirs)
    want = model_gradients(wide, lengths)
    plain = by_torch(lambda: model_gradients(decoder, lengths))
    for mode in get_args(Checkpointing):
        for (name, _), ours, theirs, exact in zip(
            decoder.named_parameters(),
            model_gradients(decoder, lengths, mode),
            plain,
            want,
            strict=True,
        ):
            assert gap(ours, exact) <= 1.3 * gap(theirs, exact) + 2e-3, (mode, name)


def test_checkpointing_keeps_less_and_gives_the_same_gradient(allocated) -> None:
    """As far as two passes of one mode give it: flash-attn-4 sums gradients in no fixed order."""
    decoder, lengths = small_decoder("qwen3", GPU, torch.bfloat16, num_layers=12), [50] * 80
    earlier, found, peaks = {}, {}, {}
    for mode in get_args(Checkpointing):
        earlier[mode] = model_gradients(decoder, lengths, mode)
        before = allocated()
        torch.cuda.reset_peak_memory_stats()
        found[mode] = model_gradients(decoder, lengths, mode)
        peaks[mode] = torch.cuda.max_memory_allocated() - before
    spread = max(map(gap, earlier["none"], found["none"]))
    if flash.choice(GPU, torch.bfloat16, 4, 64)["kernel"] == "torch":
        assert spread == 0, "torch's kernel has a fixed order within a sequence of one tile"
    for mode in ("selective", "full"):
        assert max(map(gap, found[mode], found["none"])) <= 1e-3 + 1.5 * spread, mode
    assert peaks["full"] < peaks["selective"] < peaks["none"], peaks


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "shape", [(32, 8, 128), (28, 4, 128), (14, 2, 64), (4, 4, 64), (4, 1, 256)]
)
def test_attention(shape: tuple[int, int, int], window: int | None) -> None:
    (num_heads, num_kv, dim), lengths = shape, [1, 700, 0, 64, 300]
    layout, tokens = PackedLayout.of(lengths, GPU), sum([1, 700, 64, 300])
    wider = randn(tokens, num_kv + 1, dim, dtype=torch.bfloat16)  # values are a part of wider rows
    inputs = [
        randn(tokens, num_heads, dim, dtype=torch.bfloat16),
        randn(tokens, num_kv, dim, dtype=torch.bfloat16),
    ]
    inputs = [part.requires_grad_() for part in (*inputs, wider[:, 1:])]
    out = varlen_attention(*inputs, layout, window)
    upstream = randn(*out.shape, dtype=torch.bfloat16)
    wide = [part.detach().cpu().double().requires_grad_() for part in inputs]
    want = varlen_attention(*wide, PackedLayout.of(lengths, torch.device("cpu")), window)
    grads = torch.autograd.grad(out, inputs, upstream)
    wants = torch.autograd.grad(want, wide, upstream.cpu().double())
    for mine, theirs in zip((out, *grads), (want, *wants), strict=True):
        assert gap(mine.detach(), theirs.detach()) < 2e-2


def test_the_choice_of_attention_has_a_reason() -> None:
    for dim in (64, 80):
        found = flash.choice(GPU, torch.bfloat16, 4, dim)
        assert found["kernel"] in ("torch", "flash-attn-4") and found["reason"]
    assert found["kernel"] == "torch", "no head dim of flash-attn-4"


def spans_of(sizes: Sequence[int], *, shift: int) -> list[Span]:
    """Spans of unlike sizes, one after the other in a flat state that begins `shift` numbers behind
    a wide address; each weight lies by itself, as a shard does. Every other one decays, every third
    is asked for its largest number."""
    grad_N, exp_avg_N, exp_avg_sq_N = (
        torch.randn(sum(sizes) + shift, device=GPU)[shift:] for _ in range(3)
    )
    exp_avg_sq_N.abs_()
    made, at = [], 0
    for index, size in enumerate(sizes):
        cut = slice(at, at + size)
        weight_N = torch.randn(size + shift, device=GPU)[shift:]
        amax = Amax() if index % 3 == 0 else None
        made.append(
            Span(
                first=at,
                weight_N=weight_N,
                grad_N=grad_N[cut],
                exp_avg_N=exp_avg_N[cut],
                exp_avg_sq_N=exp_avg_sq_N[cut],
                decays=index % 2 == 0,
                amax=amax,
            )
        )
        at += size
    return made


@pytest.mark.parametrize("shift", [0, 1], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    "sizes", [(16,), (4096, 4), (8192, 0, 40, 4 * 4097, 1 << 20, 12), (4095, 4097, 1, 3, 70001)]
)
def test_adamw_updates_any_number_of_places_at_once(sizes: tuple[int, ...], shift: int) -> None:
    spans = spans_of(sizes, shift=shift)
    names = ("weight_N", "grad_N", "exp_avg_N", "exp_avg_sq_N")
    theirs = [
        replace(span, **{name: getattr(span, name).clone() for name in names}) for span in spans
    ]
    for count in (1, 2):
        numbers = Numbers(
            learning_rate=1e-2,
            grad_scale=0.5,
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.1,
            num_updates=count,
        )
        update_spans(spans, numbers)
        for span, other in zip(spans, theirs, strict=True):
            update_block(other, numbers)
            assert not span.grad_N.any()
            for name in names:
                torch.testing.assert_close(
                    getattr(span, name), getattr(other, name), rtol=2e-6, atol=2e-6
                )
            if span.amax is not None:
                assert torch.equal(span.amax.found, largest(span.weight_N)), (
                    "of the weights as they were written"
                )
            for one in (span, other):
                one.grad_N.copy_(other.weight_N)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.4, 0.99)])
def test_adamw_is_torchs(betas: tuple[float, float]) -> None:
    shapes = {"a": (300, 7), "b": (5,), "c.bias": (2, 3), "d": (4097, 33)}
    mine = {
        name: torch.nn.Parameter(torch.randn(shape, device=GPU)) for name, shape in shapes.items()
    }
    theirs = {name: torch.nn.Parameter(part.detach().clone()) for name, part in mine.items()}
    optimizer = FlatOptimizer(
        mine, betas=betas, eps=1e-8, weight_decay=0.1, mesh=make_mesh(alone(GPU), 0)
    )
    groups = [
        {"params": [part], "weight_decay": 0.1 if takes_decay(name, part) else 0.0}
        for name, part in theirs.items()
    ]
    oracle = torch.optim.AdamW(groups, lr=1e-2, betas=betas, eps=1e-8)
    for number in range(1, 6):
        for name, part in theirs.items():
            part.grad = torch.randn_like(part) / number
            optimizer.grads()[name].copy_(part.grad * 2)
        optimizer.update(learning_rate=1e-2, grad_scale=0.5)
        oracle.step()
        assert not optimizer.grad_N.any()
    for name, part in theirs.items():
        torch.testing.assert_close(mine[name], part, rtol=2e-6, atol=2e-6)
        state = oracle.state[part]
        start, shape = optimizer.starts[name], optimizer.shapes[name]
        stop = start + part.numel()
        torch.testing.assert_close(
            optimizer.moments["exp_avg_sq"][start:stop].view(shape),
            state["exp_avg_sq"],
            rtol=2e-6,
            atol=1e-9,
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "count"), [(2, 1 << 20), (8, 100_003), (3, 7), (17, 4096)])
def test_rows_are_added_up_in_float32_in_their_order(dtype, rows, count):
    parts_RN = torch.randn(rows, count, device=GPU).to(dtype)
    out_N, expected_N = torch.full((count + 1,), 7.0, device=GPU), torch.empty(count)
    add_up(parts_RN, out_N[:count])
    add_up(parts_RN.cpu(), expected_N)
    assert torch.equal(out_N[:count].cpu(), expected_N) and out_N[count] == 7.0


@pytest.mark.parametrize("mode", get_args(Checkpointing))
def test_a_device_too_old_for_the_kernels_trains_in_float16_without_them(mode, monkeypatch):
    """As a T4 does, but for its speed: what is called is torch's own, which has no such bound."""
    lengths, decoder = [130, 1, 257, 64], small_decoder("qwen3", GPU, torch.float16)
    wide = small_decoder("qwen3", torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(wide.parameters(), decoder.parameters(), strict=True):
            mine.copy_(theirs)
    expected = model_gradients(wide, lengths)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a kernel that such a device does not run")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(dispatch, "load_triton", refuse)
    monkeypatch.setattr(attention, "flash_attention", refuse)
    dispatch.why_too_old.cache_clear()
    try:
        found = model_gradients(decoder, lengths, mode)
        assert (
            "7.5" in (dispatch.why_torch(GPU, torch.float16) or "")
            and dispatch.load_adamw(GPU) is None
        )
        assert "7.5" in flash.choice(GPU, torch.float16, 4, 64)["reason"]
    finally:
        dispatch.why_too_old.cache_clear()
    for got, want in zip(found, expected, strict=True):
        assert gap(got, want) < 3e-2
