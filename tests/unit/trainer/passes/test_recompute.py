"""Recomputed passes: values are those of the forward pass that was given, gradients those of the
plain decoder at its activations. The forward pass here is an oracle in plain torch; on a GPU it is
the engine's kernels."""

# T tokens, N targets, E hidden size, V vocabulary

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import reference_kernels
from gyre.core.records import TrainSequence
from gyre.kernels.rope import rope_tables
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.trainer.batching.microbatch import MicroBatch, build_chunk
from gyre.trainer.passes.forward import chunk_logprobs
from gyre.trainer.passes.recompute import recomputed_logprobs
from trainer_cases import (
    CPU,
    SPEC,
    assert_bits_equal,
    make_batch,
    make_decoder,
    make_trainer,
    weights_of,
    with_column,
)

FAMILIES = {
    "qwen3": SPEC,
    "llama": replace(SPEC, family="llama", tied=False, qk_norm=False),
    "qwen2": replace(SPEC, family="qwen2", qk_norm=False, qkv_bias=True),
}


class Oracle:
    """A ChunkForward from the reference kernels; `shift_TE` is added after each layer, so that it
    is another's."""

    def __init__(self, decoder: Decoder, chunk: MicroBatch, shift: float = 0.0) -> None:
        self.decoder, self.chunk = decoder, chunk
        generator = torch.Generator().manual_seed(0)
        shape = (len(chunk.tokens_T), decoder.spec.hidden_size)
        self.shift_TE = shift * torch.randn(shape, generator=generator, dtype=torch.float64).to(
            decoder.dtype
        )

    def layer(self, index: int, x_TE: torch.Tensor) -> torch.Tensor:
        spec, layer, chunk = self.decoder.spec, self.decoder.layers[index], self.chunk
        qkv_TR = (
            reference_kernels.rms_norm(x_TE, layer.attn_norm.weight, spec.norm_eps)
            @ layer.qkv.weight.t()
        )
        qkv_TR = qkv_TR if layer.qkv.bias is None else qkv_TR + layer.qkv.bias
        heads_TJD = qkv_TR.view(len(x_TE), -1, spec.head_dim)
        q_THD, k_TKD, v_TKD = heads_TJD.split(
            [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1
        )
        if spec.qk_norm:
            q_THD = reference_kernels.rms_norm(q_THD, layer.q_norm.weight, spec.norm_eps)
            k_TKD = reference_kernels.rms_norm(k_TKD, layer.k_norm.weight, spec.norm_eps)
        cos_T1D, sin_T1D = rope_tables(
            chunk.layout.positions_T, self.decoder.inv_freq_F, x_TE.dtype
        )
        half = spec.head_dim // 2
        cos_TF, sin_TF = cos_T1D[:, 0, :half], sin_T1D[:, 0, half:]
        q_THD, k_TKD = (reference_kernels.rope(heads, cos_TF, sin_TF) for heads in (q_THD, k_TKD))
        attended_THD = reference_kernels.varlen_attention(q_THD, k_TKD, v_TKD, chunk.layout.lengths)
        x_TE = x_TE + attended_THD.flatten(1) @ layer.out.weight.t()
        normed_TE = reference_kernels.rms_norm(x_TE, layer.mlp_norm.weight, spec.norm_eps)
        return (
            x_TE
            + reference_kernels.silu_mul(normed_TE @ layer.gate_up.weight.t())
            @ layer.down.weight.t()
            + self.shift_TE
        )

    def final_norm(self, x_NE: torch.Tensor) -> torch.Tensor:
        return reference_kernels.rms_norm(
            x_NE, self.decoder.final_norm.weight, self.decoder.spec.norm_eps
        )

    def logprobs(
        self, hidden_NE: torch.Tensor, targets_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        temperature_N = self.chunk.temperature_N.to(hidden_NE.dtype)
        head_VE = self.decoder.head_weight
        total_N = (hidden_NE @ head_VE.t() / temperature_N[:, None]).logsumexp(-1)
        logprobs_N, entropy_N = reference_kernels.token_logprobs(
            hidden_NE, head_VE, targets_N, temperature_N
        )
        return logprobs_N, total_N, entropy_N

    def all_by_autograd(self) -> torch.Tensor:
        """The same pass, differentiated by autograd."""
        x_TE = self.decoder.embed.weight[self.chunk.tokens_T]
        for index in range(self.decoder.spec.num_layers):
            x_TE = self.layer(index, x_TE)
        return self.logprobs(self.final_norm(x_TE[self.chunk.rows_N]), self.chunk.targets_N)[0]


def by_oracle(decoder: Decoder, chunk: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return recomputed_logprobs(decoder, chunk, Oracle(decoder, chunk))


def off_by_one(decoder: Decoder, chunk: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_N, entropy_N = by_oracle(decoder, chunk)
    return logprobs_N - 1.0, entropy_N


def make_case(family: str) -> tuple[Decoder, MicroBatch]:
    """A float64 model and a chunk with temperatures of its own."""
    decoder = Decoder(FAMILIES[family], device=CPU, dtype=torch.float64)
    init_weights(decoder, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(4.0).add_(
                0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    sequences: list[TrainSequence] = [
        replace(sequence, temperature=0.5 + index / 5)
        for index, sequence in enumerate(make_batch(5).sequences)
    ]
    return decoder, build_chunk(
        sequences, range(5), pairwise=False, vocab_size=decoder.spec.vocab_size, device=CPU
    )


def gradients(decoder: Decoder, logprobs_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a random sum of the log-probs, by parameter."""
    weight_N = torch.from_numpy(np.random.default_rng(3).normal(size=len(logprobs_N)))
    names, parameters = zip(*decoder.named_parameters(), strict=True)
    return dict(
        zip(names, torch.autograd.grad((logprobs_N * weight_N).sum(), parameters), strict=True)
    )


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, grad in theirs.items():
        assert grad.abs().max() > 0, name
        assert (ours[name] - grad).abs().max() < 1e-9 * grad.abs().max(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_plain_decoders(family: str) -> None:
    decoder, chunk = make_case(family)
    logprobs_N, entropy_N = by_oracle(decoder, chunk)
    plain_N, plain_entropy_N = chunk_logprobs(decoder, chunk)
    assert torch.allclose(logprobs_N, plain_N, atol=1e-9) and torch.allclose(
        entropy_N, plain_entropy_N, atol=1e-9
    )
    assert_close(gradients(decoder, logprobs_N), gradients(decoder, plain_N))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_at_the_activations_of_the_forward_pass_that_was_given(family: str) -> None:
    """A forward pass that differs by constants: its own autograd is the answer, and the plain
    decoder's is another."""
    decoder, chunk = make_case(family)
    oracle = Oracle(decoder, chunk, shift=0.5)
    logprobs_N, _ = recomputed_logprobs(decoder, chunk, oracle)
    own_N = oracle.all_by_autograd()
    assert torch.equal(logprobs_N, own_N)
    ours, own = gradients(decoder, logprobs_N), gradients(decoder, own_N)
    assert_close(ours, own)
    elsewhere = gradients(decoder, chunk_logprobs(decoder, chunk)[0])
    assert (elsewhere["embed.weight"] - own["embed.weight"]).abs().max() > 1e-3 * own[
        "embed.weight"
    ].abs().max()


def test_a_step_is_the_ordinary_one() -> None:
    """Gradient of an update in the optimizer's buffers, and the weights after steps."""
    plain, ours = make_trainer("grpo"), make_trainer("grpo", logprobs=by_oracle)
    for trainer in (plain, ours):
        trainer.forward_backward(trainer.plan(make_batch()).updates[0])
    for name, grad in plain.models.actor.optimizer.grads().items():
        got = ours.models.actor.optimizer.grads()[name]
        assert (got - grad).abs().max() < 1e-4 * grad.abs().max(), name
    reports = [
        (plain.step_now(make_batch(step=step)), ours.step_now(make_batch(step=step)))
        for step in range(3)
    ]
    for expected, got in reports:
        assert got.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-3)


def test_actor_and_reference_go_through_it_in_every_pass() -> None:
    plain, ours = make_trainer("grpo"), make_trainer("grpo", logprobs=off_by_one)
    batch = make_batch()
    for which in ("policy", "reference"):
        expected, got = (
            plain.evaluate_now(batch, which).per_token,
            ours.evaluate_now(batch, which).per_token,
        )
        for sequence, theirs, mine in zip(batch.sequences, expected, got, strict=True):
            mask = sequence.columns["loss_mask"]
            np.testing.assert_allclose(mine[mask], theirs[mask] - 1.0, atol=1e-4)
    expected, got = plain.step_now(batch).metrics, ours.step_now(batch).metrics
    assert expected["kl_reference"] == got["kl_reference"] == 0.0
    assert got["logprob_gap_max"] != pytest.approx(expected["logprob_gap_max"], rel=0.01)


def test_passes_repeat_to_the_bit() -> None:
    batch = make_batch()
    first, second = (
        make_trainer("grpo", logprobs=by_oracle),
        make_trainer("grpo", logprobs=by_oracle),
    )
    old = first.evaluate_now(batch, "policy")
    for trainer in (first, second):
        trainer.step_now(with_column(batch, "old_logprobs", old))
    assert_bits_equal(weights_of(first), weights_of(second))
    assert not torch.equal(weights_of(first)["embed.weight"], make_decoder().embed.weight)
