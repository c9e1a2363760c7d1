"""Sums of runs as they land: right for any layout in buckets of any size, and wrong for the tensor
that has a wrong number."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.models.layout import model_layout
from gyre.weights.landed import CopyOrder, Keeper, LandedSums
from gyre.weights.manifest import find_faults
from gyre.weights.shards import row_layout
from gyre.weights.transports.part_layout import plan_reads
from gyre.weights.transports.publish import join_parts, publish_part
from layout_cases import numbered, spec_of
from part_cases import shard_offer, shared_folder, stores_of


@settings(deadline=None, max_examples=20)
@given(
    num_tensor_ranks=st.sampled_from([1, 2, 4]),
    num_shards=st.integers(1, 3),
    bucket_bytes=st.integers(64, 2000),
    changed=st.integers(0, 1 << 20),
)
def test_only_the_tensor_with_a_wrong_number_is_found(
    num_tensor_ranks, num_shards, bucket_bytes, changed
):
    spec = spec_of(num_heads=4, num_kv_heads=2, vocab_size=13)
    whole, model = numbered(spec), model_layout(spec, num_tensor_ranks)
    layout = replace(row_layout(model.local_shapes, num_ranks=num_shards), table=model)
    own = {name: tensor.bfloat16() for name, tensor in whole.items()}
    with shared_folder() as folder, stores_of(folder, layout.num_holders) as stores:
        parts = [
            publish_part(
                shard_offer(layout, whole, rank, version=4),
                rank=rank,
                num_ranks=layout.num_holders,
                store=store,
            )
            for rank, store in enumerate(stores)
        ]
    manifest = join_parts(4, 0, parts).manifest
    buckets = plan_reads(manifest.entries, owners=range(len(parts)), bucket_bytes=bucket_bytes)

    def faults():
        sums = LandedSums()
        for bucket in buckets:
            sums.add(bucket.pieces, own)
        return find_faults(manifest, own, matches=sums.match)

    assert faults() == []
    name = sorted(own)[changed % len(own)]
    numbers_N = own[name].view(torch.int16).view(-1)
    numbers_N[changed % len(numbers_N)] ^= 1
    (fault,) = faults()
    assert fault.startswith(f"{name} does not match its checksum (from rank")


def test_a_bucket_is_summed_when_it_has_landed():
    own, seen = {"a": torch.zeros(4), "b": torch.zeros(2)}, []
    order = CopyOrder(torch.device("cpu"))
    for name, value in (("a", 1.0), ("b", 2.0)):
        order.copy([name], [own[name]], [torch.full_like(own[name], value)])
        order.sum_up(lambda: seen.append([one.sum().item() for one in own.values()]))
    order.finish()
    assert seen == [[4.0, 0.0], [4.0, 4.0]]


def test_what_was_kept_is_put_back_and_nothing_else(monkeypatch):
    """An error may come when some tensors are kept, and before any is overwritten."""
    monkeypatch.setattr("gyre.weights.landed.KEPT_BYTES", 24)  # two tensors at once
    own = {name: torch.full((3,), float(number)) for number, name in enumerate("abcde")}
    before = {name: tensor.clone() for name, tensor in own.items()}
    keeper = Keeper(own, torch.device("cpu"))
    keeping = keeper.keep()
    assert [next(keeping), next(keeping)] == [["a", "b"], ["c", "d"]]
    for name in "abcd":
        own[name].fill_(-1)
    keeper.put_back()
    assert all(torch.equal(own[name], before[name]) for name in own)
    assert list(keeping) == [["e"]]
