"""Moves and their proof on a real CUDA device: bytes come back to the driver, contents survive,
owners are named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gyre.core.errors import MemoryBudgetError
from gyre.core.records import Component, Tier
from gyre.kernels.attention import PackedLayout, varlen_attention
from gyre.kernels.logprobs import token_logprobs
from gyre.memory.config import MemoryConfig
from gyre.memory.manager import MemoryManager
from gyre.memory.phases import RING, default_needs
from gyre.memory.pools.storage import PoolTenant, StoragePool
from gyre.memory.probe import give_back, read_device
from gyre.models.config import ShapeConfig
from gyre.models.decoder import Decoder
from gyre.models.init import init_weights
from gyre.models.spec import spec_from_shape
from gyre.planner.hardware import saving_on_cuda
from gyre.planner.plan import ModelNumbers
from planner_cases import activation_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


def pool(
    name: str,
    size_mib: int,
    folder: Path,
    device: torch.device,
    tiers=("device", "host", "disk", "none"),
):
    torch.manual_seed(size_mib)
    large = torch.randn(size_mib * MIB // 4 - 1000, device=device)
    small = torch.nn.Parameter(torch.randn(2000, device=device).to(torch.bfloat16))
    return StoragePool(
        name,
        {"large": large, "view": large[100:200], "small": small},
        tiers=tiers,
        folder=folder,
        device=device,
    )


def free_bytes(device: torch.device) -> int:
    give_back(device, collect=True)
    return read_device(device).free_bytes


def manage(tenants, device: torch.device, events: list, **changes) -> MemoryManager:
    numbers = {
        "device_budget_bytes": 8 << 30,
        "host_budget_bytes": 8 << 30,
        "disk_budget_bytes": 8 << 30,
    }
    config = MemoryConfig(**{**numbers, "release_deadline_s": 2.0, **changes})
    return MemoryManager(
        tenants,
        config,
        device,
        lambda kind, **fields: events.append((kind, fields)),
        needs=default_needs(shared_weights=False),
    )


@pytest.mark.parametrize("path", [("host",), ("disk",), ("host", "disk"), ("disk", "host")])
def test_contents_survive_and_the_driver_gets_the_bytes_back(
    tmp_path: Path, device, path: tuple
) -> None:
    moved = pool("actor.params", 512, tmp_path, device)
    before = [segment.cpu() for segment in moved.segments()]
    start = free_bytes(device)
    for tier in path:
        moved.move(tier)
        assert free_bytes(device) - start >= 511 * MIB
        usage = moved.measure()
        held = {"host": usage.host_bytes, "disk": usage.disk_bytes}
        assert usage.device_bytes == 0
        assert held == {"host": 0, "disk": 0, tier: moved.size_bytes}
    moved.move("device")
    assert abs(free_bytes(device) - start) <= 4 * MIB
    after = [segment.cpu() for segment in moved.segments()]
    assert before and all(map(torch.equal, after, before))


def test_parked_bytes_are_pinned_and_given_back(tmp_path: Path, device) -> None:
    moved = pool("actor.params", 64, tmp_path, device)
    moved.move("host")
    assert moved.host is not None
    assert moved.host.bytes.is_pinned()
    moved.move("device")
    assert moved.measure().host_bytes == 0


def test_pinned_pages_are_kept_between_parks(tmp_path: Path, device) -> None:
    """Through the manager, which keeps them by itself on a GPU: the same pinned pages each time, in
    the account."""
    parts = [
        pool("actor.params", 64, tmp_path, device),
        pool("actor.optimizer", 256, tmp_path, device),
    ]
    tenant = PoolTenant(parts)
    manager = manage([tenant], device, [], residency="phase")
    addresses = set()
    for step in range(3):
        manager.enter("rollout", step=step)
        assert parts[1].host is not None and parts[1].host.bytes.is_pinned()
        addresses.add(parts[1].host.bytes.data_ptr())
        manager.enter("train", step=step)
        assert tenant.measure()["actor.optimizer"].host_bytes == parts[1].size_bytes
        assert manager.ledger.entry("actor.optimizer").kept_bytes == parts[1].size_bytes
    assert len(addresses) == 1
    parts[1].keep_pages(False)
    assert tenant.measure()["actor.optimizer"].host_bytes == 0


def test_a_reload_that_does_not_fit_keeps_the_host_copy(tmp_path: Path, device) -> None:
    moved = pool("actor.optimizer", 512, tmp_path, device)
    moved.move("host")
    filler = torch.empty(free_bytes(device) - 256 * MIB, dtype=torch.uint8, device=device)
    with pytest.raises(MemoryBudgetError, match=r"actor\.optimizer .* could not be placed"):
        moved.move("device")
    assert moved.tier == "host"
    assert moved.measure().device_bytes == 0
    del filler
    give_back(device, collect=True)
    moved.move("device")
    assert moved.measure().device_bytes == moved.size_bytes


def test_residue_is_constant_over_many_switches(tmp_path: Path, device) -> None:
    trainer = PoolTenant(
        [pool("actor.params", 64, tmp_path, device), pool("actor.optimizer", 256, tmp_path, device)]
    )
    engine = PoolTenant(
        [
            pool("engine.weights", 64, tmp_path, device),
            pool("engine.kv", 256, tmp_path, device, ("device", "none")),
        ]
    )
    events: list = []
    manager = manage(
        [trainer, engine], device, events, residency="phase", leave={"actor.optimizer": "disk"}
    )
    free: dict[str, set[int]] = {phase: set() for phase in RING}
    for step in range(6):
        for phase in RING:
            manager.enter(phase, step=step)
            if step >= 1:
                free[phase].add(free_bytes(device) // (4 * MIB))
    # one level, give or take a block
    assert all(len(levels) <= 2 for levels in free.values()), free
    boundary = [fields for kind, fields in events if kind == "memory"][-1]
    assert boundary["unowned_bytes"] <= 4 * MIB


def test_a_tensor_that_someone_keeps_is_unowned(tmp_path: Path, device) -> None:
    tenant = PoolTenant([pool("actor.params", 64, tmp_path, device)])
    manager = manage([tenant], device, [], residency="phase")
    manager.enter("rollout")
    kept = torch.empty(300 * MIB, dtype=torch.uint8, device=device)
    with pytest.raises(MemoryBudgetError, match="unowned by any component"):
        manager.enter("train")
    del kept
    manager.enter("train")


def test_an_owner_that_does_not_let_go_is_named(tmp_path: Path, device) -> None:
    class Keeper(PoolTenant):
        claimed: Tier = "device"

        def move(self, names: Sequence[str], tier: Tier) -> None:
            self.claimed = tier

        def components(self) -> Sequence[Component]:
            return [
                Component(name=c.name, size_bytes=c.size_bytes, tier=self.claimed, tiers=c.tiers)
                for c in super().components()
            ]

    keeper = Keeper([pool("actor.optimizer", 256, tmp_path, device)])
    manager = manage([keeper], device, [], residency="phase")
    with pytest.raises(
        MemoryBudgetError, match=r"actor\.optimizer still holds \d+ bytes on device"
    ):
        manager.enter("rollout")


def test_predicted_activations_cover_the_real_peak(device) -> None:
    """A 0.6 B-shaped model of fewer layers: forward and backward of one chunk stay under the
    planner's estimate."""
    shape = ShapeConfig(
        family="qwen3",
        hidden_size=1024,
        num_layers=6,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=3072,
        tied=True,
        context_tokens=2048,
    )
    spec = spec_from_shape(shape, vocab_size=32_000, bos_id=None, eos_ids=(1,))
    decoder = Decoder(spec, device=device, dtype=torch.bfloat16)
    init_weights(decoder, 0)
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    lengths = [1024] * 8
    layout = PackedLayout.of(lengths, device)
    tokens_T = torch.arange(sum(lengths), device=device) % spec.vocab_size
    positions_T = torch.arange(1024, device=device).repeat(8)

    def run() -> None:
        hidden_TE = decoder.hidden(
            tokens_T, positions_T, lambda _, q, k, v: varlen_attention(q, k, v, layout)
        )
        ones_T = torch.ones(len(tokens_T), device=device)
        token_logprobs(hidden_TE, decoder.head_weight, tokens_T, ones_T)[0].sum().backward()

    run()  # workspaces and lazily loaded kernels are made here
    give_back(device, collect=True)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    real = torch.cuda.max_memory_allocated(device) - before
    model = ModelNumbers(
        **{name: getattr(spec, name) for name in ModelNumbers.__dataclass_fields__}
    )
    guess = activation_bytes(
        model, "bfloat16", sum(lengths), longest=1024, saving=saving_on_cuda(device)
    )
    # made beside the one that it is added to
    largest_gradient = 2 * spec.vocab_size * spec.hidden_size
    assert real <= guess + largest_gradient <= 4 * real, (real, guess)
