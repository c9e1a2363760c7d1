"""Snapshots over tensor ranks: the files of any layout are read by any other, and those of one
tensor rank are what they were before there was a tensor axis."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gyre.core.errors import SnapshotError
from gyre.distributed.layout import BoxRun, ModelLayout, whole_model
from gyre.distributed.process_group import alone
from gyre.models.layout import model_layout
from gyre.trainer.checkpoint import shard_file
from gyre.trainer.checkpoint.manifest import (
    BadManifest,
    SavedFile,
    SavedTensor,
    SnapshotManifest,
    from_text,
    join_manifests,
    saved_tensors,
    to_text,
)
from gyre.trainer.checkpoint.shard_file import write_shard
from gyre.trainer.checkpoint.shards import HeldParts, Holding, Part
from gyre.trainer.checkpoint.store import SnapshotTensors
from gyre.weights.boxes import local_source
from gyre.weights.shards import row_layout
from gyre.weights.tensor_source import LiveTensors, fill
from layout_cases import numbered, spec_of

SPEC = spec_of(family="qwen2", num_heads=8, num_kv_heads=2, vocab_size=13, hidden_size=5)
WHOLE = numbered(SPEC)
LAYOUTS = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 3))


def holdings(model: ModelLayout, num_shards: int, *, blank: bool) -> Iterator[Holding]:
    """Each coordinate's share of the model."""
    layout = replace(row_layout(model.local_shapes, num_ranks=num_shards), table=model)
    for tensor_rank in range(len(model.ranks)):
        for rank, places in enumerate(layout.ranks):
            tensors = {
                name: torch.full((place.stop - place.start,), float("nan"))
                for name, place in places.items()
            }
            if not blank:
                source = local_source(LiveTensors(WHOLE), model, tensor_rank)
                fill(tensors, places, source, dtype=torch.float32)
            yield Holding(
                component="actor",
                prefix="actor.",
                layout=layout,
                rank=rank,
                tensor_rank=tensor_rank,
                sharers=alone(),
                dtype=torch.float32,
                tensors=tensors,
            )


def saved(folder: Path, step: int, shares: Iterator[Holding]) -> SnapshotManifest:
    """The files of all ranks, joined as a save joins them."""
    found = []
    for rank, holding in enumerate(shares):
        name, parts = f"rank-{rank:05d}.safetensors", holding.parts(holding.named())
        assert [part.size_bytes for part in parts] == holding.sizes_bytes()
        head, *extents = write_shard(folder / name, parts, lambda: None)
        tensors = saved_tensors(name, parts, extents)
        files = {name: SavedFile(size_bytes=(folder / name).stat().st_size, head=head)}
        found.append(SnapshotManifest(step=step, files=files, tensors=tensors))
    return from_text(to_text(join_manifests(found)))


@settings(max_examples=20, deadline=None)
@given(LAYOUTS, LAYOUTS, st.sampled_from([64, 1 << 20]))
def test_any_snapshot_is_loaded_at_any_layout(written, wanted, block_bytes):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(shard_file, "BLOCK_BYTES", block_bytes)
        folder = Path(name)
        manifest = saved(
            folder, 1, holdings(model_layout(SPEC, written[0]), written[1], blank=False)
        )
        assert {n: t.kind.shape for n, t in manifest.tensors.items()} == {
            f"actor.{n}": shape for n, shape in SPEC.parameter_shapes().items()
        }
        source, model = SnapshotTensors(folder, manifest), model_layout(SPEC, wanted[0])
        shares = zip(
            holdings(model, wanted[1], blank=True),
            holdings(model, wanted[1], blank=False),
            strict=True,
        )
        for loaded, direct in shares:
            loaded.load(source)
            for tensor, value in loaded.tensors.items():
                assert torch.equal(value, direct.tensors[tensor]), tensor


@given(LAYOUTS)
def test_parts_in_memory_are_read_whole(written):
    shares = holdings(model_layout(SPEC, written[0]), written[1], blank=False)
    parts = [part for holding in shares for part in holding.parts(holding.named())]
    assert len({part.key for part in parts}) == len(parts)
    for name, tensor in WHOLE.items():
        read = torch.full((tensor.numel(),), float("nan"))
        HeldParts(parts).read(f"actor.{name}", BoxRun(start=0, stop=len(read)), read)
        assert torch.equal(read, tensor.view(-1))
    fewer = [part for part in parts if part.name != "actor.layers.0.down.weight"]
    down = [part for part in parts if part.name == "actor.layers.0.down.weight"]
    with pytest.raises(SnapshotError, match="of the 40 numbers of"):
        HeldParts([*fewer, *down[:-1], part_of(0)]).read(
            "actor.layers.0.down.weight", BoxRun(start=0, stop=40), torch.empty(40)
        )


def part_of(numbers: int) -> Part:
    shape = SPEC.parameter_shapes()["layers.0.down.weight"]
    empty = torch.empty(numbers)
    return Part(name="actor.layers.0.down.weight", shape=shape, start=0, values_N=empty)


def test_one_tensor_rank_writes_runs_of_whole_tensors(tmp_path):
    """The bytes of a manifest of format 2, as written before the tensor axis."""
    shapes = SPEC.parameter_shapes()
    assert model_layout(SPEC, 1) == whole_model(shapes)
    manifest = saved(tmp_path, 3, holdings(whole_model(shapes), 2, blank=False))
    body = json.loads(to_text(manifest))["body"]
    assert body["format"] == 2
    for name, shape in shapes.items():
        tensor = body["tensors"][f"actor.{name}"]
        assert tensor["shape"] == list(shape)
        for run in tensor["runs"]:
            assert list(run) == ["file", "start", "stop", "at", "size_bytes", "crc32"]
            count = run["stop"] - run["start"]
            raw = (tmp_path / run["file"]).read_bytes()[run["at"] : run["at"] + run["size_bytes"]]
            whole: Tensor = WHOLE[name].view(-1)[run["start"] : run["stop"]]
            assert run["size_bytes"] == 4 * count and raw == whole.numpy().tobytes()
            header = (tmp_path / run["file"]).read_bytes()
            assert f"actor.{name}[{run['start']}:{run['stop']}]".encode() in header


def test_a_manifest_that_lacks_columns_is_refused(tmp_path):
    manifest = saved(tmp_path, 1, holdings(model_layout(SPEC, 2), 1, blank=False))
    body = json.loads(to_text(manifest))["body"]
    runs = body["tensors"]["actor.layers.0.out.weight"]["runs"]
    assert [run["columns"] for run in runs] == [[0, 8], [8, 16]]
    tensor = manifest.tensors["actor.layers.0.out.weight"]
    cut = SavedTensor(kind=tensor.kind, runs=tensor.runs[:1])
    broken = SnapshotManifest(
        step=1,
        files=manifest.files,
        tensors={**manifest.tensors, "actor.layers.0.out.weight": cut},
    )
    with pytest.raises(BadManifest, match="ends after 8 of 16 columns"):
        from_text(to_text(broken))
