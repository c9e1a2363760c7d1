"""Contract suite of PolicyTrainer and MemoryTenant: what the loop relies on, for every
implementation in TRAINERS."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cluster_roles import start_workers
from fakes.config import FakeTrainerConfig
from fakes.trainer import CountingTrainer
from gyre.cluster.trainer_group import TrainerGroup
from gyre.core.errors import InputError
from gyre.core.records import RoleSpec, TrainBatch, TrainSequence
from gyre.models.decoder import Decoder, ScalarHead
from gyre.models.init import init_weights
from gyre.models.spec import ModelSpec
from gyre.objectives.config import DpoConfig, GrpoConfig, PpoConfig
from gyre.trainer.config import TrainerConfig
from gyre.trainer.trainer import NativeTrainer
from local_cluster import LocalCluster
from offers import tensors_in

CPU = torch.device("cpu")
SPEC = ModelSpec(
    family="llama",
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=24,
    tied=False,
    context_tokens=64,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-5,
    qkv_bias=False,
    qk_norm=False,
    bos_id=None,
    eos_ids=(0,),
)


def decoder(seed: int) -> Decoder:
    made = Decoder(SPEC, device=CPU, dtype=torch.float32)
    init_weights(made, seed)
    return made


def native(objective, tmp_path) -> NativeTrainer:
    return NativeTrainer(
        decoder=decoder(1),
        objective=objective,
        config=TrainerConfig(learning_rate=1e-2, tokens_per_chunk=48, sequences_per_update=4),
        compute=ThreadPoolExecutor(1),
        emit=lambda name, **fields: None,
        seed=3,
        reward_model=(decoder(2), ScalarHead(SPEC.hidden_size, device=CPU)),
        disk_folder=tmp_path,
    )


def fake(objective, tmp_path) -> CountingTrainer:
    config = FakeTrainerConfig(sequences_per_update=4)
    return CountingTrainer(
        emit=lambda name, **fields: None, config=config, shapes=SPEC.parameter_shapes()
    )


def group(objective, tmp_path) -> TrainerGroup:
    """Two ranks behind workers."""
    cluster = LocalCluster(on_event=lambda worker, kind, **fields: None)
    shapes = SPEC.parameter_shapes()
    specs = [
        RoleSpec(
            name=f"rank-{rank}",
            builder="cluster_roles:fake_trainer",
            arguments={"rank": rank, "shapes": shapes},
        )
        for rank in range(2)
    ]
    handles = start_workers(cluster, specs)
    return TrainerGroup(
        cluster, handles, emit=lambda name, **fields: None, call_deadline_s=30.0, hang_s=30.0
    )


TRAINERS: dict[str, Callable] = {"native": native, "fake": fake, "group of fakes": group}


@pytest.fixture(params=TRAINERS)
def make(request, tmp_path):
    return lambda objective=None: TRAINERS[request.param](
        objective or GrpoConfig(kl_coef=0.1), tmp_path
    )


def batch(step: int = 0, num_sequences: int = 8) -> TrainBatch:
    rng = np.random.default_rng(step)
    sequences = []
    for index in range(num_sequences):
        length = int(rng.integers(4, 20))
        mask = np.arange(length) >= 2
        columns = {
            name: np.where(mask, rng.normal(size=length), 0).astype(np.float32)
            for name in ("advantages", "values", "returns")
        }
        columns |= {"loss_mask": mask, "logprobs": np.where(mask, -3.4, 0.0).astype(np.float32)}
        sequences.append(
            TrainSequence(
                tokens=rng.integers(0, 32, length).astype(np.int32),
                columns=columns,
                pair_id=index // 2,
                scalars={"chosen": float(index % 2 == 0)},
            )
        )
    return TrainBatch(sequences=tuple(sequences), step=step)


@pytest.mark.parametrize(
    "objective", [GrpoConfig(kl_coef=0.1), PpoConfig(), DpoConfig()], ids=lambda o: o.kind
)
def test_step_reports_what_it_did_and_the_version_is_final(make, objective):
    async def run() -> None:
        trainer = make(objective)
        start = (await trainer.register()).version
        report = await trainer.step(batch())
        assert report.step == 0 and report.num_updates == 2
        assert report.version == start + report.num_updates == (await trainer.register()).version
        assert report.num_tokens == sum(len(s.tokens) for s in batch().sequences)
        assert all(np.isfinite(value) for value in report.metrics.values())
        await trainer.close()

    asyncio.run(run())


def test_evaluate_answers_in_batch_order_and_changes_nothing(make):
    async def run() -> None:
        trainer = make(PpoConfig(kl_coef=0.1))
        asked = batch()
        before = {
            name: tensor.clone()
            for name, tensor in (await tensors_in(await trainer.register())).items()
        }
        for which in ("policy", "reference", "critic"):
            evaluation = await trainer.evaluate(asked, which)
            assert evaluation.which == which
            for values, sequence in zip(evaluation.per_token, asked.sequences, strict=True):
                assert values.dtype == np.float32 and values.shape == sequence.tokens.shape
                assert not values[~sequence.columns["loss_mask"]].any()
            turned = await trainer.evaluate(replace(asked, sequences=asked.sequences[::-1]), which)
            for here, there in zip(evaluation.per_token, turned.per_token[::-1], strict=True):
                np.testing.assert_allclose(here, there, atol=1e-5)
        rewards = await trainer.evaluate(asked, "reward")
        assert rewards.per_sequence is not None and rewards.per_sequence.shape == (
            len(asked.sequences),
        )
        for name, tensor in (await tensors_in(await trainer.register())).items():
            assert torch.equal(tensor, before[name])
        await trainer.close()

    asyncio.run(run())


def test_empty_batches_are_answered(make):
    async def run() -> None:
        trainer = make()
        empty = TrainBatch(sequences=(), step=5)
        report = await trainer.step(empty)
        assert report.step == 5 and report.num_updates == 0 and report.num_tokens == 0
        assert (await trainer.evaluate(empty, "policy")).per_token == ()
        await trainer.close()

    asyncio.run(run())


def test_the_manifest_describes_the_tensors(make):
    async def run() -> tuple:
        offer = await make().register()
        return offer.manifest, await tensors_in(offer)

    manifest, tensors = asyncio.run(run())
    assert [entry.name for entry in manifest.entries] == list(tensors)
    for entry in manifest.entries:
        tensor = tensors[entry.name]
        assert entry.shape == tuple(tensor.shape) and f"torch.{entry.dtype}" == str(tensor.dtype)
        assert entry.size_bytes == tensor.numel() * tensor.element_size()
    assert {entry.name: entry.shape for entry in manifest.entries} == SPEC.parameter_shapes()


def test_snapshot_and_restore_continue_to_the_bit(make):
    async def run() -> None:
        one, other = make(), make()
        await one.step(batch(0))
        taken = await one.snapshot()
        copied = copy.deepcopy(taken)
        expected = await one.step(batch(1))
        await other.step(batch(7))
        await other.restore(copied)
        assert await other.step(batch(1)) == expected
        theirs = await tensors_in(await other.register())
        for name, tensor in (await tensors_in(await one.register())).items():
            assert torch.equal(tensor, theirs[name])
        await one.close()
        await other.close()

    asyncio.run(run())


async def answer(value: Any) -> Any:
    """What a trainer in this process returns at once, and a group of ranks as a coroutine."""
    return await value if inspect.isawaitable(value) else value


def test_components_move_and_are_measured(make):
    async def run() -> None:
        trainer, other = make(), make()
        for component in await answer(trainer.components()):
            assert component.tier == "device"
            held = (await answer(trainer.measure()))[component.name]
            assert held.device_bytes == component.size_bytes > 0
            for tier in ("host", "disk"):
                if tier not in component.tiers:
                    with pytest.raises(InputError, match="accepted"):
                        await answer(trainer.move([component.name], tier))
                    continue
                await answer(trainer.move([component.name], tier))
                usage = (await answer(trainer.measure()))[component.name]
                assert (
                    usage.device_bytes == 0
                    and usage.host_bytes + usage.disk_bytes >= component.size_bytes
                )
                tiers = {c.name: c.tier for c in await answer(trainer.components())}
                assert tiers[component.name] == tier
            await answer(trainer.move([component.name], "device"))
        with pytest.raises(InputError, match="no component"):
            await answer(trainer.move(["actor.nothing"], "host"))
        assert await trainer.step(batch()) == await other.step(batch())
        await trainer.close()
        await other.close()

    asyncio.run(run())
