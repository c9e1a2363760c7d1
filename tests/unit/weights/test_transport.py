"""Weights: manifests, bucket plans, and a version that arrives whole or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.errors import SnapshotError
from gyre.weights.manifest import checksum, find_faults, make_manifest, verify_manifest
from gyre.weights.swap import Exchange, plan_buckets, shares_storage, stage

CPU = torch.device("cpu")


def silent(name: str, **fields) -> None: ...


def tensors(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (13, 8), "norm": (8,), "empty": (0, 3), "big": (40, 8)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


@given(sizes=st.lists(st.integers(0, 500), max_size=20), bucket_bytes=st.integers(1, 300))
def test_buckets_carry_every_byte_once_within_bounds(sizes, bucket_bytes):
    named = {f"t{i}": size for i, size in enumerate(sizes)}
    buckets = plan_buckets(named, bucket_bytes=bucket_bytes)
    seen = {name: [] for name in named}
    for bucket in buckets:
        at = 0
        for piece in bucket.pieces:
            assert piece.offset == at and piece.start < piece.stop
            at += piece.stop - piece.start
            seen[piece.name].append((piece.start, piece.stop))
        assert at == bucket.size_bytes <= bucket_bytes
    assert all(bucket.size_bytes == bucket_bytes for bucket in buckets[:-1])
    for name, runs in seen.items():
        assert [start for start, _ in runs] == [0, *(stop for _, stop in runs)][: len(runs)]
        assert (runs[-1][1] if runs else 0) == named[name]


@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=30),
    at=st.integers(0, 10_000),
    bit=st.integers(0, 15),
)
def test_any_flipped_bit_changes_the_checksum(bits, at, bit):
    """Over all bfloat16 patterns, NaNs and signed zeros among them."""
    raw = torch.tensor(bits, dtype=torch.int32).to(torch.uint16)
    flipped = raw.clone()
    flipped[at % len(bits)] = bits[at % len(bits)] ^ (1 << bit)
    assert checksum(raw.view(torch.bfloat16)) == checksum(raw.clone().view(torch.bfloat16))
    assert checksum(raw.view(torch.bfloat16)) != checksum(flipped.view(torch.bfloat16))


def test_checksum_is_of_the_row_major_bytes():
    whole = torch.arange(12.0).reshape(3, 4)
    assert checksum(whole.t()) == checksum(whole.t().contiguous()) != checksum(whole)
    assert len(checksum(whole)) == 16


def test_manifest_names_each_fault():
    good = tensors()
    manifest = make_manifest(5, good, shared=False, checksums=True)
    verify_manifest(manifest, good)
    bad = {**good, "extra": torch.zeros(1), "norm": good["norm"].float(), "big": good["big"] + 1}
    del bad["embed"]
    faults = find_faults(manifest, bad)
    assert faults == [
        "embed is missing",
        "extra is not part of the version",
        "norm is float32 (8,), the version has bfloat16 (8,)",
        "big does not match its checksum (from rank 0)",
    ]
    with pytest.raises(SnapshotError, match="version 5 are not whole"):
        verify_manifest(manifest, bad)


def test_a_wrong_checksum_names_the_ranks_and_what_became_of_the_last_version():
    """Over the running numbers too, which an engine on a GPU verifies: the message is the same."""
    held = tensors()
    manifest = make_manifest(5, held, shared=False, checksums=True)
    (big,) = (entry for entry in manifest.entries if entry.name == "big")
    (whole,) = big.segments
    cuts = tuple(replace(whole, start=8 * at, stop=8 * at + 8, owner=at % 3) for at in range(5))
    cut = replace(manifest, entries=(replace(big, segments=cuts),))
    with pytest.raises(SnapshotError) as caught:
        verify_manifest(cut, {"big": held["big"]}, matches=lambda entry, tensor: False)
    assert caught.value.message.endswith(
        "(1 faults): big does not match its checksum (from ranks 0, 1, 2)"
    )
    assert caught.value.hint.startswith("the last version is put back")


@pytest.mark.parametrize("bucket_bytes", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_version_arrives_whole(bucket_bytes, dtype):
    source, live = tensors(1, dtype), tensors(2, dtype)
    before = {name: tensor.clone() for name, tensor in live.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in live.items()}
    manifest = make_manifest(1, source, shared=False, checksums=True)
    staged = stage(manifest, source, device=CPU, bucket_bytes=bucket_bytes, emit=silent)
    assert all(torch.equal(live[name], before[name]) for name in live)
    assert not any(
        staged[name].data_ptr() == source[name].data_ptr()
        for name in source
        if source[name].numel()
    )
    Exchange(staged, live, bucket_bytes=bucket_bytes).run()
    for name, tensor in live.items():
        assert torch.equal(tensor, source[name]) and tensor.data_ptr() == addresses[name]


def test_corrupt_weights_are_cured_by_a_sync():
    """Corrupt the receiver, sync, require bit equality."""
    source = tensors(3)
    live = {name: torch.full_like(tensor, float("nan")) for name, tensor in source.items()}
    manifest = make_manifest(2, source, shared=False, checksums=True)
    Exchange(stage(manifest, source, device=CPU, emit=silent), live).run()
    assert [checksum(live[entry.name]) for entry in manifest.entries] == [
        entry.segments[0].checksum for entry in manifest.entries
    ]


def test_what_differs_from_the_manifest_never_arrives():
    source = tensors(4)
    manifest = make_manifest(3, source, shared=False, checksums=True)
    source["norm"][0] += 1.0
    with pytest.raises(SnapshotError, match="norm does not match"):
        stage(manifest, source, device=CPU, emit=silent)
    del source["big"]
    with pytest.raises(SnapshotError, match="big is missing"):
        stage(manifest, source, device=CPU, emit=silent)


def test_swap_checks_all_before_it_writes_any():
    live, staged = tensors(1), tensors(2)
    before = {name: tensor.clone() for name, tensor in live.items()}
    staged["big"] = staged["big"].float()
    with pytest.raises(AssertionError, match="big"):
        Exchange(staged, live)
    assert all(torch.equal(live[name], before[name]) for name in live)


def test_shared_storage_is_seen():
    ours = tensors()
    assert shares_storage(ours, {name: tensor.view(tensor.shape) for name, tensor in ours.items()})
    assert not shares_storage(ours, tensors())
    assert not shares_storage(
        ours, {name: tensor for name, tensor in ours.items() if name != "big"}
    )
    assert not shares_storage({"a": ours["big"][:8]}, {"a": ours["big"][:8, :8].t()})
