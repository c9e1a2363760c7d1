"""Layout: the boxes of all tensor ranks tile each tensor once; any layout written is read by any
other; a rank's local tensors are those of a smaller model."""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gyre.core.errors import ConfigError, SnapshotError
from gyre.distributed.layout import Box, BoxRun, ModelLayout, find_gap, whole_model
from gyre.models.decoder import Decoder
from gyre.models.hub.checkpoint import Checkpoint
from gyre.models.hub.export import export_hub, export_runs
from gyre.models.hub.verify import verify_runs
from gyre.models.init import FreshWeights
from gyre.models.layout import local_spec, model_layout
from gyre.models.spec import ModelSpec
from gyre.weights.boxes import copy_common, local_source
from gyre.weights.shards import row_layout
from gyre.weights.tensor_source import LiveTensors, fill
from layout_cases import numbered, spec_of

RANKS = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def specs(draw) -> ModelSpec:
    kv_heads, group = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4]))
    return spec_of(
        draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        vocab_size=draw(st.integers(5, 23)),
        hidden_size=draw(st.integers(1, 7)),
        num_layers=draw(st.integers(1, 2)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        mlp_size=draw(st.sampled_from([4, 6, 8, 24])),
        tied=draw(st.booleans()),
    )


def fits(spec: ModelSpec, num_ranks: int) -> bool:
    kv_heads = spec.num_kv_heads
    return not (
        spec.num_heads % num_ranks
        or spec.mlp_size % num_ranks
        or (kv_heads % num_ranks and num_ranks % kv_heads)
    )


@st.composite
def tables(draw) -> tuple[ModelSpec, ModelLayout]:
    spec, num_ranks = draw(specs()), draw(RANKS)
    assume(fits(spec, num_ranks))
    return spec, model_layout(spec, num_ranks)


Written = list[tuple[str, BoxRun, Tensor]]


def write(whole: dict[str, Tensor], layout: ModelLayout, num_shards: int) -> Written:
    """What each coordinate holds, read through the table, as runs of whole tensors, each once."""
    written = []
    shards = row_layout(layout.local_shapes, num_ranks=num_shards)
    for rank in range(len(layout.ranks)):
        source = local_source(LiveTensors(whole), layout, rank)
        for places in shards.ranks:
            for name, place in places.items():
                own_N = torch.full((place.stop - place.start,), math.nan)
                fill({name: own_N}, places, source, dtype=torch.float32)
                for run, at, owner in layout.runs(rank, name, place.start, place.stop):
                    values_N = own_N[at - place.start : at - place.start + run.stop - run.start]
                    if owner == rank:
                        written.append((name, run, values_N))
    return written


class Runs:
    """A TensorSource over what was written."""

    def __init__(self, written: Written, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes, self._written = shapes, written

    def read(self, name: str, start: int, stop: int, out_N: Tensor) -> None:
        columns, wanted = math.prod(self.shapes[name][1:]), BoxRun(start=start, stop=stop)
        copied = [
            copy_common(out_N, wanted, values_N, run, num_columns=columns)
            for found, run, values_N in self._written
            if found == name
        ]
        assert sum(copied) == stop - start


@given(tables(), st.integers(1, 5))
def test_boxes_of_a_replica_tile_each_tensor_once(case, num_shards):
    _, layout = case
    shards = row_layout(layout.local_shapes, num_ranks=num_shards)
    for name, shape in layout.shapes.items():
        held = np.zeros((shape[0], math.prod(shape[1:])), dtype=int)
        runs = []
        for rank in range(len(layout.ranks)):
            for places in shards.ranks:
                place = places[name]
                for run, _, owner in layout.runs(rank, name, place.start, place.stop):
                    if owner == rank:
                        runs.append(run)
                        for part, _ in run.rectangles(held.shape[1]):
                            held[part.row : part.end_row, part.left : part.right] += 1
        assert (held == 1).all(), name
        assert find_gap(shape, runs) is None
        assert find_gap(shape, runs[1:]) is not None
        assert find_gap(shape, [*runs, runs[-1]]) is not None


@given(tables())
def test_boxes_of_a_rank_are_its_local_tensors(case):
    spec, layout = case
    assert layout.local_shapes == local_spec(spec, len(layout.ranks)).parameter_shapes()
    for rank, boxes in enumerate(layout.ranks):
        for name, shape in layout.local_shapes.items():
            taken = np.zeros(shape[0], dtype=int)
            for box in boxes[name]:
                columns = box.columns or (0, math.prod(layout.shapes[name][1:]))
                assert columns[1] - columns[0] == math.prod(shape[1:])
                taken[box.at : box.at + box.rows] += 1
                assert box.owner <= rank
                assert box in layout.ranks[box.owner][name]
            padded = name in ("embed.weight", "head.weight")
            assert taken.max() <= 1 and (padded or taken.min() == 1), name


@given(specs())
def test_one_rank_holds_whole_tensors(spec):
    layout, shapes = model_layout(spec, 1), spec.parameter_shapes()
    assert layout == whole_model(shapes) and local_spec(spec, 1) == spec
    for name, shape in shapes.items():
        assert layout.ranks[0][name] == (Box(start=0, rows=shape[0], at=0),)
        run, at, owner = next(layout.runs(0, name, 0, 1))
        assert (run, at, owner) == (BoxRun(start=0, stop=1), 0, 0)
    source = LiveTensors({})
    assert local_source(source, layout, 0) is source


@given(specs(), RANKS, RANKS, st.integers(1, 4), st.integers(1, 4))
def test_any_layout_is_read_by_any_other(spec, ranks, other_ranks, shards, other_shards):
    assume(fits(spec, ranks) and fits(spec, other_ranks))
    whole = numbered(spec)
    first = write(whole, model_layout(spec, ranks), shards)
    again = Runs(first, spec.parameter_shapes())
    read = {name: torch.full(tensor.shape, math.nan) for name, tensor in whole.items()}
    for name, tensor in read.items():
        again.read(name, 0, tensor.numel(), tensor.view(-1))
        assert torch.equal(tensor, whole[name]), name
    second = write(read, model_layout(spec, other_ranks), other_shards)
    direct = write(whole, model_layout(spec, other_ranks), other_shards)
    assert [entry[:2] for entry in second] == [entry[:2] for entry in direct]
    for (name, run, values_N), (_, _, direct_N) in zip(second, direct, strict=True):
        assert torch.equal(values_N, direct_N), (name, run)
        out_N = torch.full_like(values_N, math.nan)
        columns = math.prod(spec.parameter_shapes()[name][1:])
        copied = sum(
            copy_common(out_N, run, found_N, held, num_columns=columns)
            for found, held, found_N in first
            if found == name
        )
        assert copied == len(out_N) and torch.equal(out_N, values_N), (name, run)


@settings(max_examples=25)  # each draw starts threads
@given(tables(), st.integers(0, 9))
def test_fresh_weights_are_the_same_numbers_at_any_layout(case, seed):
    spec, layout = case
    fresh = FreshWeights(spec, seed)
    for rank, boxes in enumerate(layout.ranks):
        source = local_source(fresh, layout, rank)
        for name, shape in layout.local_shapes.items():
            local, whole = torch.full(shape, math.nan), torch.empty(layout.shapes[name])
            source.read(name, 0, local.numel(), local.view(-1))
            fresh.read(name, 0, whole.numel(), whole.view(-1))
            rest = torch.ones(shape[0], dtype=torch.bool)
            for box in boxes[name]:
                rows = whole[box.start : box.start + box.rows]
                cut = rows[:, slice(*box.columns)] if box.columns else rows
                assert torch.equal(local[box.at : box.at + box.rows], cut)
                rest[box.at : box.at + box.rows] = False
            assert (local[rest] == 0).all()  # padding


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_an_export_has_the_same_bytes_at_any_layout(tmp_path, num_ranks, num_shards):
    spec = spec_of("qwen2", num_heads=8, num_kv_heads=2, vocab_size=13)
    whole = numbered(spec)
    runs = write(whole, model_layout(spec, num_ranks), num_shards)
    given = {"dtype": torch.bfloat16, "tokenizer_files": None}
    export_runs(spec, lambda: reversed(runs), tmp_path / "cut", **given)
    decoder = Decoder(spec, device=torch.device("cpu"), dtype=torch.float32)
    for name, parameter in decoder.named_parameters():
        parameter.data.copy_(whole[name])
    export_hub(decoder, tmp_path / "whole", **given)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "cut").iterdir())
    for name in files:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    verify_runs(tmp_path / "cut", spec, runs)
    changed = [(name, run, values_N + 512.0) for name, run, values_N in runs if "down" in name]
    with pytest.raises(SnapshotError, match=r"layers\.0\.down\.weight is not that of the model"):
        verify_runs(tmp_path / "cut", spec, changed)
    with closing(Checkpoint(tmp_path / "cut")) as checkpoint:
        for rank in range(num_ranks):
            source = local_source(checkpoint, model_layout(spec, num_ranks), rank)
            direct = local_source(LiveTensors(whole), model_layout(spec, num_ranks), rank)
            for name, shape in source.shapes.items():
                read, wanted = torch.empty(shape), torch.empty(shape)
                source.read(name, 0, read.numel(), read.view(-1))
                direct.read(name, 0, read.numel(), wanted.view(-1))
                assert torch.equal(read, wanted.bfloat16().float())


@given(specs(), RANKS)
def test_what_does_not_divide_is_refused_by_name(spec, num_ranks):
    assume(not fits(spec, num_ranks))
    with pytest.raises(ConfigError, match=r"heads|MLP columns") as refused:
        model_layout(spec, num_ranks)
    accepted = [n for n in range(1, 17) if n <= spec.num_heads and fits(spec, n)]
    assert refused.value.hint == f"this model takes {', '.join(map(str, accepted))} tensor ranks"
