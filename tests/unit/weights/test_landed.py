"""Sums of runs as they land: right for any layout in buckets of any size, and wrong for the tensor
that has a wrong number."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.models.layout import model_layout
from gyre.weights.landed import CopiesInTurn, LandedSums
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
    buckets = plan_reads(manifest.entries, num_owners=len(parts), bucket_bytes=bucket_bytes)

    def faults():
        sums = LandedSums()
        for bucket in buckets:
            sums.add(bucket.pieces, own)
        return find_faults(manifest, own, matches=sums.match)

    assert faults() == []
    name = sorted(own)[changed % len(own)]
    numbers_N = own[name].view(torch.int16).view(-1)
    numbers_N[changed % len(numbers_N)] ^= 1
    assert faults() == [f"{name} does not match its checksum"]


def test_a_bucket_is_kept_then_copied_then_summed():
    done = []
    turns = CopiesInTurn(torch.device("cpu"))
    for bucket in range(3):
        turns.next(
            keep=lambda bucket=bucket: done.append(("keep", bucket)),
            copy=lambda bucket=bucket: done.append(("copy", bucket)),
            sum_up=lambda bucket=bucket: done.append(("sum", bucket)),
        )
    turns.finish()
    assert done == [(what, bucket) for bucket in range(3) for what in ("keep", "copy", "sum")]
