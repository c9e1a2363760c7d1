"""Shards: every number is held once, and comes back to where it was, whatever shapes, ranks and
bucket sizes."""

from __future__ import annotations

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gyre.core.errors import ConfigError
from gyre.distributed.config import ParallelConfig
from gyre.distributed.mesh import Splitter, shard_size
from gyre.distributed.process_group import RankGroup, alone
from gyre.weights.gather import ShardSource
from gyre.weights.shards import (
    ALIGN,
    ShardLayout,
    align,
    plan_gather,
    row_layout,
    slice_layout,
    whole_layout,
)

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
        low = (
            bucket.landings[0].start
            - layout.ranks[bucket.landings[0].rank][bucket.landings[0].name].start
        )
        low += (
            layout.ranks[bucket.landings[0].rank][bucket.landings[0].name].at
            - bucket.landings[0].offset
        )
        assert low >= at
        at = low + bucket.size
        for landing in bucket.landings:
            got = buffers[landing.rank][
                low + landing.offset : low + landing.offset + landing.stop - landing.start
            ]
            assert np.isnan(back[landing.name][landing.start : landing.stop]).all(), (
                "a number lands once"
            )
            back[landing.name][landing.start : landing.stop] = got
    for name, values in whole.items():
        np.testing.assert_array_equal(back[name], values)


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
        x_SN.fill_(float("nan"))

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
