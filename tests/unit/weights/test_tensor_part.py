"""Parts of registered versions at the ranks of an engine: from publishers of any layout, in buckets
of any size, and verified by all ranks together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gyre.core.errors import InputError, SnapshotError
from gyre.distributed.process_group import RankGroup
from gyre.models.layout import model_layout
from gyre.models.spec import ModelSpec
from gyre.weights.manifest import make_manifest
from gyre.weights.read_plan import ReadPlan
from gyre.weights.registered import ReadOver
from gyre.weights.shards import row_layout
from gyre.weights.tensor_part import TensorPart
from gyre.weights.tensor_source import LiveTensors
from gyre.weights.transports.addresses import CUDA_IPC, GLOO, SHM, host_id
from gyre.weights.transports.opened import PartOpener, Reading
from gyre.weights.transports.part_layout import GAP_BYTES, place_part, plan_reads
from gyre.weights.transports.publish import join_parts, publish_part
from layout_cases import numbered, spec_of
from part_cases import (
    Memory,
    live_servers,
    register,
    shard_offer,
    shared_folder,
    silent,
    stores_of,
)
from rank_pool import RankPool

SPEC = spec_of(num_heads=4, num_kv_heads=2, vocab_size=13)


def part_of_rank(spec: ModelSpec, rank: int, size: int) -> TensorPart:
    """A rank that computes nothing with the others."""
    group = RankGroup(name="test", rank=rank, size=size, device=torch.device("cpu"))
    return TensorPart(table=model_layout(spec, size), group=group)


def locals_of(part: TensorPart, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank's numbers, through another way than the one that is shown: a run at a time."""
    found, source = {}, part.cut(LiveTensors(whole))
    for name, shape in part.table.local_shapes.items():
        found[name] = torch.empty(shape, dtype=whole[name].dtype)
        source.read(name, 0, found[name].numel(), found[name].view(-1))
    return found


def same(found, expected) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@settings(deadline=None, max_examples=30)
@given(
    trained=st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3)),
    num_ranks=st.sampled_from([2, 4]),
    bucket_bytes=st.integers(64, 2000),
)
def test_each_rank_gets_its_numbers_from_any_layout(trained, num_ranks, bucket_bytes):
    num_tensor_ranks, num_shards = trained
    model = model_layout(SPEC, num_tensor_ranks)
    layout = replace(row_layout(model.local_shapes, num_ranks=num_shards), table=model)
    whole = numbered(SPEC)
    rounded = {name: tensor.bfloat16() for name, tensor in whole.items()}
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
        offer = join_parts(4, 0, parts)
        for rank in range(num_ranks):
            held, told = part_of_rank(SPEC, rank, num_ranks), []
            expected = locals_of(held, rounded)
            own = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
            swap = ReadOver(
                offer,
                own,
                parts=PartOpener(Reading(host_id=host_id(folder), folder=folder)),
                emit=lambda kind, told=told, **fields: told.append(fields["size_bytes"]),
                bucket_bytes=bucket_bytes,
                held=held,
            )
            swap.run()
            assert same(own, expected)
            swap.undo()
            assert not any(tensor.any() for tensor in own.values())
            swap.run()
            swap.settle()
            assert same(own, expected)
            if num_tensor_ranks == num_ranks:  # shard to shard: little but its own is read
                size_bytes = sum(tensor.nbytes for tensor in own.values())
                assert told[0] <= size_bytes + 64 * len(own) * 2 * layout.num_holders


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 3), st.integers(1 << 13, 1 << 19))
def test_no_more_than_its_own_is_read_where_publishers_cut_columns(rank, bucket_bytes):
    """Each number of the rank's own once, and of the others what lies between two tensors."""
    spec = spec_of(hidden_size=512, vocab_size=4096, num_heads=8, num_kv_heads=4, mlp_size=1024)
    held = part_of_rank(spec, rank, 4)
    tensors = {name: torch.empty(shape) for name, shape in spec.parameter_shapes().items()}
    entries = make_manifest(1, tensors, shared=False, checksums=False).entries
    plan = plan_reads(
        entries,
        owners=[0],
        bucket_bytes=bucket_bytes,
        wanted=lambda owner: partial(held.wanted, by_rows=True),
    )
    moved = {name: torch.zeros(shape) for name, shape in held.table.local_shapes.items()}
    for bucket in plan:
        assert bucket.size_bytes <= bucket_bytes and all(one.is_sound for one in bucket.stretches)
        for piece in bucket.pieces:
            ones_N = torch.ones(piece.run.stop - piece.run.start)
            assert piece.stop - piece.start == ones_N.nbytes
            name = piece.placed.entry.name
            for home, values in held.views(name, moved[name], piece.run, ones_N):
                home += values
    assert all((counts == 1).all() for counts in moved.values())
    own_bytes = sum(tensor.nbytes for tensor in moved.values())
    read_bytes = sum(bucket.size_bytes for bucket in plan)
    assert read_bytes <= own_bytes + len(entries) * GAP_BYTES


@given(st.integers(0, 3), st.integers(1 << 17, 1 << 19))
def test_a_part_is_read_around_what_nobody_wants(rank, bucket_bytes):
    """Wanted numbers once and in their order; of the others no more than a gap between two. Buckets
    are filled with what is wanted, from as many places as it takes."""
    spec = spec_of(hidden_size=512, vocab_size=4096, num_heads=8, num_kv_heads=4, mlp_size=1024)
    held = part_of_rank(spec, rank, 4)
    tensors = {name: torch.empty(shape) for name, shape in spec.parameter_shapes().items()}
    entries = make_manifest(1, tensors, shared=False, checksums=False).entries
    wanted = {
        placed.entry.name: [number for run in held.wanted(placed) for number in run[:2]]
        for placed in place_part(entries, 0)
    }
    found: dict[str, list[int]] = {entry.name: [] for entry in entries}
    read_bytes = 0
    plan = plan_reads(
        entries, owners=[0], bucket_bytes=bucket_bytes, wanted=lambda owner: held.wanted
    )
    for bucket in plan:
        assert bucket.size_bytes <= bucket_bytes
        read_bytes += bucket.size_bytes
        last = bucket.pieces[0].start
        for piece in bucket.pieces:
            assert last <= piece.start <= last + GAP_BYTES
            last = piece.stop
            numbers = found[piece.placed.entry.name]
            if numbers and numbers[-1] == piece.run.start:
                numbers[-1] = piece.run.stop
            else:
                numbers += [piece.run.start, piece.run.stop]
    assert found == wanted
    assert all(bucket.size_bytes > bucket_bytes - GAP_BYTES - 64 for bucket in plan[:-1])
    assert max(len(bucket.stretches) for bucket in plan) > 1
    whole_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert read_bytes < 0.75 * whole_bytes, "matrices cut by columns come whole, others in part"


ROWS = spec_of(
    hidden_size=64, mlp_size=384, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=13
)


@pytest.mark.parametrize("source", ["tensors", "a slot that is served", "a slot of its host"])
@pytest.mark.parametrize(("num_shards", "num_ranks"), [(1, 2), (2, 2), (3, 2), (3, 4)])
def test_publishers_cut_the_columns_of_a_rank(source: str, num_shards: int, num_ranks: int) -> None:
    """In buckets that hold some rows, out of shards that begin amid a row."""
    layout = row_layout(ROWS.parameter_shapes(), num_ranks=num_shards)
    whole = numbered(ROWS)
    with (
        shared_folder() as folder,
        stores_of(folder, num_shards) as stores,
        live_servers(folder, num_shards, CUDA_IPC, bucket_bytes=4096) as lives,
    ):
        trained = {name: tensor.clone() for name, tensor in whole.items()}
        parts = [
            publish_part(
                shard_offer(layout, trained, rank, version=4),
                rank=rank,
                num_ranks=num_shards,
                store=store,
                live=live,
            )
            for rank, (store, live) in enumerate(zip(stores, lives, strict=True))
        ]
        offer = join_parts(4, 0, parts)
        for rank in range(num_ranks):
            held = part_of_rank(ROWS, rank, num_ranks)
            expected = locals_of(held, {name: one.bfloat16() for name, one in whole.items()})
            own = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
            reading = Reading(
                host_id=host_id(folder),
                folder=folder,
                preference=(CUDA_IPC, SHM),
                open_staging=Memory,
                deadline_s=20.0,
            )
            opener = PartOpener(reading)
            swap = ReadOver(offer, own, parts=opener, emit=silent, held=held)
            assert isinstance(opener.plan, ReadPlan)
            assert cut_by_rows(opener.plan) == {
                name for name in own if name.endswith(("out.weight", "down.weight"))
            }
            if source != "tensors":
                for live in lives:
                    live.withdraw()
            if source == "a slot of its host":
                for live in lives:
                    live.close()
            swap.run()
            swap.settle()
            assert same(own, expected)
            opener.close()
            if source != "tensors":
                break  # they are served no more


def cut_by_rows(plan: ReadPlan) -> set[str]:
    """The tensors of which publishers cut columns."""
    return {
        piece.placed.entry.name
        for bucket in plan.buckets
        for piece in bucket.read.pieces
        for stretch in bucket.read.stretches
        if stretch.row_bytes and stretch.at == piece.start
    }


def test_a_broadcast_is_read_whole_by_each_rank():
    """All readers take part in it."""
    whole = {name: tensor.bfloat16() for name, tensor in numbered(SPEC).items()}
    with (
        shared_folder() as folder,
        stores_of(folder, 1) as stores,
        live_servers(folder, 1, GLOO) as lives,
    ):
        offer = register(stores, whole, version=1, lives=lives)
        held = part_of_rank(SPEC, 1, 2)
        expected = locals_of(held, whole)
        own = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        reading = Reading(
            host_id=host_id(folder), folder=folder, preference=(GLOO, SHM), deadline_s=20.0
        )
        told = []
        swap = ReadOver(
            offer,
            own,
            parts=PartOpener(reading),
            emit=lambda kind, **fields: told.append((fields["transport"], fields["size_bytes"])),
            held=held,
        )
        swap.run()
        swap.settle()
        assert same(own, expected)
        assert told[0][0] == GLOO
        assert told[0][1] >= sum(tensor.nbytes for tensor in whole.values())


def verdicts(group: RankGroup, spec: ModelSpec) -> list[str]:
    """What the ranks say of a version that is whole, and with one number wrong of each rank."""
    held = TensorPart(table=model_layout(spec, group.size), group=group)
    whole = numbered(spec)
    manifest = make_manifest(3, whole, shared=False, checksums=True)
    own, found = locals_of(held, whole), []

    def ask() -> None:
        try:
            held.verify(manifest, own)
            found.append("")
        except SnapshotError as error:
            found.append(error.message)

    ask()
    for rank in range(group.size):
        for name in ("layers.0.qkv.weight", "layers.0.out.weight", "final_norm.weight"):
            last = own[name].view(-1)[-1:]  # of qkv: a value head, which neighbors may repeat
            last += 1.0 * (group.rank == rank)
            ask()
            last -= 1.0 * (group.rank == rank)
    return found


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_a_wrong_number_of_any_rank_is_found_by_all(pair: RankPool, num_kv_heads: int) -> None:
    spec = spec_of(num_heads=4, num_kv_heads=num_kv_heads, vocab_size=13)
    first, second = pair.run(verdicts, spec)
    assert first == second
    assert first[0] == ""
    names = ["layers.0.qkv.weight", "layers.0.out.weight", "final_norm.weight"] * 2
    assert len(first) == 1 + len(names)
    for name, verdict in zip(names, first[1:], strict=True):
        assert f"(1 faults): {name} does not match its checksum" in verdict


def refusals(group: RankGroup) -> list[tuple[str, str]]:
    """What each rank raises where none, one or all fail."""
    held, found = TensorPart(table=model_layout(SPEC, group.size), group=group), []
    for failing in ([], [1], [0, 1]):
        try:
            with held.agreed("version 7"):
                if group.rank in failing:
                    raise SnapshotError(f"no luck on {group.rank}")
            found.append(("", ""))
        except (InputError, SnapshotError) as error:
            found.append((type(error).__name__, error.message))
    return found


def test_what_one_rank_refuses_all_refuse(pair: RankPool) -> None:
    first, second = pair.run(refusals)
    told = "version 7 was refused by rank 1 of the engine: no luck on 1"
    assert first == [("", ""), ("InputError", told), ("SnapshotError", "no luck on 0")]
    assert second == [
        ("", ""),
        ("SnapshotError", "no luck on 1"),
        ("SnapshotError", "no luck on 1"),
    ]
