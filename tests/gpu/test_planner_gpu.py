"""The plan's formulas on a real CUDA device: what a forward pass keeps, in each mode of
checkpointing; the tensor ranks that a served model needs."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.logprobs import token_logprobs
from gyre.launch.serving.plan import plan_serve
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import hub_config_from_spec, spec_from_shape
from gyre.planner.hardware import saving_on_cuda
from gyre.planner.memory_model.activations import saved_bytes
from gyre.planner.model_zoo import find_shape, model_numbers
from gyre.runconfig.run_config import RunConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_pass_keeps_what_the_formula_says(mode: str, family: str) -> None:
    device, lengths, targets = torch.device("cuda", 0), [2048, 4096, 2048], 6000
    shape = ShapeConfig(
        family=family,  # pyright: ignore[reportArgumentType]
        hidden_size=1024,
        num_layers=6,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        mlp_size=3072,
        context_tokens=4096,
    )
    spec = spec_from_shape(shape, vocab_size=32_000, bos_id=None, eos_ids=(1,))
    decoder = Decoder(spec, device=device, dtype=torch.bfloat16)
    init_weights(decoder, 0)
    layout = PackedLayout.of(lengths, device)
    temperature_N = torch.ones(targets, device=device)

    def run() -> torch.Tensor:
        tokens_T = torch.arange(sum(lengths), device=device) % spec.vocab_size
        rows_N = torch.arange(targets, device=device)
        hidden_NE = decoder.hidden(
            tokens_T,
            layout.positions_T,
            lambda _, q, k, v: varlen_attention(q, k, v, layout),
            rows_N,
            checkpointing=mode,  # pyright: ignore[reportArgumentType]
        )
        given = tokens_T[:targets].clone(), temperature_N
        return token_logprobs(hidden_NE, decoder.head_weight, *given, keep_logits=mode == "none")[
            0
        ].sum()

    run().backward()  # workspaces and kernels are made here
    decoder.zero_grad(set_to_none=True)
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    loss = run()
    gc.collect()
    real = torch.cuda.memory_allocated(device) - before
    assert loss.requires_grad
    size = {"tokens": sum(lengths), "targets": targets, "longest": max(lengths)}
    predicted = saved_bytes(model_numbers(spec), "bfloat16", saving_on_cuda(device), mode, **size)  # pyright: ignore
    assert predicted == pytest.approx(real, rel=0.03)


def test_a_served_model_that_one_gpu_does_not_hold_names_its_tensor_ranks(tmp_path: Path) -> None:
    """Twice the layers of 70B: 260 GiB of weights."""
    spec = replace(find_shape("llama-3-70b"), num_layers=160)
    (tmp_path / "config.json").write_text(json.dumps(hub_config_from_spec(spec)), encoding="utf-8")
    tree = {"model": {"path": str(tmp_path)}, "objective": {"kind": "sft"}}
    config = RunConfig.model_validate(tree)
    found = plan_serve(tmp_path, config, name="large", replicas=1, columns=100)
    assert not found["fits"] and found["fewest_tensor_ranks"] in (2, 4, 8)
    assert f"engine.tensor_ranks = {found['fewest_tensor_ranks']}" in found["text"]
