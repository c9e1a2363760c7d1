"""Predicted bytes against real ones: components against a Decoder and its KV, working memory
against the tensors that autograd saves and the ones that a pass allocates."""

from __future__ import annotations

import pytest
import torch

import planner_cases
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.logprobs import token_logprobs
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.layout import local_spec
from gyre.models.spec import ModelSpec
from gyre.planner.hardware import saving_on_cpu
from gyre.planner.memory_model import components
from gyre.planner.memory_model.engine import (
    GRAPH_BYTES,
    engine_buffer_bytes,
    engine_bytes,
    kv_bytes_per_page,
)
from gyre.planner.memory_model.job import layout_of
from gyre.planner.memory_model.peaks import forward_bytes
from gyre.planner.plan import ComponentPlan, ModelNumbers, PlanInputs, Saving
from planner_cases import activation_bytes, job_of, predict_components, working_bytes

CPU = torch.device("cpu")
SAVING = saving_on_cpu()


def make_spec(**changes) -> ModelSpec:
    return planner_cases.make_spec(**{"context_tokens": 256, **changes})


def numbers(spec: ModelSpec) -> ModelNumbers:
    given = [name for name in ModelNumbers.__dataclass_fields__ if name != "row_ranks"]
    return ModelNumbers(**{name: getattr(spec, name) for name in given})


def make_inputs(spec: ModelSpec, **changes) -> PlanInputs:
    base = {
        "model": numbers(spec),
        "objective": "grpo",
        "online": True,
        "prompts_per_step": 8,
        "completions_per_prompt": 4,
        "max_prompt_tokens": 32,
        "max_completion_tokens": 96,
    }
    return PlanInputs(**{**base, **changes})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_component_bytes_are_those_of_real_tensors(dtype) -> None:
    spec = make_spec()
    decoder = Decoder(spec, device=CPU, dtype=getattr(torch, dtype))
    inputs = make_inputs(
        spec, reference=True, critic=True, shared_weights=False, reward_model=numbers(spec)
    )
    found = {
        c.name: c for c in predict_components(inputs, dtype=dtype, page_tokens=16, kv_pages=10)
    }
    weights = sum(parameter.nbytes for parameter in decoder.parameters())
    count = sum(parameter.numel() for parameter in decoder.parameters())
    for name in ("actor.params", "critic.params", "reference", "reward", "engine.weights"):
        assert found[name].size_bytes == weights
    optimizer = torch.optim.AdamW([torch.zeros(count, requires_grad=True)])
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(count)
    optimizer.step()
    state = next(iter(optimizer.state.values()))
    assert (
        found["actor.optimizer"].size_bytes == state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
    )
    assert found["actor.grads"].size_bytes == 4 * count
    assert ("actor.master" in found) == (dtype == "bfloat16")
    page = torch.zeros(3, 2, 16, 2, 32, dtype=getattr(torch, dtype))
    assert kv_bytes_per_page(numbers(spec), dtype, 16) == page.nbytes
    assert found["engine.kv"].size_bytes == 11 * page.nbytes


def test_shared_weights_have_no_component_of_their_own_and_serve_rollouts() -> None:
    spec = make_spec()
    shared = {
        c.name: c
        for c in predict_components(make_inputs(spec), dtype="float32", page_tokens=16, kv_pages=4)
    }
    assert "engine.weights" not in shared
    assert "rollout" in shared["actor.params"].phases
    apart = make_inputs(spec, shared_weights=False)
    split = {
        c.name: c for c in predict_components(apart, dtype="float32", page_tokens=16, kv_pages=4)
    }
    assert "rollout" not in split["actor.params"].phases
    assert "rollout" in split["engine.weights"].phases


def saved_bytes(spec: ModelSpec, lengths: list[int], dtype: torch.dtype) -> int:
    """Distinct bytes that autograd keeps for one chunk, weights not counted."""
    decoder = Decoder(spec, device=CPU, dtype=dtype)
    init_weights(decoder, 0)
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    layout = PackedLayout.of(lengths, CPU)
    tokens_T = torch.arange(sum(lengths)) % spec.vocab_size
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_TE = decoder.hidden(
            tokens_T, positions_T, lambda _, q, k, v: varlen_attention(q, k, v, layout)
        )
        logprobs_T, _ = token_logprobs(
            hidden_TE, decoder.head_weight, tokens_T, torch.ones(len(tokens_T))
        )
        logprobs_T.sum()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    ("changes", "lengths", "dtype"),
    [
        ({}, [128] * 8, "float32"),
        ({}, [128] * 8, "bfloat16"),
        ({"num_layers": 6, "mlp_size": 128}, [64] * 8, "float32"),
        ({"hidden_size": 64, "num_heads": 8, "num_kv_heads": 8}, [96] * 10, "float32"),
        ({"family": "llama"}, [200, 40, 80, 120, 128, 128], "float32"),
    ],
)
def test_activations_are_estimated_from_above_and_not_wildly(
    changes, lengths: list[int], dtype: str
) -> None:
    spec = make_spec(**changes)
    real = saved_bytes(spec, lengths, getattr(torch, dtype))
    guess = activation_bytes(
        numbers(spec), dtype, sum(lengths), longest=max(lengths), saving=SAVING
    )  # pyright: ignore
    assert real <= guess <= 3 * real, (real, guess)


def test_estimates_grow_with_what_they_depend_on() -> None:
    model = numbers(make_spec())
    small = activation_bytes(model, "float32", 1024, longest=128, saving="torch_cpu")
    assert activation_bytes(model, "float32", 2048, longest=128, saving="torch_cpu") > 1.5 * small
    assert activation_bytes(model, "bfloat16", 1024, longest=128, saving="torch_cpu") < small
    assert activation_bytes(model, "float32", 1024, longest=128, saving="triton") < small
    assert forward_bytes(model, "float32", 1024, longest=128, saving="torch_cpu") < small
    assert engine_bytes(model, "float32", tokens=512, running=64, longest=128) < engine_bytes(
        model, "float32", tokens=512, running=128, longest=128
    )


def test_working_memory_of_phases() -> None:
    spec = make_spec()
    size = {
        "dtype": "float32",
        "saving": "torch_cpu",
        "tokens_per_chunk": 1024,
        "page_tokens": 16,
        "max_running": 32,
    }
    online = working_bytes(make_inputs(spec), **size)
    assert online["handover"] == 0
    assert online["rollout"] == online["evaluate"] > 0
    assert online["train"] > online["score"] > 0
    offline = working_bytes(make_inputs(spec, online=False), **size)
    assert offline["rollout"] == offline["score"] == 0
    larger = numbers(make_spec(mlp_size=2000))
    assert working_bytes(make_inputs(spec, reward_model=larger), **size)["score"] > online["score"]


def test_an_engine_on_a_gpu_keeps_its_buffers_in_every_phase() -> None:
    """Logits alone are rows × vocabulary; in invariant mode the attention's scratch grows with the
    context."""
    spec = make_spec(vocab_size=5000)
    size = {"dtype": "bfloat16", "tokens_per_chunk": 1024, "page_tokens": 64, "max_running": 32}
    here, gpu = (
        working_bytes(make_inputs(spec), saving=saving, **size)
        for saving in ("c_cpu", "torch_cuda")
    )
    kept = engine_buffer_bytes(make_inputs(spec), dtype="bfloat16", page_tokens=64, max_running=32)
    assert gpu["handover"] == kept + GRAPH_BYTES and kept > 2 * 32 * 5000
    assert here["handover"] == 0 and gpu["rollout"] == here["rollout"] + kept + GRAPH_BYTES
    assert (
        working_bytes(make_inputs(spec, online=False), saving="torch_cuda", **size)["handover"] == 0
    )
    invariant = make_inputs(spec, batch_invariant=True)
    assert (
        engine_buffer_bytes(invariant, dtype="bfloat16", page_tokens=64, max_running=32) > 2 * kept
    )


def test_memory_that_an_engines_ranks_write_to_each_other_stays_on_a_gpu() -> None:
    """Two halves of 256 rows for each rank, and a call number for each row of each rank."""
    spec = make_spec(hidden_size=512)

    def peers(saving: Saving, ranks: int) -> list[ComponentPlan]:
        part = numbers(local_spec(spec, ranks)) if ranks > 1 else None
        inputs = make_inputs(spec, shared_weights=False, engine_part=part)
        job = job_of(inputs, "bfloat16", saving=saving, page_tokens=64)
        found = components.predict_components(job, layout_of(inputs, 0), kv_pages=10)
        return [one for one in found if one.name == "engine.peers"]

    assert not peers("triton", 1) and not peers("c_cpu", 2)
    (found,) = peers("triton", 2)
    assert found.size_bytes == 2 * 256 * 4 + 2 * 2 * 256 * 512 * 2
    assert found.tiers == ("device",) and found.leave == (), "graphs have its addresses"


def test_a_score_fills_its_chunk_however_small_an_update_is() -> None:
    """Log-probs are found of a whole step's sequences, which are packed without regard to updates;
    a training chunk has an update's at most."""
    size = {
        "dtype": "float32",
        "saving": "torch_cpu",
        "tokens_per_chunk": 1024,
        "page_tokens": 16,
        "max_running": 32,
    }
    whole, small = (
        working_bytes(make_inputs(make_spec(), sequences_per_update=count), **size)
        for count in (32, 2)
    )
    assert small["score"] == whole["score"] and small["train"] < whole["train"]
