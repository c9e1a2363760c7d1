"""Contract suite of MemoryTenant: what every owner of components promises the ledger.

A new implementation adds its builder to IMPLEMENTATIONS; a builder returns the tenant and a
function that fingerprints the contents of a component that is on the device.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from fakes.engine import ScriptedEngine
from fakes.trainer import CountingTrainer
from gyre.core.contracts import MemoryTenant
from gyre.core.errors import InputError
from gyre.core.records import Tier, Usage
from gyre.engine.config import EngineConfig
from gyre.engine.engine import NativeEngine
from gyre.memory.pools.storage import PoolTenant, StoragePool
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder, ScalarHead
from gyre.models.init import init_weights
from gyre.models.spec import spec_from_shape
from gyre.objectives.config import GrpoConfig, PpoConfig
from gyre.trainer.config import TrainerConfig
from gyre.trainer.trainer import NativeTrainer

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Subject:
    tenant: MemoryTenant
    fingerprint: Callable[[str], str]


def build_pools(folder: Path) -> Subject:
    """The tenant that trainer and engine are made of: a small model with its optimizer, and a cache
    of keys."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Linear(32, 16, dtype=torch.bfloat16)
    )
    moments = {
        f"moment.{name}": torch.randn_like(value) for name, value in model.named_parameters()
    }
    parts = {
        "actor.params": (dict(model.named_parameters()), ("device", "host", "disk")),
        "actor.optimizer": (moments, ("device", "host", "disk", "none")),
        "engine.kv": ({"pages": torch.ones(8, 4, 16)}, ("device", "none")),
    }
    pools = [
        StoragePool(name, tensors, tiers=tiers, folder=folder, device=CPU)
        for name, (tensors, tiers) in parts.items()
    ]

    def fingerprint(name: str) -> str:
        digest = hashlib.blake2b()
        for tensor in parts[name][0].values():
            digest.update(np.from_dlpack(tensor.detach().reshape(-1).view(torch.uint8)).data)
        return digest.hexdigest()

    return Subject(tenant=PoolTenant(pools), fingerprint=fingerprint)


def build_fake_engine(folder: Path) -> Subject:
    engine = ScriptedEngine(lambda request, index, version: (), emit=lambda kind, **fields: None)
    return Subject(tenant=engine, fingerprint=lambda name: engine.memory.contents(name).hex())


def build_fake_trainer(folder: Path) -> Subject:
    trainer = CountingTrainer(emit=lambda kind, **fields: None)
    return Subject(tenant=trainer, fingerprint=lambda name: trainer.memory.contents(name).hex())


def tiny_decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    shape = ShapeConfig(
        family="qwen3",
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_size=48,
        tied=True,
        context_tokens=64,
    )
    decoder = Decoder(
        spec_from_shape(shape, vocab_size=48, bos_id=None, eos_ids=(0,)), device=CPU, dtype=dtype
    )
    init_weights(decoder, 0)
    return decoder


def over_pools(tenant: MemoryTenant, pools: PoolTenant) -> Subject:
    def fingerprint(name: str) -> str:
        digest = hashlib.blake2b()
        for segment in pools[name].segments():
            digest.update(np.from_dlpack(segment).data)
        return digest.hexdigest()

    return Subject(tenant=tenant, fingerprint=fingerprint)


def build_trainer(
    folder: Path, *, dtype: torch.dtype, objective: GrpoConfig | PpoConfig
) -> Subject:
    decoder = tiny_decoder(dtype)
    trainer = NativeTrainer(
        decoder=decoder,
        objective=objective,
        config=TrainerConfig(tokens_per_chunk=64),
        compute=ThreadPoolExecutor(1),
        emit=lambda kind, **fields: None,
        seed=0,
        reward_model=(tiny_decoder(dtype), ScalarHead(decoder.spec.hidden_size, device=CPU)),
        disk_folder=folder,
    )
    trainer.register_now()  # checksums read the weights' bytes; they must be able to leave all the same
    return over_pools(trainer, trainer.memory)


def build_engine(folder: Path) -> Subject:
    engine = NativeEngine(
        tiny_decoder(),
        EngineConfig(page_tokens=4, num_pages=20, disk_folder=str(folder)),
        compute=ThreadPoolExecutor(1),
        emit=lambda kind, **fields: None,
        device=CPU,
        dtype=torch.float32,
        shared_weights=False,
    )
    asyncio.run(engine.start(dummy=False))
    return over_pools(engine, engine.worker.memory.tenant)


IMPLEMENTATIONS: dict[str, Callable[[Path], Subject]] = {
    "pools": build_pools,
    "trainer, grpo, float32": partial(
        build_trainer, dtype=torch.float32, objective=GrpoConfig(kl_coef=0.1)
    ),
    "trainer, ppo, bfloat16": partial(
        build_trainer, dtype=torch.bfloat16, objective=PpoConfig(kl_coef=0.1)
    ),
    "engine": build_engine,
    "fake_engine": build_fake_engine,
    "fake_trainer": build_fake_trainer,
}


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def subject(request, tmp_path: Path) -> Subject:
    return IMPLEMENTATIONS[request.param](tmp_path)


def tiers_of(tenant: MemoryTenant) -> dict[str, Tier]:
    return {component.name: component.tier for component in tenant.components()}


def check_measure(tenant: MemoryTenant) -> None:
    """Each component's bytes are on its tier and nowhere else."""
    measured = tenant.measure()
    assert set(measured) == set(tiers_of(tenant))
    for component in tenant.components():
        size = component.size_bytes
        due = {
            "device": Usage(device_bytes=size, host_bytes=0, disk_bytes=0),
            "host": Usage(device_bytes=0, host_bytes=size, disk_bytes=0),
            "disk": Usage(device_bytes=0, host_bytes=0, disk_bytes=size),
            "none": Usage(device_bytes=0, host_bytes=0, disk_bytes=0),
        }[component.tier]
        assert measured[component.name] == due, component.name


def test_components_are_declared_whole(subject: Subject) -> None:
    components = subject.tenant.components()
    names = [component.name for component in components]
    assert len(names) == len(set(names)) > 0
    for component in components:
        assert component.tier in component.tiers
        assert "device" in component.tiers
        assert component.size_bytes > 0
        owner, _, part = component.name.partition(".")
        assert owner
        assert part or owner in ("reference", "reward")
    check_measure(subject.tenant)


def test_contents_survive_every_tier_that_keeps_them(subject: Subject) -> None:
    for component in subject.tenant.components():
        before = subject.fingerprint(component.name)
        keeping: list[Tier] = [tier for tier in component.tiers if tier != "none"]
        home: list[Tier] = ["device"]
        for tier in keeping + keeping[::-1] + home:
            subject.tenant.move([component.name], tier)
            assert tiers_of(subject.tenant)[component.name] == tier
            check_measure(subject.tenant)
        assert subject.fingerprint(component.name) == before


def test_sizes_do_not_depend_on_the_tier(subject: Subject) -> None:
    before = {component.name: component.size_bytes for component in subject.tenant.components()}
    for component in subject.tenant.components():
        subject.tenant.move([component.name], component.tiers[-1])
    assert {
        component.name: component.size_bytes for component in subject.tenant.components()
    } == before


def test_destroyed_components_come_back_in_full_size(subject: Subject) -> None:
    doomed = [
        component.name for component in subject.tenant.components() if "none" in component.tiers
    ]
    for _ in range(3):
        subject.tenant.move(doomed, "none")
        check_measure(subject.tenant)
        subject.tenant.move(doomed, "device")
        check_measure(subject.tenant)


def test_moving_to_where_it_is_changes_nothing(subject: Subject) -> None:
    for component in subject.tenant.components():
        before = subject.fingerprint(component.name)
        subject.tenant.move([component.name], "device")
        assert subject.fingerprint(component.name) == before
    check_measure(subject.tenant)


def test_a_tier_that_is_not_allowed_is_refused_and_nothing_happens(subject: Subject) -> None:
    tiers: tuple[Tier, ...] = ("device", "host", "disk", "none")
    before = tiers_of(subject.tenant)
    for component in subject.tenant.components():
        for tier in tiers:
            if tier not in component.tiers:
                with pytest.raises(InputError, match=component.name):
                    subject.tenant.move([component.name], tier)
    assert tiers_of(subject.tenant) == before
    check_measure(subject.tenant)


def test_unknown_names_are_refused_before_anything_moves(subject: Subject) -> None:
    before = tiers_of(subject.tenant)
    first = subject.tenant.components()[0]
    with pytest.raises(InputError, match="nobody"):
        subject.tenant.move([first.name, "nobody.at_all"], first.tiers[-1])
    assert tiers_of(subject.tenant) == before


def test_many_round_trips_leave_no_residue(subject: Subject) -> None:
    before = {
        component.name: subject.fingerprint(component.name)
        for component in subject.tenant.components()
    }
    keeping: dict[str, list[Tier]] = {
        component.name: [tier for tier in component.tiers if tier not in ("device", "none")]
        for component in subject.tenant.components()
    }
    for round_number in range(20):
        for name, tiers in keeping.items():
            if tiers:
                subject.tenant.move([name], tiers[round_number % len(tiers)])
        check_measure(subject.tenant)
        subject.tenant.move(list(keeping), "device")
        check_measure(subject.tenant)
    assert {name: subject.fingerprint(name) for name in before} == before
