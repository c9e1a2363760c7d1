"""8-bit products and FP16 with loss scaling on a GPU: the Triton kernels against torch's operations
on the CPU to the bit, largest numbers that kernels find against those that are read, gradients of a
model against BF16 within the formats' bounds, whole trainers. Ranks: test_zero_gpu.py.
"""

# N rows, K features, T tokens, I inputs, O outputs

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gyre.core.errors import ConfigError
from gyre.core.records import Checkpointing, Projection
from gyre.kernels import float8
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.float8 import CAPABILITY, E4M3, E5M2, quantize, transposed
from gyre.kernels.linear import OutputGradient, linear
from gyre.kernels.logprobs import token_logprobs
from gyre.models.decoder import NOTHING, Decoder
from gyre.models.init import init_weights
from gyre.models.layers import blocks
from gyre.trainer.parallelize.float8_gather import PROJECTIONS
from trainer_cases import SPEC, make_batch, make_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
ABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY
needs_float8 = pytest.mark.skipif(not ABLE, reason="the device does not multiply 8-bit floats")


def bits(x: Tensor) -> Tensor:
    return x.cpu().view(torch.int8)


@needs_float8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (64, 64), (1000, 208), (8192, 4096)])
def test_operands_are_those_of_torch_s_operations(shape, dtype):
    x_NK = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 3.0).to(dtype)
    for kind in (E4M3, E5M2):
        found, want = (
            quantize(x.contiguous(), kind, rows=True, columns=True) for x in (x_NK.to(GPU), x_NK)
        )
        assert found.amax.item() == want.amax.item() and found.inverse.item() == want.inverse.item()
        assert torch.equal(bits(found.rows_NK), bits(want.rows_NK))
        assert torch.equal(bits(found.columns_KM), bits(want.columns_KM))
        again = quantize(x_NK.to(GPU), kind, columns=True, amax=found.amax)
        assert again.rows_NK is None and torch.equal(bits(again.columns_KM), bits(want.columns_KM))
    if shape[0] % 16 == 0:
        assert torch.equal(bits(transposed(found.rows_NK)), bits(want.rows_NK.t().contiguous()))


@needs_float8
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad):
    x_TI = torch.ones(16, 32, device=GPU, dtype=torch.bfloat16)
    x_TI[3, 4] = bad
    y_TO, _ = linear(x_TI, torch.ones(16, 32, device=GPU, dtype=torch.bfloat16), float8=True)
    assert not y_TO[3].isfinite().any()


@needs_float8
@pytest.mark.parametrize("tokens", [1, 16, 37, 512])
def test_products_are_those_of_the_same_8_bit_numbers(tokens):
    """Against the CPU, which adds up in float32; the forward product adds up in fewer bits, as
    torchao's does."""
    generator = torch.Generator().manual_seed(tokens)
    x_TI, weight_OI, grad_TO = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((tokens, 256), (128, 256), (tokens, 128))
    )
    found = []
    for device in (GPU, CPU):
        y_TO, amaxes = linear(x_TI.to(device), weight_OI.to(device), float8=True)
        through = OutputGradient(grad_TO.to(device), amaxes)
        found.append(
            (y_TO, through.of_input(weight_OI.to(device)), through.of_weight(x_TI.to(device)))
        )
    for got, want in zip(*found, strict=True):
        assert float((got.cpu().float() - want.float()).norm() / want.float().norm()) < 5e-3


def gradients(
    decoder: Decoder, float8: frozenset[Projection], checkpointing: str = "none"
) -> Tensor:
    """Of the sum of log-probs of random tokens, flat."""
    lengths = [120, 1, 77, 131]
    layout = PackedLayout.of(lengths, GPU)
    tokens_T = torch.randint(
        0, decoder.spec.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(5)
    ).to(GPU)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, layout)

    hidden = decoder.hidden(
        tokens_T, layout.positions_T, attend, checkpointing=checkpointing, float8=float8
    )  # pyright: ignore
    logprobs = token_logprobs(
        hidden, decoder.head_weight, tokens_T, torch.ones(len(tokens_T), device=GPU)
    )[0]
    return torch.cat(
        [
            grad.flatten().double()
            for grad in torch.autograd.grad(logprobs.sum(), list(decoder.parameters()))
        ]
    )


@needs_float8
@pytest.mark.parametrize("mode", get_args(Checkpointing))
def test_largest_numbers_that_kernels_find_are_those_that_are_read(mode, monkeypatch):
    """A model's gradients to the bit, around an attention that adds up in one order; and of each
    layer only what others than our kernels make is read: weights, attended values and the gradient
    that comes in."""
    spec = replace(
        SPEC, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, mlp_size=144
    )
    decoder = Decoder(spec, device=GPU, dtype=torch.bfloat16)
    init_weights(decoder, 3)
    tokens_T = torch.arange(37, device=GPU) % spec.vocab_size
    upstream_TE = (
        torch.randn(37, 128, generator=torch.Generator().manual_seed(0)).bfloat16().to(GPU)
    )
    read, reads = [], float8.largest

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q + (k + v).unsqueeze(2).expand(-1, -1, q.shape[1] // k.shape[1], -1).flatten(1, 2)

    def grads() -> list[Tensor]:
        read.clear()
        hidden_TE = decoder.hidden(
            tokens_T, tokens_T, attend, checkpointing=mode, float8=frozenset(PROJECTIONS)
        )
        return list(torch.autograd.grad(hidden_TE, list(decoder.layers.parameters()), upstream_TE))

    monkeypatch.setattr(float8, "largest", lambda x: (read.append(x.shape), reads(x))[1])
    found = grads()
    if mode == "none":
        assert len(read) == 3 * (4 + 1 + 1), read
    monkeypatch.setattr(blocks, "Amax", lambda *found: None)
    for got, want in zip(found, grads(), strict=True):
        assert torch.equal(bits(got), bits(want))
    if mode == "none":
        assert len(read) == 3 * (4 + 4 + 4), read


@needs_float8
def test_a_model_s_gradient_is_near_that_of_bfloat16():
    """E5M2 rounds a gradient by an eighth at most and E4M3 an input by a sixteenth, in each of a
    layer's four products: over four layers a CPU finds 0.20 of the gradient's norm between the
    two."""
    spec = replace(
        SPEC,
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        mlp_size=384,
        vocab_size=512,
    )
    decoder = Decoder(spec, device=GPU, dtype=torch.bfloat16)
    init_weights(decoder, 3)
    wide, narrow = gradients(decoder, NOTHING), gradients(decoder, frozenset(PROJECTIONS))
    assert 0.01 < float((narrow - wide).norm() / wide.norm()) < 0.35
    for mode in ("selective", "full"):
        again = gradients(decoder, frozenset(PROJECTIONS), mode)
        assert float((again - narrow).norm() / narrow.norm()) < 0.02, mode


@pytest.mark.parametrize(
    "settings",
    [{"dtype": torch.float16}, pytest.param({"matmul": "fp8"}, marks=needs_float8)],
    ids=str,
)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_model_learns_as_far_as_in_bfloat16(settings, mode):
    losses = {}
    for name, how in (("wide", {}), ("narrow", settings)):
        decoder = Decoder(SPEC, device=GPU, dtype=how.get("dtype", torch.bfloat16))
        init_weights(decoder, 0)
        rest = {key: value for key, value in how.items() if key != "dtype"}
        trainer = make_trainer(
            "sft", decoder=decoder, learning_rate=3e-3, checkpointing=mode, **rest
        )
        losses[name] = [trainer.step_now(make_batch(6)).metrics["loss"] for _ in range(30)]
    assert losses["narrow"][0] == pytest.approx(losses["wide"][0], rel=0.02)
    assert losses["narrow"][-1] < 0.6 * losses["narrow"][0]
    assert losses["narrow"][-1] == pytest.approx(losses["wide"][-1], rel=0.25)


def test_an_overflow_in_float16_halves_the_scale():
    decoder = Decoder(SPEC, device=GPU, dtype=torch.float16)
    init_weights(decoder, 0)
    trainer, batch = make_trainer("grpo", decoder=decoder), make_batch()
    batch.sequences[0].columns["advantages"][-1] = 1e9
    report = trainer.step_now(batch)
    assert (report.num_updates, report.metrics["loss_scale"]) == (0, 2.0**15)
    assert trainer.step_now(make_batch()).num_updates == 1


@pytest.mark.skipif(ABLE, reason="the device multiplies 8-bit floats")
def test_a_device_that_cannot_refuses():
    decoder = Decoder(SPEC, device=GPU, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="compute capability"):
        make_trainer("sft", decoder=decoder, matmul="fp8")
