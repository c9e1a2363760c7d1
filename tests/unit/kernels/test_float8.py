"""Products of 8-bit operands against torchao's, whose numbers they are to be, and against
float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gyre.kernels.float8 import (
    E4M3,
    E5M2,
    Amax,
    Float8Weight,
    largest,
    product,
    quantize,
    transposed,
    why_not,
)
from gyre.kernels.linear import OutputGradient, amaxes_of, linear
from gyre.kernels.norm import rms_norm_forward
from gyre.kernels.rope import rope_frequencies, rope_tables, turn
from gyre.models.layers.blocks import attention_inputs, attention_output
from gyre.models.layers.mlp import mlp as dense_mlp

CPU = torch.device("cpu")
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}  # the largest relative error of rounding a normal number


def random(
    *shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def torchao_linear(weight_OI: Tensor, bias_O: Tensor | None = None) -> Any:
    """torchao's own layer with the recipe that it takes by default."""
    float8_linear = pytest.importorskip("torchao.float8.float8_linear")
    config = pytest.importorskip("torchao.float8.config").Float8LinearConfig(pad_inner_dim=True)
    plain = torch.nn.Linear(
        weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, dtype=weight_OI.dtype
    )
    plain.weight = torch.nn.Parameter(weight_OI.clone())
    if bias_O is not None:
        plain.bias = torch.nn.Parameter(bias_O.clone())
    return float8_linear.Float8Linear.from_float(plain, config)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_rounding_loses_half_a_step_at_most(dtype, scale):
    x_NK = random(37, 48, seed=0, scale=scale, dtype=torch.float32)
    found = quantize(x_NK, dtype, rows=True, columns=True)
    assert found.rows_NK is not None and found.columns_KM is not None
    back_NK = found.rows_NK.float() * found.inverse
    smallest = float(found.inverse) * torch.finfo(dtype).smallest_normal
    assert ((back_NK - x_NK).abs() <= HALF_STEP[dtype] * x_NK.abs().clamp(min=smallest)).all()
    assert float(back_NK.abs().max()) == pytest.approx(float(found.amax), rel=1e-6)
    assert found.columns_KM.shape == (48, 48) and not found.columns_KM[:, 37:].float().any()
    assert torch.equal(found.columns_KM[:, :37].t().float(), found.rows_NK.float())


def test_what_is_not_finite_stays_so():
    for bad in (float("nan"), float("inf")):
        x_NK = torch.ones(16, 16)
        x_NK[3, 4] = bad
        found = product(
            quantize(x_NK, E4M3, rows=True),
            quantize(torch.ones(16, 16), E4M3, rows=True),
            over="rows",
            dtype=torch.float32,
        )
        assert not found[3].isfinite().all()
    zeros = quantize(torch.zeros(16, 16), E4M3, rows=True)
    assert product(zeros, zeros, over="rows", dtype=torch.float32).eq(0).all()


@pytest.mark.parametrize("tokens", [1, 16, 37])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_and_its_gradients_are_torchao_s_to_the_bit(tokens, bias, dtype):
    x_TI, weight_OI = (
        random(tokens, 48, seed=1, dtype=dtype),
        random(32, 48, seed=2, scale=0.1, dtype=dtype),
    )
    grad_TO = random(tokens, 32, seed=3, scale=1e-4, dtype=dtype)
    bias_O = random(32, seed=4, dtype=dtype) if bias else None
    theirs, leaf_TI = torchao_linear(weight_OI, bias_O), x_TI.clone().requires_grad_()
    # on processors with AMX torch asks oneDNN, which sums in another order
    with torch.backends.mkldnn.flags(enabled=False):
        expected_TO = theirs(leaf_TI)
        expected_TO.backward(grad_TO)
        y_TO, amaxes = linear(x_TI, weight_OI, bias_O, float8=True)
        through = OutputGradient(grad_TO, amaxes)
        assert torch.equal(y_TO, expected_TO)
        assert torch.equal(through.of_input(weight_OI), leaf_TI.grad)
        assert torch.equal(through.of_weight(x_TI), theirs.weight.grad)


def test_a_weight_that_came_in_8_bits_is_multiplied_like_one_that_did_not():
    x_TI, weight_OI, grad_TO = random(8, 48, seed=1), random(32, 48, seed=2), random(8, 32, seed=3)
    rounded = quantize(weight_OI, E4M3, rows=True)
    assert rounded.rows_NK is not None
    gathered = torch.nn.Parameter(
        Float8Weight(rounded.rows_NK, rounded.amax, rounded.inverse, torch.bfloat16)
    )
    assert gathered.dtype == torch.bfloat16 and gathered.requires_grad
    (found_TO, amaxes), (expected_TO, _) = (
        linear(x_TI, weight, float8=True) for weight in (gathered, weight_OI)
    )
    assert torch.equal(found_TO, expected_TO)
    through = OutputGradient(grad_TO, amaxes)
    assert torch.equal(through.of_input(gathered), through.of_input(weight_OI))
    assert torch.equal(transposed(rounded.rows_NK).float(), rounded.rows_NK.t().float())
    with pytest.raises(AssertionError, match="8 bits"):
        gathered + 1


def test_a_largest_number_that_is_known_is_not_looked_for(monkeypatch):
    x_TI, weight_OI, grad_TO = random(8, 48, seed=1), random(32, 48, seed=2), random(8, 32, seed=3)
    expected_TO, amaxes = linear(x_TI, weight_OI, float8=True)
    expected = OutputGradient(grad_TO, amaxes)
    of_grad, read = largest(grad_TO), []
    for module in ("float8", "linear"):
        monkeypatch.setattr(
            f"gyre.kernels.{module}.largest", lambda x: (read.append(x.shape), largest(x))[1]
        )
    y_TO, again = linear(x_TI, weight_OI, float8=True, amax=Amax(amaxes[0]))
    assert torch.equal(y_TO, expected_TO) and again == amaxes
    assert amaxes_of(x_TI, weight_OI, float8=True, amax=Amax(amaxes[0])) == amaxes
    assert read == [weight_OI.shape] * 2
    through = OutputGradient(grad_TO, amaxes, Amax(of_grad))
    assert torch.equal(through.of_input(weight_OI), expected.of_input(weight_OI))
    assert torch.equal(through.of_weight(x_TI), expected.of_weight(x_TI)) and len(read) == 2
    wrong_TO, _ = linear(x_TI, weight_OI, float8=True, amax=Amax(largest(x_TI) / 3))
    assert not torch.equal(wrong_TO, expected_TO), "it is what the scale is made of"


def test_who_makes_an_operand_without_triton_leaves_its_largest_number_open():
    amax = Amax()
    normed_TE, _ = rms_norm_forward(random(8, 48, seed=1), random(48, seed=2), 1e-6, amax)
    assert amax.found is None
    found = linear(normed_TE, random(32, 48, seed=3), float8=True, amax=amax)[1]
    assert found[0] == largest(normed_TE)


def layer_by(matmul: Any, tokens: int, *, selective: bool = False) -> dict[str, Tensor]:
    """Output and gradients of both halves of a layer; `matmul` is "ours", "torchao" or "wide"."""
    hidden, heads, dim, mlp, dtype = 32, (2, 1), 16, 48, torch.float32
    shapes = {
        "qkv": (64, hidden),
        "out": (hidden, 32),
        "gate_up": (2 * mlp, hidden),
        "down": (hidden, mlp),
    }
    weights = {
        name: random(*shape, seed=seed, scale=0.2, dtype=dtype).requires_grad_()
        for seed, (name, shape) in enumerate(shapes.items())
    }
    norms = [
        (1.0 + random(hidden, seed=seed, scale=0.1, dtype=dtype)).requires_grad_()
        for seed in (10, 11)
    ]
    x_TE = random(tokens, hidden, seed=20, dtype=dtype).requires_grad_()
    tables = rope_tables(torch.arange(tokens), rope_frequencies(dim, 1e4, None, CPU), dtype)
    if matmul == "torchao":
        layers = {name: torchao_linear(weight.detach()) for name, weight in weights.items()}
        normed = [lambda x, w=w: torch.nn.functional.rms_norm(x, [hidden], w, 1e-6) for w in norms]
        qkv_TR = layers["qkv"](normed[0](x_TE))
        q_TA = turn(qkv_TR[:, :32].unflatten(1, (2, dim)), *tables).flatten(1)
        middle_TE = layers["out"](q_TA) + x_TE
        gate_TM, up_TM = layers["gate_up"](normed[1](middle_TE)).chunk(2, dim=1)
        y_TE = layers["down"](torch.nn.functional.silu(gate_TM) * up_TM) + middle_TE
        weights = {name: layer.weight for name, layer in layers.items()}
    else:
        float8 = frozenset(shapes) if matmul == "ours" else frozenset()
        again_TE, q_THD, _, _ = attention_inputs(
            x_TE,
            norms[0],
            weights["qkv"],
            None,
            None,
            None,
            *tables,
            heads=heads,
            eps=1e-6,
            float8=float8,
        )
        amax = Amax() if "out" in float8 else None
        middle_TE = attention_output(
            again_TE, q_THD.flatten(1), weights["out"], float8=float8, grad_amax=amax
        )
        y_TE = dense_mlp(
            middle_TE,
            norms[1],
            weights["gate_up"],
            weights["down"],
            eps=1e-6,
            selective=selective,
            float8=float8,
            grad_amax=amax,
        )
    y_TE.backward(random(tokens, hidden, seed=30, scale=1e-3, dtype=dtype))
    tensors = {"y": y_TE.detach(), "x": x_TE.grad, "norm": norms[0].grad, "mlp_norm": norms[1].grad}
    return tensors | {name: weight.grad for name, weight in weights.items()}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_a_decoder_layer_is_as_one_of_torchao_s_layers():
    """Norms and activation round in other places, which now and then moves a number by a step of
    its format: by norm less than a tenth of what 8 bits cost against wide products."""
    ours, theirs, wide = (layer_by(which, 37) for which in ("ours", "torchao", "wide"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        cost = relative(theirs[name], wide[name])
        assert relative(tensor, theirs[name]) <= max(0.1 * cost, 1e-5), name
        assert 1e-4 < cost < HALF_STEP[E5M2], name
        assert relative(tensor, wide[name]) < HALF_STEP[E5M2], name


def test_what_is_made_again_is_rounded_again_to_the_same_numbers():
    kept, again = layer_by("ours", 21), layer_by("ours", 21, selective=True)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_who_cannot_says_why():
    assert why_not(CPU, torch.bfloat16) is None
    assert "float16" in (why_not(CPU, torch.float16) or "")
