"""The entropy bonus through the whole model: the gradient of an update is that of explicit
softmaxes by autograd, in every way to run the pass, with temperatures and truncation, whatever the
ratio is."""

# T tokens, N targets, V vocabulary

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from gyre.core.records import Checkpointing, TrainBatch
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.models.decoder import Decoder
from gyre.objectives.config import GrpoConfig
from trainer_cases import CPU, SPEC, make_batch, make_decoder, make_trainer, truncated
from unit.trainer.passes.test_recompute import by_oracle

COEF = 0.3
CONFIGS = {  # nothing but the bonus has a gradient: advantages are 0
    "token": GrpoConfig(variant="dapo", entropy_coef=COEF),
    "sequence": GrpoConfig(variant="gspo", entropy_coef=COEF),
}


def entropy_batch(*, narrow: bool) -> TrainBatch:
    """Rollouts of an engine far away, so that ratios and weights are far from 1."""
    rng, sequences = np.random.default_rng(4), []
    for index, sequence in enumerate(make_batch(6, seed=2).sequences):
        mask = sequence.columns["loss_mask"]
        zeros = np.zeros(len(mask), np.float32)
        columns = {
            **sequence.columns,
            "advantages": zeros,
            "old_logprobs": np.where(mask, -2.5, zeros),
        }
        columns = {
            name: column if column.dtype == bool else column.astype(np.float32)
            for name, column in columns.items()
        }
        given = truncated(sequence, rng) if narrow else sequence
        sequences.append(replace(given, columns=columns, temperature=0.6 + index / 5))
    return TrainBatch(sequences=tuple(sequences), step=0)


def explicit_gradients(
    decoder: Decoder, batch: TrainBatch, aggregation: str
) -> dict[str, torch.Tensor]:
    """Of minus COEF times the mean entropy, one sequence at a time, by autograd through softmax."""
    means = []
    for sequence in batch.sequences:
        tokens_T = torch.from_numpy(sequence.tokens).long()
        layout = PackedLayout.of([len(tokens_T)], CPU)
        hidden_TE = decoder.hidden(
            tokens_T,
            layout.positions_T,
            lambda layer, q, k, v, layout=layout: varlen_attention(
                q, k, v, layout, decoder.spec.window_of(layer)
            ),
        )
        rows_N = torch.from_numpy(np.flatnonzero(sequence.columns["loss_mask"])) - 1
        logits_NV = (hidden_TE[rows_N] @ decoder.head_weight.t()) / sequence.temperature
        if sequence.support is not None:
            allowed_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
            counts_N = torch.from_numpy(np.diff(sequence.support.offsets)).long()
            allowed_NV[
                torch.repeat_interleave(torch.arange(len(rows_N)), counts_N),
                sequence.support.ids.astype(int),
            ] = True
            logits_NV = logits_NV.masked_fill(~allowed_NV, -torch.inf)
        probs_NV = logits_NV.softmax(-1)
        means.append(-torch.special.xlogy(probs_NV, probs_NV.clamp(min=1e-300)).sum(-1))
    mean = (
        torch.cat(means).mean()
        if aggregation == "token"
        else torch.stack([m.mean() for m in means]).mean()
    )
    names, parameters = zip(*decoder.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(-COEF * mean, parameters), strict=True))


def update_gradients(
    batch: TrainBatch, level: str, **settings: object
) -> tuple[dict[str, torch.Tensor], float]:
    trainer = make_trainer("grpo", objective=CONFIGS[level], **settings)
    (update,) = trainer.plan(batch).updates
    assert len(update.chunks) > 1
    found = trainer.forward_backward(update)
    mean, count = found.sums["ratio"].tolist()
    return {
        name: grad.clone() for name, grad in trainer.models.actor.optimizer.grads().items()
    }, mean / count


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("narrow", [False, True], ids=["whole", "truncated"])
@pytest.mark.parametrize("level", CONFIGS)
@pytest.mark.parametrize("mode", get_args(Checkpointing))
def test_the_gradient_is_the_exact_one(mode: Checkpointing, level: str, narrow: bool) -> None:
    """float32, by the C kernels where there is no truncation, by torch where there is."""
    batch = entropy_batch(narrow=narrow)
    want = explicit_gradients(make_decoder(torch.float64), batch, CONFIGS[level].aggregation)
    got, ratio = update_gradients(batch, level, checkpointing=mode)
    assert abs(ratio - 1.0) > 0.2, "the sample is off policy, and no ratio may weigh the entropy"
    for name, grad in want.items():
        assert relative(got[name], grad) < 1e-4, name


@pytest.mark.parametrize("level", CONFIGS)
def test_a_forward_pass_that_is_given_has_it_too(level: str) -> None:
    """As in batch-invariant mode, where the engine's kernels compute the forward pass."""
    batch = entropy_batch(narrow=False)
    want = explicit_gradients(make_decoder(torch.float64), batch, CONFIGS[level].aggregation)
    got, _ = update_gradients(batch, level, logprobs=by_oracle)
    for name, grad in want.items():
        assert relative(got[name], grad) < 1e-4, name


def test_a_bfloat16_model_has_it_to_rounding() -> None:
    batch, decoder = entropy_batch(narrow=False), make_decoder(torch.bfloat16)
    wide = Decoder(SPEC, device=CPU, dtype=torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(wide.parameters(), decoder.parameters(), strict=True):
            mine.copy_(theirs)
    want = explicit_gradients(wide, batch, "token")
    got, _ = update_gradients(batch, "token", dtype=torch.bfloat16, decoder=decoder)
    assert (
        relative(
            *(torch.cat([grads[name].flatten().double() for name in want]) for grads in (got, want))
        )
        < 0.1
    )
    for name, grad in want.items():
        assert relative(got[name], grad) < 0.25, name


def test_the_bonus_raises_the_entropy() -> None:
    trainer = make_trainer("grpo", objective=CONFIGS["sequence"], learning_rate=3e-3)
    entropies = [trainer.step_now(entropy_batch(narrow=False)).metrics["entropy"] for _ in range(8)]
    assert entropies == sorted(entropies) and entropies[-1] > 1.1 * entropies[0]
