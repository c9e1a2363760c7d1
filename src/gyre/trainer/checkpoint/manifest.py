"""Snapshot manifest: the files of a snapshot, and the location of each tensor's runs in them. In:
what each rank wrote, or the text of manifest.json. Out: the other. Pure.

    {"crc32": of the body's text,
     "body": {"format": 2, "step": n, "files": {...}, "tensors": {...}}}
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gyre.distributed.layout import BoxRun, find_gap
from gyre.trainer.checkpoint.shard_file import BLOCK_BYTES, DTYPE_NAMES, DTYPES, Extent
from gyre.trainer.checkpoint.shards import Kind, Part

FORMAT = 2
OLD_FORMAT = (
    "is of format 1, written whole by one process before snapshots were sharded; this "
    "version cannot read it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    size_bytes: int
    head: Extent  # what belongs to no tensor: a shard file's header, the whole of another file


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A run of a tensor's numbers and its location in a file."""

    file: str
    run: BoxRun
    extent: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    kind: Kind  # of the whole tensor
    runs: tuple[SavedRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A byte range covered by one set of checksums."""

    file: str
    tensor: str  # empty: of no tensor
    extent: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotManifest:
    """Manifest of a whole snapshot, or of one rank's part."""

    step: int
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, SavedTensor]

    def stretches(self) -> Iterator[Stretch]:
        """Return each byte of every file exactly once."""
        for name, file in self.files.items():
            yield Stretch(file=name, tensor="", extent=file.head)
        for name, tensor in self.tensors.items():
            for run in tensor.runs:
                yield Stretch(file=run.file, tensor=name, extent=run.extent)


class BadManifest(Exception):
    """Describes an invalid manifest."""


def saved_tensors(
    file: str, parts: Iterable[Part], extents: Iterable[Extent]
) -> dict[str, SavedTensor]:
    """Return what one rank's file holds. A rank may have several parts of a tensor."""
    found: dict[str, SavedTensor] = {}
    for part, extent in zip(parts, extents, strict=True):
        before = found[part.name].runs if part.name in found else ()
        saved = SavedRun(file=file, run=part.run, extent=extent)
        kind = Kind(dtype=part.values_N.dtype, shape=part.shape)
        found[part.name] = SavedTensor(kind=kind, runs=(*before, saved))
    return found


def join_manifests(parts: Iterable[SnapshotManifest]) -> SnapshotManifest:
    """Join the ranks' manifests into that of the snapshot. The ranks' runs must cover each tensor
    exactly once."""
    files: dict[str, SavedFile] = {}
    tensors: dict[str, SavedTensor] = {}
    step = -1
    for part in parts:
        step = part.step
        files |= part.files
        for name, tensor in part.tensors.items():
            before = tensors[name].runs if name in tensors else ()
            tensors[name] = SavedTensor(kind=tensor.kind, runs=(*before, *tensor.runs))
    whole = SnapshotManifest(step=step, files=files, tensors=tensors)
    gap = _find_gap(whole)
    assert gap is None, gap
    return whole


def to_text(manifest: SnapshotManifest) -> str:
    body = {
        "format": FORMAT,
        "step": manifest.step,
        "block_bytes": BLOCK_BYTES,
        "files": {
            name: {"size_bytes": file.size_bytes, "head": asdict(file.head)}
            for name, file in manifest.files.items()
        },
        "tensors": {
            name: {
                "dtype": DTYPE_NAMES[tensor.kind.dtype],
                "shape": list(tensor.kind.shape),
                "runs": [
                    {"file": saved.file, **_run_body(saved.run), **asdict(saved.extent)}
                    for saved in tensor.runs
                ],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    text = json.dumps(body)
    return f'{{"crc32": {zlib.crc32(text.encode())}, "body": {text}}}\n'


def from_text(text: str, *, whole: bool = True) -> SnapshotManifest:
    """Parse the manifest of a snapshot or of one rank's part. Raises BadManifest."""
    try:
        content = json.loads(text)
        if content.get("format") == 1:
            raise BadManifest(OLD_FORMAT)
        body = content["body"]
        if zlib.crc32(json.dumps(body).encode()) != content["crc32"]:
            raise BadManifest("does not match its checksum")
        if body["format"] != FORMAT or body["block_bytes"] != BLOCK_BYTES:
            raise BadManifest(f"is of format {body['format']}, this version reads {FORMAT}")
        manifest = _from_body(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadManifest(f"cannot be read: {error!r}") from error
    if whole and (gap := _find_gap(manifest)) is not None:
        raise BadManifest(gap)
    return manifest


def _from_body(body: Mapping[str, Any]) -> SnapshotManifest:
    return SnapshotManifest(
        step=body["step"],
        files={
            name: SavedFile(size_bytes=file["size_bytes"], head=_extent(file["head"]))
            for name, file in body["files"].items()
        },
        tensors={
            name: SavedTensor(
                kind=Kind(dtype=DTYPES[tensor["dtype"]], shape=tuple(tensor["shape"])),
                runs=tuple(
                    SavedRun(file=run["file"], run=_run(run), extent=_extent(run))
                    for run in tensor["runs"]
                ),
            )
            for name, tensor in body["tensors"].items()
        },
    )


def _run_body(run: BoxRun) -> dict[str, Any]:
    cut = {} if run.columns is None else {"columns": list(run.columns)}
    return {"start": run.start, "stop": run.stop, **cut}


def _run(body: Mapping[str, Any]) -> BoxRun:
    columns = tuple(body["columns"]) if "columns" in body else None
    return BoxRun(start=body["start"], stop=body["stop"], columns=columns)


def _extent(body: Mapping[str, Any]) -> Extent:
    return Extent(at=body["at"], size_bytes=body["size_bytes"], crc32=tuple(body["crc32"]))


def _find_gap(manifest: SnapshotManifest) -> str | None:
    for name, tensor in manifest.tensors.items():
        gap = find_gap(tensor.kind.shape, [saved.run for saved in tensor.runs])
        if gap is not None:
            return f"{name} is not whole: {gap}"
    return None
