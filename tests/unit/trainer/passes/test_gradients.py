"""Packed gradients: equal to one sequence at a time, whatever the chunks, for every objective."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.core.errors import InputError
from gyre.core.records import Support, TrainBatch
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.objectives.config import GrpoConfig, SftConfig
from gyre.trainer.batching.epoch_plan import BatchPlanner
from gyre.trainer.config import TrainerConfig
from trainer_cases import CPU, OBJECTIVES, SPEC, make_batch, make_decoder, make_trainer, with_column


def prepared() -> TrainBatch:
    """A batch with reference log-probs from a model that is not the actor."""
    other = make_trainer("dpo", decoder=make_decoder(seed=9))
    return with_column(
        make_batch(8), "reference_logprobs", other.evaluate_now(make_batch(8), "policy")
    )


def gradients(
    kind: str, batch: TrainBatch, tokens_per_chunk: int, objective=None
) -> dict[str, np.ndarray]:
    """Collect the gradients of one update over the whole batch."""
    trainer = make_trainer(
        kind, objective=objective or OBJECTIVES[kind], tokens_per_chunk=tokens_per_chunk
    )
    for learner in trainer.models.learners:
        if learner.head is not None:
            torch.nn.init.normal_(learner.head.weight, generator=torch.Generator().manual_seed(5))
    (update,) = trainer.plan(batch).updates
    trainer.forward_backward(update)
    return {
        f"{learner.name}.{name}": grad.numpy().copy()
        for learner in trainer.models.learners
        for name, grad in learner.optimizer.grads().items()
    }


def assert_close(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys() and any(grad.any() for grad in b.values())
    for name in a:
        scale = np.abs(b[name]).max()
        assert scale > 0 or not np.abs(a[name]).max(), name
        np.testing.assert_allclose(a[name], b[name], atol=3e-5 * scale, rtol=0, err_msg=name)


@pytest.mark.parametrize("kind", OBJECTIVES)
@settings(max_examples=5, deadline=None)
@given(tokens_per_chunk=st.integers(16, 300))
def test_any_split_into_chunks_gives_the_same_gradient(kind, tokens_per_chunk):
    batch = prepared()
    assert_close(gradients(kind, batch, tokens_per_chunk), gradients(kind, batch, 10_000))


@pytest.mark.parametrize("variant", ["dapo", "dr_grpo", "gspo", "cispo", "reinforce_pp"])
def test_variants_do_not_see_chunks_either(variant):
    batch = prepared()
    objective = GrpoConfig(variant=variant, fixed_length_tokens=30)
    assert_close(
        gradients("grpo", batch, 40, objective), gradients("grpo", batch, 10_000, objective)
    )


def logits_alone(decoder, tokens: np.ndarray) -> torch.Tensor:
    """Logits of one sequence, by itself."""
    tokens_T = torch.from_numpy(tokens.astype(np.int64))
    layout = PackedLayout.of([len(tokens_T)], CPU)
    hidden_TE = decoder.hidden(
        tokens_T, layout.positions_T, lambda _, q, k, v: varlen_attention(q, k, v, layout)
    )
    return decoder.logits(hidden_TE)


def padded_loss(decoder, batch: TrainBatch, aggregation: str) -> torch.Tensor:
    """Cross-entropy the slow way: one sequence at a time through the model, padded with junk at its
    end."""
    losses, counts = [], []
    for sequence in batch.sequences:
        padded = np.concatenate([sequence.tokens, np.full(5, 1)])
        logits_TV = logits_alone(decoder, padded).double() / sequence.temperature
        at = torch.from_numpy(np.flatnonzero(sequence.columns["loss_mask"]))
        losses.append(
            F.cross_entropy(logits_TV[at - 1], torch.from_numpy(padded)[at].long(), reduction="sum")
        )
        counts.append(len(at))
    if aggregation == "token":
        return torch.stack(losses).sum() / sum(counts)
    return sum(loss / count for loss, count in zip(losses, counts, strict=True)) / len(counts)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_packed_equals_one_padded_sequence_at_a_time(aggregation):
    batch = make_batch(8, seed=3)
    batch = replace(batch, sequences=tuple(replace(s, temperature=0.7) for s in batch.sequences))
    decoder = make_decoder()
    loss = padded_loss(decoder, batch, aggregation)
    loss.backward()
    expected = loss.item()
    slow = {f"actor.{name}": p.grad.numpy() for name, p in decoder.named_parameters()}
    objective = SftConfig(aggregation=aggregation)
    assert_close(gradients("sft", batch, 50, objective), slow)
    report = make_trainer("sft", objective=objective).step_now(batch)
    assert report.metrics["loss"] == pytest.approx(expected, rel=1e-5)


def test_truncated_support_narrows_the_softmax():
    """A sequence with support next to one without, against a masked softmax by hand."""
    rng = np.random.default_rng(0)
    sequences = list(make_batch(2, seed=1).sequences)
    at = np.flatnonzero(sequences[0].columns["loss_mask"])
    ids = [
        np.unique(np.append(rng.choice(SPEC.vocab_size, 4, replace=False), target))
        for target in sequences[0].tokens[at]
    ]
    offsets = np.cumsum([0] + [len(row) for row in ids])
    sequences[0] = replace(
        sequences[0], support=Support(offsets=offsets, ids=np.concatenate(ids).astype(np.int32))
    )
    batch = TrainBatch(sequences=tuple(sequences), step=0)
    trainer = make_trainer("sft")
    got = trainer.evaluate_now(batch, "policy").per_token
    bare = trainer.evaluate_now(
        TrainBatch(sequences=make_batch(2, seed=1).sequences, step=0), "policy"
    ).per_token
    with torch.no_grad():
        logits_TV = logits_alone(make_decoder(), sequences[0].tokens)
    for row, t in zip(ids, at, strict=True):
        logits = logits_TV[t - 1, torch.from_numpy(row)]
        expected = logits.log_softmax(-1)[int(np.flatnonzero(row == sequences[0].tokens[t])[0])]
        assert got[0][t] == pytest.approx(float(expected), abs=2e-5)
    np.testing.assert_allclose(got[1], bare[1], atol=2e-5)


def test_a_sequence_without_targets_changes_nothing():
    batch = make_batch(8)
    mute = replace(
        batch.sequences[0],
        columns={
            **batch.sequences[0].columns,
            "loss_mask": np.zeros_like(batch.sequences[0].columns["loss_mask"]),
        },
    )
    longer = replace(batch, sequences=(mute, *batch.sequences))
    assert_close(gradients("sft", longer, 64), gradients("sft", batch, 64))


def test_denominators_of_updates_cover_the_batch_once():
    batch = make_batch(10)
    config = TrainerConfig(sequences_per_update=3, tokens_per_chunk=40)
    planner = BatchPlanner(
        objective=SftConfig(),
        config=config,
        seed=1,
        vocab_size=SPEC.vocab_size,
        device=CPU,
        emit=lambda *_, **__: None,
    )
    plan = planner.plan(batch.sequences, 0, 0)
    assert len(plan.updates) == 4
    assert sum(update.denominator for update in plan.updates) == plan.num_targets
    assert sorted(m for chunk in plan.chunks for m in chunk.members) == list(range(10))


def test_missing_columns_and_greedy_rollouts_are_refused():
    batch = make_batch(2)
    bare = tuple(replace(s, columns={"loss_mask": s.columns["loss_mask"]}) for s in batch.sequences)
    with pytest.raises(InputError, match="also needs"):
        make_trainer("grpo").step_now(replace(batch, sequences=bare))
    greedy = replace(batch, sequences=tuple(replace(s, temperature=0.0) for s in batch.sequences))
    with pytest.raises(InputError, match="temperature 0"):
        make_trainer("grpo").step_now(greedy)


def test_passes_and_step_of_a_batch_share_one_layout():
    """Until anything that the layout depends on differs."""
    trainer, batch = make_trainer("grpo"), make_batch(6)
    plan = trainer.plan(batch)
    layouts = [id(chunk.layout) for chunk in plan.chunks]
    scored = with_column(batch, "reference_logprobs", trainer.evaluate_now(batch, "reference"))
    assert [id(chunk.layout) for chunk in trainer.plan(scored).chunks] == layouts
    hot = tuple(replace(sequence, temperature=2.0) for sequence in batch.sequences)
    for other in (hot, batch.sequences[:5], make_batch(6, seed=1).sequences):
        again = trainer.plan(replace(batch, sequences=other))
        assert not any(id(chunk.layout) in layouts for chunk in again.chunks)
    del plan  # whose layouts had these identities until here
