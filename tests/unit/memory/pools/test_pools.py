"""Storage pools: identity and contents survive every way through the tiers; bytes are where the
pool says; damage on disk, a full disk and a storage that cannot be freed are named errors that lose
nothing."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.core.errors import InputError, MemoryBudgetError, SnapshotError
from gyre.core.records import Usage
from gyre.memory.pools import disk_file
from gyre.memory.pools.disk_file import DiskFile
from gyre.memory.pools.host_buffer import HostBuffer
from gyre.memory.pools.storage import StoragePool
from memory_cases import DISTINCT_BYTES, make_tensors

CPU = torch.device("cpu")


def make_pool(
    folder: Path | None, tensors: dict[str, torch.Tensor] | None = None, **options
) -> StoragePool:
    return StoragePool(
        "actor.params", tensors or make_tensors(), folder=folder, device=CPU, **options
    )


def held(pool: StoragePool) -> tuple[int, int, int]:
    usage = pool.measure()
    return usage.device_bytes, usage.host_bytes, usage.disk_bytes


def test_sharing_tensors_count_once(tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    assert pool.size_bytes == DISTINCT_BYTES
    assert held(pool) == (DISTINCT_BYTES, 0, 0)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    path=st.lists(st.sampled_from(["device", "host", "disk"]), max_size=8), seed=st.integers(0, 99)
)
def test_contents_survive_any_path(tmp_path: Path, path: list, seed: int) -> None:
    tensors = make_tensors(seed)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    addresses = {name: id(tensor) for name, tensor in tensors.items()}
    pool = make_pool(tmp_path, tensors)
    size = pool.size_bytes
    for tier in path:
        pool.move(tier)
        assert pool.tier == tier == pool.component().tier
        assert (
            held(pool) == {"device": (size, 0, 0), "host": (0, size, 0), "disk": (0, 0, size)}[tier]
        )
    pool.move("device")
    assert held(pool) == (size, 0, 0)
    for name, tensor in tensors.items():
        assert id(tensor) == addresses[name]
        assert torch.equal(tensor, before[name]), name
    tensors["fused"][20, 3] = 5.0  # the views still share one storage
    assert tensors["rows"][4, 3] == 5.0
    assert tensors["turned"][3, 20] == 5.0


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=st.lists(st.sampled_from(["device", "host", "disk", "keep", "free"]), max_size=10))
def test_kept_pages_serve_again_and_are_counted(tmp_path: Path, path: list) -> None:
    """Kept from the host to the device; a stay elsewhere, or the word, frees them. Contents survive
    all of it."""
    tensors = make_tensors(3)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    pool = make_pool(tmp_path, tensors)
    size, keeps, kept, address = pool.size_bytes, False, False, 0
    for word in path:
        if word in ("keep", "free"):
            keeps = word == "keep"
            pool.keep_pages(keeps)
            kept &= keeps
        else:
            kept = word == "device" and (
                (keeps and pool.tier == "host") or (kept and pool.tier == "device")
            )
            reused = word == "host" and pool.tier == "device" and held(pool)[1] > 0
            pool.move(word)
            if word == "host":
                assert pool.host is not None
                assert not reused or pool.host.bytes.data_ptr() == address, "the same pages"
                address = pool.host.bytes.data_ptr()
        tier = pool.tier
        assert held(pool) == (
            size if tier == "device" else 0,
            size if tier == "host" or kept else 0,
            size if tier == "disk" else 0,
        )
    pool.move("device")
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    pool.close()
    assert held(pool) == (0, 0, 0)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_bytes_are_read_where_they_are(tmp_path: Path, tier) -> None:
    tensors = make_tensors(5)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    row = tensors["fused"].detach()[3]  # a view that is none of the pool's own tensors
    pool = make_pool(tmp_path, tensors)
    pool.move(tier)
    there = held(pool)
    readable, inner = pool.readable(tensors), pool.readable({"row": row})
    assert held(pool) == there and pool.tier == tier, "nothing moved"
    assert torch.equal(inner["row"], before["fused"][3])
    for name, copy_ in readable.items():
        assert (
            torch.equal(copy_, before[name])
            and copy_.dtype == before[name].dtype
            and copy_.stride() == tensors[name].stride()
        )
    pool.move("host")
    pool.move("device")
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


def test_destroyed_components_keep_no_pages(tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    pool.keep_pages(True)
    for tier in ("host", "device", "none"):
        pool.move(tier)
    assert held(pool) == (0, 0, 0)


def test_optimizer_and_autograd_go_on_after_a_round_trip(tmp_path: Path) -> None:
    """Identity survives: the same run with and without moves between its steps gives the same
    bits."""

    def run(moves: tuple) -> torch.Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        layer(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        states = {
            f"{i}.{k}": v for i, s in enumerate(optimizer.state.values()) for k, v in s.items()
        }
        grads = {
            f"grad.{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None
        }
        pools = [make_pool(tmp_path, dict(layer.named_parameters()))]
        pools.append(
            StoragePool("actor.optimizer", {**states, **grads}, folder=tmp_path, device=CPU)
        )
        for step in range(3):
            for tier in moves:
                for pool in pools:
                    pool.move(tier)
            layer(torch.full((2, 8), float(step))).square().sum().backward()
            optimizer.step()
        return layer.weight.detach().clone()

    assert torch.equal(run(()), run(("host", "disk", "device")))


def test_destroy_and_instantiate_again(tmp_path: Path) -> None:
    tensors = make_tensors()
    filled: list[int] = []

    def refill() -> None:
        filled.append(1)
        tensors["half"].fill_(2.0)

    pool = make_pool(tmp_path, tensors, refill=refill)
    for round_number in range(3):
        pool.move("none")
        assert held(pool) == (0, 0, 0)
        with pytest.raises(InputError, match="no contents"):
            pool.move("host")
        pool.move("device")
        assert len(filled) == round_number + 1
        assert not tensors["fused"].any()
        assert torch.equal(tensors["half"], torch.full_like(tensors["half"], 2.0))
        tensors["fused"].fill_(3.0)


def test_works_in_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        keys = torch.arange(32.0)
        pool = make_pool(tmp_path, {"keys": keys})
        for tier in ("host", "disk", "device"):
            pool.move(tier)
        assert torch.equal(keys, torch.arange(32.0))


def test_tiers_are_a_rule() -> None:
    pool = make_pool(None, tiers=("device", "host"))
    with pytest.raises(InputError, match=r"actor\.params may not live on tier 'none'"):
        pool.move("none")
    with pytest.raises(InputError, match="disk"):
        make_pool(None).move("disk")
    assert "disk" not in make_pool(None).component().tiers


@pytest.mark.parametrize("target", ["device", "host"])
@pytest.mark.parametrize("damage", ["flip", "cut", "lost", "manifest"])
def test_damage_on_disk_is_found_and_named(tmp_path: Path, damage: str, target) -> None:
    pool = make_pool(tmp_path)
    pool.move("disk")
    data, manifest = tmp_path / "actor.params.bin", tmp_path / "actor.params.json"
    content = bytearray(data.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif damage == "cut":
        data.write_bytes(content[:-1])
    elif damage == "lost":
        data.unlink()
    else:
        manifest.write_text("{}")
    with pytest.raises(SnapshotError, match=r"actor\.params"):
        pool.move(target)
    assert pool.tier == "disk"
    assert held(pool)[:2] == (0, 0)


def test_a_bad_write_is_noticed_while_the_source_exists(tmp_path: Path, monkeypatch) -> None:
    """A disk that stores something else than it was given: found by reading back, before anything
    is freed."""
    real = disk_file.write_all

    def lie(file, host: torch.Tensor) -> None:
        other = host.clone()
        other[:1] ^= 1
        real(file, other)

    monkeypatch.setattr(disk_file, "write_all", lie)
    pool = make_pool(tmp_path)
    with pytest.raises(SnapshotError, match="read back"):
        pool.move("disk")
    assert pool.tier == "device"
    assert held(pool) == (DISTINCT_BYTES, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch) -> None:
    real = os.fsync

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tensors = make_tensors()
    before = copy.deepcopy({name: tensor.detach() for name, tensor in tensors.items()})
    pool = make_pool(tmp_path, tensors)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MemoryBudgetError, match=r"actor\.params.*No space left"):
        pool.move("disk")
    monkeypatch.setattr(os, "fsync", real)
    assert held(pool) == (DISTINCT_BYTES, 0, 0)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    pool.move("disk")
    assert held(pool) == (0, 0, DISTINCT_BYTES)


def test_a_move_to_disk_syncs_each_file_once_and_their_folder_last(
    tmp_path: Path, monkeypatch
) -> None:
    real, synced = os.fsync, []

    def note(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real(handle)

    pool = make_pool(tmp_path)
    monkeypatch.setattr(os, "fsync", note)
    pool.move("disk")
    data, manifest, folder = synced
    assert data.endswith(".bin.partial") and manifest.endswith(".json.partial")
    assert folder == tmp_path.name


def test_large_segments_go_through_in_parts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(disk_file, "STAGING_BYTES", 1000)
    tensors = make_tensors()
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    pool = make_pool(tmp_path, tensors)
    pool.move("disk")
    pool.move("device")
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_a_storage_that_numpy_saw_still_moves() -> None:
    """`Tensor.numpy()` marks a storage as not resizable, for good; the pool replaces it under its
    own tensors."""
    tensors = make_tensors()
    before = tensors["fused"].clone()
    tensors["rows"].numpy()
    assert not tensors["fused"].untyped_storage().resizable()
    pool = make_pool(None, tensors)
    pool.move("host")
    assert held(pool) == (0, DISTINCT_BYTES, 0)
    pool.move("device")
    assert torch.equal(tensors["fused"], before)
    assert tensors["rows"].data_ptr() == tensors["fused"][16:].data_ptr()


def test_a_storage_that_numpy_still_holds_is_refused_whole() -> None:
    tensors = make_tensors()
    array = tensors["half"].view(torch.int16).numpy()
    pool = make_pool(None, tensors)
    with pytest.raises(MemoryBudgetError, match=r"actor\.params: 258 bytes"):
        pool.move("host")
    assert pool.tier == "device"
    assert held(pool) == (DISTINCT_BYTES, 0, 0)
    assert tensors["half"].data_ptr() == array.ctypes.data  # still one and the same memory
    del array
    pool.move("host")
    assert held(pool) == (0, DISTINCT_BYTES, 0)


def test_host_pages_that_someone_keeps_are_counted() -> None:
    pool = make_pool(None)
    pool.move("host")
    kept = pool.segments()[0]
    pool.move("device")
    assert held(pool) == (DISTINCT_BYTES, DISTINCT_BYTES, 0)
    del kept
    assert held(pool) == (DISTINCT_BYTES, 0, 0)


def test_host_memory_that_the_system_refuses() -> None:
    with pytest.raises(MemoryBudgetError, match="engine"):
        HostBuffer(1 << 62, pin=False, owner="engine")


def test_close_leaves_nothing(tmp_path: Path) -> None:
    pool = make_pool(tmp_path)
    pool.move("disk")
    pool.close()
    assert held(pool) == (0, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_disk_file_knows_its_size(tmp_path: Path) -> None:
    file = DiskFile(tmp_path / "deep" / "folder", "a.b")
    assert file.size_bytes() == 0
    file.write([torch.arange(10, dtype=torch.uint8)])
    assert file.size_bytes() == 10


def test_usage_is_read_and_not_remembered() -> None:
    tensors = make_tensors()
    pool = make_pool(None, tensors)
    tensors["half"].untyped_storage().resize_(0)
    assert pool.measure() == Usage(device_bytes=DISTINCT_BYTES - 258, host_bytes=0, disk_bytes=0)
