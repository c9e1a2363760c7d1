"""Shards: every number is held once, and comes back to where it was, whatever shapes, ranks and
bucket sizes."""

from __future__ import annotations

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gyre.core.errors import ConfigError
from gyre.core.records import Manifest
from gyre.distributed.config import ParallelConfig
from gyre.distributed.layout import BoxRun, find_gap
from gyre.distributed.mesh import Splitter, shard_size
from gyre.distributed.process_group import RankGroup, alone
from gyre.kernels.checksum import as_hex, checksums
from gyre.models.layout import model_layout
from gyre.weights.boxes import views
from gyre.weights.gather import ShardSource, TensorRun, homes_of
from gyre.weights.manifest import find_faults, segment_run, shard_entries
from gyre.weights.shards import (
    ALIGN,
    ShardLayout,
    align,
    plan_gather,
    row_layout,
    slice_layout,
    whole_layout,
)
from gyre.weights.swap import GatherOver
from layout_cases import held_by, numbered, spec_of

SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6
)


def starts_of(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, int], int]:
    starts, at = {}, 0
    for name, shape in shapes.items():
        starts[name] = at
        at += align(math.prod(shape))
    return starts, at


@st.composite
def layouts(draw) -> tuple[ShardLayout, frozenset[str]]:
    shapes = {f"t{i}": shape for i, shape in enumerate(draw(SHAPES))}
    num_ranks = draw(st.integers(1, 5))
    last = list(shapes)[-1]
    replicated = frozenset([last]) if draw(st.booleans()) and len(shapes) > 1 else frozenset()
    if draw(st.booleans()):
        return row_layout(shapes, num_ranks=num_ranks, replicated=replicated), replicated
    starts, size = starts_of(
        {name: shape for name, shape in shapes.items() if name not in replicated}
    )
    whole = align(size, num_ranks * ALIGN)
    starts |= dict.fromkeys(replicated, whole)
    return slice_layout(
        shapes, starts, whole, num_ranks=num_ranks, replicated=replicated
    ), replicated


@given(layouts())
def test_every_number_is_held_once(case):
    layout, replicated = case
    for name, shape in layout.shapes.items():
        held = np.zeros(math.prod(shape), dtype=int)
        for places in layout.ranks:
            held[places[name].start : places[name].stop] += 1
        assert (held == (len(layout.ranks) if name in replicated else 1)).all()
    for places in layout.ranks:
        taken = np.zeros(layout.size, dtype=int)
        for place in places.values():
            assert place.at + place.stop - place.start <= layout.size
            taken[place.at : place.at + place.stop - place.start] += 1
        assert taken.max(initial=0) <= 1


@given(layouts(), st.integers(1, 400))
def test_what_is_gathered_is_what_was_there(case, numbers_per_bucket):
    layout, _ = case
    rng = np.random.default_rng(0)
    whole = {name: rng.random(math.prod(shape)) for name, shape in layout.shapes.items()}
    buffers = [np.full(layout.size, np.nan) for _ in layout.ranks]
    for buffer, places in zip(buffers, layout.ranks, strict=True):
        for name, place in places.items():
            buffer[place.at : place.at + place.stop - place.start] = whole[name][
                place.start : place.stop
            ]
    back = {name: np.full(len(values), np.nan) for name, values in whole.items()}
    step = max(ALIGN, numbers_per_bucket // len(layout.ranks))
    at = 0
    for bucket in plan_gather(layout, numbers_per_bucket=numbers_per_bucket):
        assert bucket.size <= step
        low = bucket.landings[0].at - bucket.landings[0].offset
        assert low >= at
        at = low + bucket.size
        for landing in bucket.landings:
            start, stop = landing.run.start, landing.run.stop
            assert landing.run.columns is None and landing.at == low + landing.offset
            place = layout.ranks[landing.rank][landing.name]
            assert landing.at - place.at == start - place.start
            got = buffers[landing.rank][landing.at : landing.at + stop - start]
            assert np.isnan(back[landing.name][start:stop]).all(), "a number lands once"
            back[landing.name][start:stop] = got
    for name, values in whole.items():
        np.testing.assert_array_equal(back[name], values)


@given(layouts())
def test_one_tensor_rank_is_registered_in_runs_of_whole_tensors(case):
    layout, replicated = case
    for entry in shard_entries(layout, torch.float32):
        held = [(rank, places[entry.name]) for rank, places in enumerate(layout.ranks)]
        runs = [(rank, p.start, p.stop) for rank, p in held if p.start < p.stop]
        runs = runs[:1] if entry.name in replicated else runs
        assert [(s.owner, s.start, s.stop) for s in entry.segments] == runs
        assert all(s.columns is None and s.checksum is None for s in entry.segments)


@given(SHAPES, st.integers(1, 6))
def test_rows_are_cut_as_torch_cuts_them(shapes, num_ranks):
    named = {f"t{i}": shape for i, shape in enumerate(shapes)}
    layout = row_layout(named, num_ranks=num_ranks)
    for name, shape in named.items():
        tensor = torch.arange(math.prod(shape)).view(shape)
        chunks = torch.chunk(tensor, num_ranks)
        for rank, places in enumerate(layout.ranks):
            chunk = chunks[rank].reshape(-1) if rank < len(chunks) else tensor.new_empty(0)
            assert torch.equal(tensor.view(-1)[places[name].start : places[name].stop], chunk)


class Wire:
    """All-gathers of ranks that are threads. Numbers arrive when they are waited for and not
    before, from where the sender has them then."""

    def __init__(self, size: int) -> None:
        self.began: list[dict[int, torch.Tensor]] = []
        self.barrier = threading.Barrier(size, timeout=20.0)
        self.lock = threading.Lock()
        self.log: list[tuple[str, int]] = []  # of rank 0

    def begin(self, rank: int, index: int, x_SN: torch.Tensor, own_N: torch.Tensor):
        with self.lock:
            self.began += [{} for _ in range(index + 1 - len(self.began))]
            self.began[index][rank] = own_N
        self.log += [("begin", index)] if rank == 0 else []
        sent_N = own_N.clone()  # may be a slice of x_SN
        x_SN.fill_(float("nan"))
        own_N.copy_(sent_N)

        def wait() -> None:
            self.log += [("end", index)] if rank == 0 else []
            self.barrier.wait()
            x_SN.copy_(
                torch.cat([self.began[index][sender] for sender in range(self.barrier.parties)])
            )
            self.barrier.wait()

        return wait


class WiredGroup(RankGroup):
    def __init__(self, wire: Wire, rank: int) -> None:
        super().__init__(
            name="wired", rank=rank, size=wire.barrier.parties, device=torch.device("cpu")
        )
        self._wire, self._count = wire, itertools.count()

    def begin_all_gather(self, x_SN: torch.Tensor, own_N: torch.Tensor):
        return self._wire.begin(self.rank, next(self._count), x_SN, own_N)


@settings(deadline=None, max_examples=50)
@given(layouts(), st.integers(1, 400))
def test_a_bucket_travels_while_the_one_before_is_written(case, bucket_bytes):
    """Each is begun before the runs of the last are handed out, and its room is not touched while
    it is under way."""
    layout, _ = case
    size = len(layout.ranks)
    assume(size > 1)
    whole = {name: torch.randn(shape) for name, shape in layout.shapes.items()}
    wire, got = (
        Wire(size),
        [
            {name: torch.full(shape, torch.nan) for name, shape in layout.shapes.items()}
            for _ in range(size)
        ],
    )

    def gather(rank: int) -> None:
        own = {
            name: whole[name].view(-1)[place.start : place.stop]
            for name, place in layout.ranks[rank].items()
        }
        source = ShardSource(layout, own, group=WiredGroup(wire, rank), dtype=torch.float32)
        source.gather_into({} if rank == 1 else got[rank], bucket_bytes=bucket_bytes)

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(gather, range(size)))
    for rank in set(range(size)) - {1}:
        assert all(torch.equal(got[rank][name], tensor) for name, tensor in whole.items())
    count = len(wire.began)
    in_order = [("begin", 0)] if count else []
    for index in range(count):
        in_order += ([("begin", index + 1)] if index + 1 < count else []) + [("end", index)]
    assert wire.log == in_order


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["qwen2", "qwen3"]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3),
    st.integers(1, 400),
)
def test_whole_tensors_come_back_from_tensor_ranks(family, num_tensor_ranks, num_shards, bucket):
    """Gathered into an engine's tensors, and undone; the manifest's segments are what each rank
    holds."""
    spec = spec_of(family, num_heads=8, num_kv_heads=2, vocab_size=13)
    whole, model = numbered(spec), model_layout(spec, num_tensor_ranks)
    layout = replace(row_layout(model.local_shapes, num_ranks=num_shards), table=model)
    size, wire = layout.num_holders, Wire(layout.num_holders)
    assert size == num_tensor_ranks * num_shards
    got = [{name: torch.full_like(tensor, -1.0) for name, tensor in whole.items()} for _ in "ab"]
    undone = {name: tensor.clone() for name, tensor in got[0].items()}
    swap = []

    def gather(rank: int) -> None:
        group = WiredGroup(wire, rank) if size > 1 else alone()
        own = held_by(layout, whole, rank)
        source = ShardSource(layout, own, group=group, dtype=torch.float32)
        if rank == 0:
            swap.append(GatherOver(1, source, got[0], emit=lambda kind, **fields: None))
            swap[0].run()
        else:
            source.gather_into(got[1] if rank == 1 else {}, bucket_bytes=256 << 20)

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(gather, range(size)))
    assert all(torch.equal(got[0][name], tensor) for name, tensor in whole.items())
    assert size == 1 or all(torch.equal(got[1][name], tensor) for name, tensor in whole.items())
    swap[0].undo()
    assert all(torch.equal(got[0][name], tensor) for name, tensor in undone.items())

    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    flat = [flat_of(layout, held_by(layout, whole, rank), rank) for rank in range(size)]
    for part in plan_gather(layout, numbers_per_bucket=bucket):
        at = part.landings[0].at - part.landings[0].offset
        for landing in part.landings:
            assert landing.at == at + landing.offset
            count = landing.run.stop - landing.run.start
            values_N = flat[landing.rank][landing.at : landing.at + count]
            named = (landing.name, landing.run)
            assert not any(view.isfinite().any() for view in views(back[landing.name], landing.run))
            for home, value in zip(*homes_of(back, [TensorRun(*named, values_N)]), strict=True):
                home.copy_(value)
    assert all(torch.equal(back[name], tensor) for name, tensor in whole.items())


def flat_of(layout: ShardLayout, own: dict[str, torch.Tensor], rank: int) -> torch.Tensor:
    """A rank's flat buffer."""
    flat = torch.full((layout.size,), torch.nan)
    for name, place in layout.ranks[rank // len(layout.model.ranks)].items():
        flat[place.at : place.at + place.stop - place.start] = own[name]
    return flat


@settings(deadline=None, max_examples=25)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))
def test_a_manifest_names_the_box_and_owner_of_every_number(num_tensor_ranks, num_shards):
    spec = spec_of("qwen2", num_heads=8, num_kv_heads=2, vocab_size=13)
    whole, model = numbered(spec), model_layout(spec, num_tensor_ranks)
    layout = replace(row_layout(model.local_shapes, num_ranks=num_shards), table=model)
    entries = shard_entries(layout, torch.float32)
    assert {entry.name: entry.shape for entry in entries} == spec.parameter_shapes()
    summed = []
    for entry in entries:
        runs = [BoxRun(start=s.start, stop=s.stop, columns=s.columns) for s in entry.segments]
        assert find_gap(entry.shape, runs) is None
        cut = num_tensor_ranks > 1 and entry.name.endswith((".out.weight", ".down.weight"))
        assert all((run.columns is not None) == cut for run in runs)
        segments = []
        for segment, run in zip(entry.segments, runs, strict=True):
            own = held_by(layout, whole, segment.owner)[entry.name]
            place = layout.ranks[segment.owner // num_tensor_ranks][entry.name]
            at = next(
                at - place.at
                for name, owned, at in layout.owned(segment.owner)
                if (name, owned) == (entry.name, run)
            )
            values_N = own[at : at + run.stop - run.start]
            assert torch.equal(
                torch.cat([view.reshape(-1) for view in views(whole[entry.name], run)]), values_N
            )
            total = int(checksums([segment_run(entry, segment, values_N)]))
            segments.append(replace(segment, checksum=as_hex(total)))
        summed.append(replace(entry, segments=tuple(segments)))
    manifest = Manifest(version=1, entries=tuple(summed), shared=False)
    assert find_faults(manifest, whole) == []
    changed = {**whole, "layers.0.down.weight": whole["layers.0.down.weight"].flip(1)}
    (fault,) = find_faults(manifest, changed)
    assert fault.startswith("layers.0.down.weight does not match its checksum")


def test_one_process_gathers_from_itself():
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    starts, size = starts_of(shapes)
    source = ShardSource(
        whole_layout(shapes, starts, size), tensors, group=alone(), dtype=torch.bfloat16
    )
    into = {name: torch.zeros(shape) for name, shape in shapes.items()}
    assert source.gather_into(into, bucket_bytes=8) == 68
    assert all(
        torch.equal(into[name], tensor.bfloat16().float()) for name, tensor in tensors.items()
    )


def test_a_rank_reads_its_own_runs_of_what_lies_in_shards():
    whole = {"a": torch.randn(5, 3), "b": torch.randn(4)}
    layout = row_layout({name: tuple(tensor.shape) for name, tensor in whole.items()}, num_ranks=2)
    for rank in range(2):
        own = {
            name: whole[name].view(-1)[place.start : place.stop]
            for name, place in layout.ranks[rank].items()
        }
        source = ShardSource(layout, own, group=WiredGroup(Wire(2), rank), dtype=torch.bfloat16)
        assert source.shapes == layout.shapes
        for name, place in layout.ranks[rank].items():
            got_N = torch.zeros(place.stop - place.start)
            source.read(name, place.start, place.stop, got_N)
            assert torch.equal(got_N, own[name].bfloat16().float())
        with pytest.raises(AssertionError, match="not this rank's"):
            source.read("a", 0, 15, torch.zeros(15))


def test_copies_must_be_whole():
    assert [shard_size(8, n) for n in (0, 1, 2, 4, 8)] == [8, 1, 2, 4, 8]
    for bad in (3, 16):
        with pytest.raises(
            ConfigError, match=f"parallel.shard_ranks = {bad}: 8 ranks do not divide"
        ) as found:
            shard_size(8, bad)
        assert "1, 2, 4, 8" in found.value.hint


def test_one_process_holds_everything_whatever_is_asked():
    split = Splitter(alone(), ParallelConfig(zero=3)).split("actor")
    assert not split.shards_state and not split.shards_weights
