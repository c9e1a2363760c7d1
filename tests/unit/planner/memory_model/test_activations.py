"""The activation formulas against what autograd really keeps, and sizes of models against
transformers."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gyre.core.records import Checkpointing
from gyre.kernels.attention import PackedLayout
from gyre.models.decoder import Decoder
from gyre.models.spec import hub_config_from_spec
from gyre.planner.hardware import saving_on_cpu
from gyre.planner.memory_model.activations import layer_bytes, saved_bytes
from gyre.planner.model_zoo import SHAPES, model_numbers, model_part
from gyre.trainer.parallelize.float8_gather import PROJECTIONS
from planner_cases import kept_by_rank, kept_bytes, make_spec
from rank_pool import RankPool

CASES = [
    ({}, [128] * 8, "float32", None, 512),
    ({}, [128] * 8, "bfloat16", None, 512),
    ({"num_layers": 6, "mlp_size": 128}, [64] * 8, "float32", None, 512),
    ({"hidden_size": 64, "num_heads": 8, "num_kv_heads": 8}, [96] * 10, "float32", None, 512),
    ({"family": "llama", "tied": False}, [300, 300], "bfloat16", None, 512),
    ({"family": "qwen2"}, [200] * 4, "float32", None, 512),
    ({}, [128] * 8, "float32", 512, 512),
    ({}, [2048], "bfloat16", 512, 32_768),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "lengths", "dtype", "targets", "vocab"), CASES)
def test_formula_is_what_autograd_keeps_on_this_cpu(
    changes, lengths, dtype, targets, vocab
) -> None:
    spec = make_spec(vocab, **changes)
    real = kept_bytes(spec, lengths, getattr(torch, dtype), num_targets=targets)
    tokens = sum(lengths)
    size = {"tokens": tokens, "targets": targets or tokens, "longest": max(lengths)}
    predicted = saved_bytes(model_numbers(spec), dtype, saving_on_cpu(), "none", **size)
    assert predicted == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("targets", [None, 256])
def test_formula_of_a_rank_that_shares_layers(
    pair: RankPool, checkpointing: Checkpointing, targets: int | None
) -> None:
    """It keeps its own rows of the residual stream and of its norms, and the rest for its heads and
    columns."""
    spec, lengths = make_spec(512, tied=False), [128] * 4
    how = {"num_targets": targets, "checkpointing": checkpointing}
    found = pair.run(kept_by_rank, spec, lengths, torch.float32, **how)
    size = {"tokens": 512, "targets": targets or 512, "longest": 128}
    part, saving = model_part(spec, 2), saving_on_cpu()
    predicted = saved_bytes(part, "float32", saving, checkpointing, **size)
    assert found[0] == found[1] and predicted == pytest.approx(found[0], rel=0.02)
    alone = saved_bytes(model_numbers(spec), "float32", saving, checkpointing, **size)
    assert predicted < 0.6 * alone


@pytest.mark.parametrize(
    ("changes", "lengths", "dtype", "targets", "vocab"),
    [case for case in CASES if case[0].get("head_dim", 32) % 32 == 0][:2],
)
def test_formula_by_torch_where_widths_are_no_whole_vectors(
    changes, lengths, dtype, targets, vocab
) -> None:
    spec = make_spec(vocab, **changes, hidden_size=120, mlp_size=392, head_dim=24)
    real = kept_bytes(spec, lengths, getattr(torch, dtype), num_targets=targets)
    tokens = sum(lengths)
    size = {"tokens": tokens, "targets": targets or tokens, "longest": max(lengths)}
    assert saved_bytes(model_numbers(spec), dtype, "torch_cpu", "none", **size) == pytest.approx(
        real, rel=0.02
    )


class Flash(torch.autograd.Function):
    """Keeps what a flash kernel keeps, and computes nothing: the rest of the layer is the real
    one."""

    @staticmethod
    def forward(ctx, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        out_THD, total_HT = torch.zeros_like(q_THD), torch.zeros(q_THD.shape[1], len(q_THD))
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, out_THD, total_HT)
        return out_THD

    @staticmethod
    def backward(ctx, *grads: Tensor):
        raise NotImplementedError


def flash(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: PackedLayout) -> Tensor:
    return Flash.apply(q_THD, k_TKD, v_TKD)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_formula_of_a_gpu_by_torch_around_what_flash_attention_keeps(family) -> None:
    """Norms, heads and products by torch as on a GPU without Triton; tests/gpu has the real
    kernels."""
    spec = make_spec(512, family=family, hidden_size=120, mlp_size=392, head_dim=24, num_heads=6)
    real = kept_bytes(spec, [384, 384], torch.bfloat16, attention=flash)
    size = {"tokens": 768, "targets": 768, "longest": 384}
    assert saved_bytes(
        model_numbers(spec), "bfloat16", "torch_cuda", "none", **size
    ) == pytest.approx(real, rel=0.02)


HAS_MODES = "checkpointing" in inspect.signature(Decoder.hidden).parameters


@pytest.mark.skipif(not HAS_MODES, reason="Decoder.hidden knows no checkpointing yet")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(("targets", "vocab"), [(None, 512), (700, 4096)])
def test_formula_of_each_mode_of_checkpointing(mode, targets, vocab) -> None:
    """At a length whose probabilities attention does not keep: they are no part of a layer's
    plan."""
    spec = make_spec(vocab, num_layers=4)
    real = kept_bytes(spec, [384, 384], torch.float32, num_targets=targets, checkpointing=mode)
    size = {"tokens": 768, "targets": targets or 768, "longest": 384}
    predicted = saved_bytes(model_numbers(spec), "float32", saving_on_cpu(), mode, **size)
    assert predicted == pytest.approx(real, rel=0.02)


def test_8_bit_products_keep_the_same() -> None:
    """But for two numbers per matrix: what is rounded to 8 bits is rounded again."""
    spec = make_spec(512, num_layers=4)
    real = kept_bytes(spec, [384, 384], torch.bfloat16, float8=frozenset(PROJECTIONS))
    size = {"tokens": 768, "targets": 768, "longest": 384}
    assert saved_bytes(
        model_numbers(spec), "bfloat16", saving_on_cpu(), "none", **size
    ) == pytest.approx(real, rel=0.02)


def test_checkpointing_keeps_less() -> None:
    model = model_numbers(SHAPES["llama-3-8b"])
    sizes = [
        layer_bytes(model, "bfloat16", "triton", mode, longest=8192)
        for mode in ("none", "selective", "full")
    ]
    assert sizes[0] > sizes[1] > sizes[2] == 8192, "the survey's 2h, exact"


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(64, 4096),
    layers=st.integers(1, 12),
    saving=st.sampled_from(["triton", "torch_cuda", "torch_cpu", "c_cpu"]),
    mode=st.sampled_from(["none", "selective", "full"]),
)
def test_more_tokens_layers_or_targets_never_keep_less(tokens, layers, saving, mode) -> None:
    def size(**changes: int) -> int:
        asked = {
            "tokens": tokens,
            "targets": tokens // 2,
            "longest": 64,
            "layers": layers,
        } | changes
        model = model_numbers(make_spec(32_768, num_layers=asked.pop("layers")))
        return saved_bytes(model, "bfloat16", saving, mode, **asked)

    assert size(tokens=tokens + 64) > size()
    assert size(layers=layers + 1) > size()
    grown = size(targets=tokens // 2 + 8)
    assert grown > size() or mode == "full" or tokens // 2 <= 4096, (
        "probabilities are kept of few rows only"
    )


PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_parameters_are_those_of_the_hub_and_of_transformers(name: str) -> None:
    spec = SHAPES[name]
    config = transformers.AutoConfig.for_model(**hub_config_from_spec(spec))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())  # a tied head is there once
    assert spec.num_parameters == count == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_parts_of_a_model_add_up(name: str) -> None:
    model = model_numbers(SHAPES[name])
    outside = model.embedding_parameters * (1 if model.tied else 2) + model.hidden_size
    assert outside + model.num_layers * model.layer_parameters == model.num_parameters
    one_layer = sum(
        torch.Size(shape).numel()
        for key, shape in SHAPES[name].parameter_shapes().items()
        if key.startswith("layers.0.")
    )
    assert model.layer_parameters == one_layer
