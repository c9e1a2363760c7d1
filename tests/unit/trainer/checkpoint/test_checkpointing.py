"""Checkpointing: less is kept, and the gradient is the same to the last bit."""

from __future__ import annotations

import weakref
from typing import get_args

import pytest
import torch

from gyre.core.records import Checkpointing
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.logprobs import token_logprobs
from gyre.kernels.recompute import RecomputeLayer
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.planner.plan import Saving
from gyre.trainer.batching.microbatch import MicroBatch
from gyre.trainer.passes.forward import chunk_logprobs
from planner_cases import activation_bytes
from trainer_cases import CPU, OBJECTIVES, make_batch, make_decoder, make_trainer, with_column
from unit.planner.memory_model.test_components import make_spec, numbers

MODES: tuple[Checkpointing, ...] = get_args(Checkpointing)
by_mode = pytest.mark.parametrize("mode", MODES[1:])


def gradients(kind: str, mode: Checkpointing, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The collected gradients of one update."""
    other = make_trainer("dpo", decoder=make_decoder(seed=9))
    batch = with_column(
        make_batch(8), "reference_logprobs", other.evaluate_now(make_batch(8), "policy")
    )
    trainer = make_trainer(kind, dtype=dtype, checkpointing=mode)
    (update,) = trainer.plan(batch).updates
    trainer.forward_backward(update)
    return {
        f"{learner.name}.{name}": grad.clone()
        for learner in trainer.models.learners
        for name, grad in learner.optimizer.grads().items()
    }


@by_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_every_objective_has_the_same_gradient(
    kind: str, dtype: torch.dtype, mode: Checkpointing
) -> None:
    want, got = gradients(kind, "none", dtype), gradients(kind, mode, dtype)
    assert want.keys() == got.keys() and any(grad.any() for grad in want.values())
    for name, grad in want.items():
        assert torch.equal(grad, got[name]), name


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_the_graph_of_a_chunk_is_gone_before_the_next(kind: str) -> None:
    seen = []

    def logprobs(decoder: Decoder, chunk: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        assert not any(graph() for graph in seen), (
            "what a chunk's backward pass wanted is still there"
        )
        found = chunk_logprobs(decoder, chunk)
        seen.append(weakref.ref(found[0]))
        return found

    trainer = make_trainer(kind, tokens_per_chunk=64, logprobs=logprobs)
    (update,) = trainer.plan(make_batch(8)).updates
    seen.clear()  # of the reference's pass
    trainer.forward_backward(update)
    assert len(seen) == len(update.chunks) > 1


def run(
    decoder: Decoder, lengths: list[int], mode: Checkpointing, rows_N: torch.Tensor | None = None
) -> torch.Tensor:
    layout = PackedLayout.of(lengths, CPU)
    tokens_T = torch.arange(sum(lengths)) % decoder.spec.vocab_size

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen_attention(q, k, v, layout, decoder.spec.window_of(layer))

    hidden = decoder.hidden(tokens_T, layout.positions_T, attend, rows_N, checkpointing=mode)
    targets = tokens_T if rows_N is None else tokens_T[rows_N]
    return token_logprobs(hidden, decoder.head_weight, targets, torch.ones(len(targets)))[0].sum()


@by_mode
@pytest.mark.parametrize("changes", [{}, {"family": "llama"}, {"family": "qwen2"}])
def test_float64_gradients_with_rows_and_of_any_family(changes: dict, mode: Checkpointing) -> None:
    decoder = Decoder(make_spec(**changes), device=CPU, dtype=torch.float64)
    init_weights(decoder, 0)
    rows = torch.tensor([3, 7, 30])
    parameters = list(decoder.parameters())
    want = torch.autograd.grad(run(decoder, [20, 1, 13], "none", rows), parameters)
    got = torch.autograd.grad(run(decoder, [20, 1, 13], mode, rows), parameters)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_graph_that_is_kept_serves_twice() -> None:
    decoder = Decoder(make_spec(), device=CPU, dtype=torch.float64)
    init_weights(decoder, 0)
    parameters = list(decoder.parameters())
    for mode in MODES:
        total = run(decoder, [9, 8], mode)
        first = torch.autograd.grad(total, parameters, retain_graph=True)
        second = torch.autograd.grad(total, parameters)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), mode


def kept_bytes(mode: Checkpointing, num_layers: int) -> int:
    """Bytes that live on after a forward pass over 1,024 tokens because autograd keeps them."""
    decoder = Decoder(make_spec(num_layers=num_layers), device=CPU, dtype=torch.float32)
    init_weights(decoder, 0)
    run(decoder, [128] * 8, mode)  # what kernels set up once is there
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        total = run(decoder, [128] * 8, mode)
    assert total.grad_fn is not None
    return sum(event.self_cpu_memory_usage for event in profile.events())


def test_each_mode_keeps_less_of_a_layer_than_the_one_before() -> None:
    none, selective, full = (kept_bytes(mode, 4) - kept_bytes(mode, 3) for mode in MODES)
    assert full == 1024 * 4 * make_spec().hidden_size
    assert full < 0.5 * selective and selective < 0.75 * none, (none, selective, full)


def test_the_prediction_follows_the_mode() -> None:
    for saving in get_args(Saving):
        model = numbers(make_spec(num_layers=24))
        predicted = [
            activation_bytes(
                model, "bfloat16", 4096, longest=128, saving=saving, checkpointing=mode
            )
            for mode in MODES
        ]
        assert predicted[2] < 0.5 * predicted[1] < 0.5 * predicted[0], predicted


def test_a_pass_that_keeps_another_number_of_tensors_when_run_again_is_our_bug() -> None:
    weight = torch.ones(3, requires_grad=True)
    replay = RecomputeLayer(lambda: weight * weight * weight)
    with replay.hooks():
        out = (weight * weight).sum()
    with pytest.raises(AssertionError, match="kept at first"):
        out.backward()
