"""NativeTrainer: first-step identities, learning, resume to the bit, components, what happens to
bad batches."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from gyre.core.errors import ConfigError, DivergedError, InputError, SnapshotError
from gyre.core.records import TrainBatch
from gyre.distributed.process_group import alone
from gyre.memory.pools.storage import StoragePool
from gyre.models.decoder import Decoder, ScalarHead
from gyre.objectives.config import GrpoConfig
from gyre.trainer.batching.microbatch import MicroBatch
from gyre.trainer.checkpoint.saver import Saver
from gyre.trainer.checkpoint.store import SnapshotStore
from gyre.trainer.passes.forward import chunk_logprobs
from gyre.trainer.trainer import NativeTrainer
from saver_cases import load_latest
from trainer_cases import (
    CPU,
    OBJECTIVES,
    SPEC,
    assert_bits_equal,
    make_batch,
    make_decoder,
    make_trainer,
    saved_tensors,
    weights_of,
    whole_tensors,
    with_column,
)

DTYPES = [torch.float32, torch.bfloat16]
# the one with a critic, and one without
QUICK_POLICIES = [
    pytest.param(kind, marks=() if kind in ("grpo", "ppo") else pytest.mark.slow)
    for kind in OBJECTIVES
]
# the one with masters beside the weights
QUICK_BFLOAT16 = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_grpo_first_step_has_ratio_1_and_kl_0(dtype):
    trainer = make_trainer("grpo", dtype=dtype)
    batch = with_column(
        make_batch(), "reference_logprobs", trainer.evaluate_now(make_batch(), "reference")
    )
    batch = with_column(batch, "logprobs", trainer.evaluate_now(batch, "policy"))
    metrics = trainer.step_now(batch).metrics
    assert metrics["ratio"] == 1.0 and metrics["clip_fraction"] == 0.0
    assert metrics["kl_reference"] == 0.0 and metrics["kl_old"] == 0.0
    assert (
        metrics["logprob_gap"] == 0.0
        and metrics["logprob_gap_mult"] == 1.0
        and metrics["logprob_gap_max"] == 0.0
    )
    later = with_column(batch, "logprobs", trainer.evaluate_now(batch, "policy"))
    assert trainer.step_now(later).metrics["kl_reference"] > 0.0


def test_dpo_first_step_is_ln_2():
    metrics = make_trainer("dpo").step_now(make_batch()).metrics
    assert metrics["loss"] == pytest.approx(math.log(2.0), abs=1e-7)
    assert metrics["reward_margin"] == 0.0


def test_rm_first_step_is_ln_2():
    """A fresh scalar head says 0 for everything."""
    assert make_trainer("rm").step_now(make_batch()).metrics["loss"] == pytest.approx(
        math.log(2.0), abs=1e-7
    )


def test_fresh_critic_says_zero():
    evaluation = make_trainer("ppo").evaluate_now(make_batch(), "critic")
    assert all(not values.any() for values in evaluation.per_token)


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_learning_rate_0_leaves_weights_bit_equal(kind, dtype):
    trainer = make_trainer(
        kind, dtype=dtype, learning_rate=0.0, epochs_per_batch=2, sequences_per_update=4
    )
    before = weights_of(trainer)
    report = trainer.step_now(make_batch())
    assert report.num_updates == 6 and report.version == 6
    assert_bits_equal(weights_of(trainer), before)


@pytest.mark.parametrize("kind", QUICK_POLICIES)
def test_each_objective_learns_its_batch(kind):
    trainer, batch = make_trainer(kind, learning_rate=3e-3), make_batch()
    losses = [trainer.step_now(batch).metrics for _ in range(15)]
    name = "value_loss" if kind == "ppo" else "loss"
    assert losses[-1][name] < losses[0][name]
    if kind == "rm":
        assert losses[-1]["pair_accuracy"] == 1.0
    if kind == "dpo":
        assert losses[-1]["reward_accuracy"] == 1.0


def test_old_logprobs_are_those_before_the_first_update():
    """With several updates per batch the ratio leaves 1, and the gap to the engine stays that of
    the first forward."""
    trainer = make_trainer("grpo", epochs_per_batch=2, sequences_per_update=4)
    batch = with_column(make_batch(), "logprobs", trainer.evaluate_now(make_batch(), "policy"))
    metrics = trainer.step_now(batch).metrics
    assert metrics["logprob_gap"] < 1e-6
    assert metrics["kl_old"] > 1e-6


def test_policy_logprobs_that_the_batch_brings_are_the_old_ones():
    """No second pass over the same weights; and nothing of them where the policy has not moved."""
    calls = []

    def counted(decoder: Decoder, chunk: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(torch.is_grad_enabled())
        return chunk_logprobs(decoder, chunk)

    found = {}
    for brought in (False, True):
        for epochs in (1, 2):
            trainer = make_trainer("ppo", epochs_per_batch=epochs, logprobs=counted)
            batch = make_batch()
            if brought:
                batch = with_column(batch, "policy_logprobs", trainer.evaluate_now(batch, "policy"))
            calls.clear()
            metrics = trainer.step_now(batch).metrics
            found[brought, epochs] = (
                calls.count(False),
                metrics["kl_old"],
                metrics["ratio"],
                metrics["loss"],
            )
    assert found[False, 2][0] > 0 == found[True, 2][0]
    assert found[False, 2][1:] == found[True, 2][1:] and found[True, 2][1] > 0.0
    assert found[False, 1] == found[True, 1] and found[True, 1][:3] == (0, 0.0, 1.0)


def test_evaluate_returns_batch_order_and_zeros_off_target():
    trainer, batch = make_trainer("grpo"), make_batch()
    together = trainer.evaluate_now(batch, "policy").per_token
    assert [len(values) for values in together] == [len(s.tokens) for s in batch.sequences]
    for sequence, values in zip(batch.sequences, together, strict=True):
        (alone,) = trainer.evaluate_now(
            TrainBatch(sequences=(sequence,), step=0), "policy"
        ).per_token
        np.testing.assert_allclose(values, alone, atol=1e-5)
        assert not values[~sequence.columns["loss_mask"]].any()
        assert (values[sequence.columns["loss_mask"]] < 0).all()


def test_without_a_mask_all_but_the_first_token_are_targets():
    batch = make_batch()
    bare = replace(batch, sequences=tuple(replace(s, columns={}) for s in batch.sequences))
    for values in make_trainer("grpo").evaluate_now(bare, "policy").per_token:
        assert values[0] == 0.0 and (values[1:] < 0).all()


def test_values_and_scores_read_the_right_tokens():
    """The critic's value of a target is the head's at the token before it; a score is the head's at
    the last token."""
    head = ScalarHead(SPEC.hidden_size, device=CPU)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(
        "ppo", critic=(make_decoder(seed=3), head), reward_model=(make_decoder(seed=3), head)
    )
    batch = make_batch()
    values, scores = trainer.evaluate_now(batch, "critic"), trainer.evaluate_now(batch, "reward")
    np.testing.assert_allclose(values.per_sequence, scores.per_sequence, atol=1e-5)
    for index, sequence in enumerate(batch.sequences):
        for t in np.flatnonzero(sequence.columns["loss_mask"]):
            cut = TrainBatch(
                sequences=(replace(sequence, tokens=sequence.tokens[:t], columns={}),), step=0
            )
            assert trainer.evaluate_now(cut, "reward").per_sequence[0] == pytest.approx(
                values.per_token[index][t], abs=2e-5
            )


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_nothing_to_train_is_an_event_and_no_update(kind):
    events: list = []
    trainer = make_trainer(kind, events=events)
    before = weights_of(trainer)
    report = trainer.step_now(TrainBatch(sequences=(), step=3))
    assert report.num_updates == 0 and report.version == 0 and report.num_tokens == 0
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert ("trainer.nothing_to_train", {"step": 3, "sequences": 0}) in events
    assert_bits_equal(weights_of(trainer), before)


def test_fully_masked_batch_is_nothing_to_train():
    events: list = []
    trainer = make_trainer("grpo", events=events)
    batch = make_batch(2)
    mute = tuple(
        replace(s, columns={**s.columns, "loss_mask": np.zeros(len(s.tokens), dtype=bool)})
        for s in batch.sequences
    )
    report = trainer.step_now(replace(batch, sequences=mute))
    assert report.num_updates == 0 and report.metrics["sequences_left_out"] == 2.0
    assert [name for name, _ in events] == ["trainer.nothing_to_train"]


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_gradient_that_is_not_finite_skips_the_update(kind):
    events: list = []
    trainer = make_trainer(kind, events=events)
    batch, before = make_batch(), weights_of(trainer)
    batch.sequences[0].columns["advantages"][-1] = np.nan
    report = trainer.step_now(batch)
    assert report.num_updates == 0 and report.metrics["skipped_updates"] == 1.0
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert [name for name, _ in events] == ["trainer.update_skipped"]
    assert_bits_equal(weights_of(trainer), before)
    assert trainer.step_now(make_batch()).num_updates == 1


def test_training_that_stays_without_a_finite_gradient_ends_and_names_the_learning_rate():
    trainer, good = make_trainer("ppo", learning_rate=0.75, critic_learning_rate=0.5), make_batch()
    bad = make_batch()
    bad.sequences[0].columns["advantages"][-1] = np.nan
    for batch in (bad, bad, good, bad, bad):  # never three in a row
        trainer.step_now(batch)
    with pytest.raises(DivergedError) as caught:
        trainer.step_now(replace(bad, step=6))
    assert "3 steps, up to step 6" in caught.value.message and caught.value.exit_code == 1
    assert "learning rate of 0.75 of the actor and 0.5 of the critic" in caught.value.message
    assert (
        "trainer.learning_rate" in caught.value.hint
        and "cold_start.learning_rate" in caught.value.hint
    )


@pytest.mark.slow
def test_a_loss_scale_may_fall_for_as_long_as_it_must():
    trainer = make_trainer("ppo", dtype=torch.float16)
    bad = make_batch()
    bad.sequences[0].columns["advantages"][-1] = np.nan
    steps = 0
    with pytest.raises(DivergedError):
        while steps < 40:
            trainer.step_now(bad)
            steps += 1
    assert steps == 15  # from 2^16 down to 1


def test_a_step_cut_short_leaves_no_gradient_behind(monkeypatch):
    clean, cut = make_trainer("grpo"), make_trainer("grpo")

    def fail() -> float:
        raise RuntimeError("cut short")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="cut short"):
        patch.setattr(cut.models.actor.optimizer, "grad_norm", fail)
        cut.step_now(make_batch())
    assert cut.models.actor.optimizer.grad_N.any()
    for trainer in (clean, cut):
        trainer.step_now(make_batch())
    assert_bits_equal(weights_of(clean), weights_of(cut))


def test_long_sequences_get_a_chunk_and_an_event():
    events: list = []
    assert (
        make_trainer("sft", tokens_per_chunk=16, events=events).step_now(make_batch()).num_updates
        == 1
    )
    assert "trainer.oversized_chunks" in [kind for kind, _ in events]


def reference_of(trainer: NativeTrainer) -> dict[str, torch.Tensor]:
    """The reference's weights, of a snapshot."""
    prefix = "reference."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in saved_tensors(trainer).items()
        if name.startswith(prefix) and not name.startswith("reference.average.")
    }


def test_reference_refresh_and_moving_average():
    batch = make_batch()
    refreshed = make_trainer("grpo", reference_refresh_steps=2)
    start = weights_of(refreshed)
    for expected in ("start", "now", "now before", "now"):
        earlier = weights_of(refreshed)
        refreshed.step_now(batch)
        reference = reference_of(refreshed)
        kept = (
            weights_of(refreshed)
            if expected == "now"
            else start
            if expected == "start"
            else earlier
        )
        assert_bits_equal(reference, kept)
    averaged = make_trainer("grpo", reference_moving_average=0.75)
    averaged.step_now(batch)
    reference = reference_of(averaged)
    now = weights_of(averaged)
    for name in start:
        torch.testing.assert_close(reference[name], 0.75 * start[name] + 0.25 * now[name])


def test_a_reference_that_is_forbidden_says_so():
    with pytest.raises(ConfigError, match="reference"):
        make_trainer("dpo", reference="none").step_now(make_batch())
    batch = with_column(
        make_batch(), "reference_logprobs", make_trainer("dpo").evaluate_now(make_batch(), "policy")
    )
    assert make_trainer("dpo", reference="none").step_now(batch).num_updates == 1


@pytest.mark.parametrize("kind", QUICK_POLICIES)
@pytest.mark.parametrize("dtype", QUICK_BFLOAT16)
def test_resume_from_a_snapshot_is_bit_equal(kind, dtype, tmp_path):
    """Six steps in one go, or three, a snapshot on disk, and three in a new trainer with other
    weights."""
    settings = {
        "dtype": dtype,
        "sequences_per_update": 4,
        "schedule": "cosine",
        "steps": 6,
        "weight_decay": 0.1,
        "reference_moving_average": 0.9,
    }

    def run(trainer: NativeTrainer, steps: range) -> list:
        return [trainer.step_now(make_batch(seed=step, step=step)) for step in steps]

    whole = make_trainer(kind, **settings)
    reports = run(whole, range(6))
    first = make_trainer(kind, **settings)
    assert run(first, range(3)) == reports[:3]
    store = SnapshotStore(tmp_path, keep=1, emit=lambda *_, **__: None)
    options = {"background": False, "deadline_s": 60.0, "emit": lambda *_, **__: None}
    Saver(store, alone(), **options).save(3, parts=first.live_snapshot, state={}, blobs={})
    read = load_latest(store)
    second = make_trainer(kind, decoder=make_decoder(dtype, seed=99), **settings)
    second.restore_now({"tensors": read.tensors, "state": read.state["trainer"]})
    assert run(second, range(3, 6)) == reports[3:]
    assert_bits_equal(saved_tensors(second), saved_tensors(whole))


def test_a_snapshot_is_a_copy():
    """What is written later in another thread, or kept, does not change when training goes on."""
    trainer = make_trainer("ppo")
    taken = trainer.snapshot_now()["tensors"].values()
    kept = whole_tensors(taken)
    trainer.step_now(make_batch(seed=1))
    assert_bits_equal(whole_tensors(taken), kept)
    assert any(
        not torch.equal(kept[name], tensor) for name, tensor in saved_tensors(trainer).items()
    )


def test_snapshots_of_another_run_are_refused():
    taken = make_trainer("grpo").snapshot_now()
    with pytest.raises(SnapshotError, match="objective 'grpo'"):
        make_trainer("sft").restore_now(taken)
    missing = {key: part for key, part in taken["tensors"].items() if "embed" not in key}
    with pytest.raises(SnapshotError, match=r"holds nothing for actor\.master\.embed\.weight"):
        make_trainer("grpo").restore_now({**taken, "tensors": missing})


@pytest.mark.parametrize("dtype", QUICK_BFLOAT16)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_moving_components_keeps_bits_and_identity(dtype, tier, tmp_path, monkeypatch):
    moved = make_trainer("ppo", dtype=dtype, disk_folder=tmp_path, reward_model=reward_model(dtype))
    still = make_trainer("ppo", dtype=dtype, reward_model=reward_model(dtype))
    names = [c.name for c in moved.components() if tier in c.tiers]
    assert {
        "actor.params",
        "actor.optimizer",
        "critic.params",
        "critic.optimizer",
        "reward",
    } <= set(names)
    assert ("actor.master" in names) == (dtype == torch.bfloat16)
    tensors = moved.register_now().source.tensors
    for step in range(3):
        for trainer in (moved, still):
            trainer.step_now(make_batch(seed=step))
        sizes = {name: usage.device_bytes for name, usage in moved.measure().items()}
        moved.move(names, tier)
        for name in names:
            usage = moved.measure()[name]
            assert usage.device_bytes == 0
            assert {"host": usage.host_bytes, "disk": usage.disk_bytes}[tier] >= sizes[name] > 0
        with monkeypatch.context() as patched:
            patched.setattr(StoragePool, "move", lambda *_: pytest.fail("a snapshot moves nothing"))
            # even from where they are parked
            assert_bits_equal(saved_tensors(moved), saved_tensors(still))
        assert all(moved.measure()[name].device_bytes == 0 for name in names)
        moved.move(names, "device")
        assert {name: usage.device_bytes for name, usage in moved.measure().items()} == sizes
    assert_bits_equal(dict(tensors), weights_of(still))
    batch = make_batch()
    np.testing.assert_array_equal(
        moved.evaluate_now(batch, "reward").per_sequence,
        still.evaluate_now(batch, "reward").per_sequence,
    )


def reward_model(dtype: torch.dtype):
    head = ScalarHead(SPEC.hidden_size, device=CPU)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))
    return make_decoder(dtype, seed=4), head


def test_gradients_are_destroyed_and_made_again():
    trainer, other = make_trainer("grpo"), make_trainer("grpo")
    trainer.move(["actor.grads"], "none")
    assert trainer.measure()["actor.grads"].device_bytes == 0
    for one in (trainer, other):
        one.step_now(make_batch())
    assert_bits_equal(weights_of(trainer), weights_of(other))
    with pytest.raises(InputError):
        trainer.move(["actor.params"], "none")


def test_a_phase_without_its_components_is_our_fault():
    trainer = make_trainer("grpo")
    trainer.move(["actor.optimizer"], "host")
    trainer.evaluate_now(make_batch(), "policy")
    with pytest.raises(AssertionError, match=r"actor\.optimizer"):
        trainer.step_now(make_batch())


def test_a_parked_reference_is_fetched_when_the_step_needs_it():
    parked, still = (make_trainer("dpo", reference_refresh_steps=2) for _ in range(2))
    parked.move(["reference"], "host")
    for step in range(3):
        assert parked.step_now(make_batch(step=step)) == still.step_now(make_batch(step=step))
    assert {c.name: c.tier for c in parked.components()}["reference"] == "host"


def test_register_names_the_weights_that_the_engine_reads():
    decoder = make_decoder()
    trainer = make_trainer("grpo", decoder=decoder, version=41)
    trainer.step_now(make_batch())
    offer = trainer.register_now()
    manifest, tensors = offer.manifest, offer.source.tensors
    assert manifest.version == 42 and manifest.shared
    for name, parameter in decoder.named_parameters():
        assert tensors[name].data_ptr() == parameter.data_ptr()
    copied = make_trainer("rm", shared=False).register_now().manifest
    assert all(len(entry.segments[0].checksum) == 16 for entry in copied.entries)
    assert {entry.name for entry in copied.entries} == set(tensors)


def test_close_leaves_the_policy_usable():
    decoder = make_decoder()
    trainer = make_trainer("ppo", decoder=decoder)
    trainer.step_now(make_batch())
    before = weights_of(trainer)
    asyncio.run(trainer.close())
    assert (
        sum(
            usage.device_bytes
            for name, usage in trainer.measure().items()
            if name != "actor.params"
        )
        == 0
    )
    following = make_trainer("grpo", decoder=decoder, version=trainer.version)
    assert_bits_equal(weights_of(following), before)
    assert following.step_now(make_batch()).version == 2


def test_state_is_json_and_counts():
    trainer = make_trainer("ppo", objective=GrpoConfig(), sequences_per_update=6)
    trainer.step_now(make_batch())
    state = json.loads(json.dumps(trainer.snapshot_now()["state"]))
    assert state.pop("model") == json.loads(json.dumps(asdict(SPEC)))
    counts = {"version": 2, "steps_done": 1, "num_updates": {"actor": 2}}
    assert state == {"objective": "grpo", "moments": "float32", **counts}
