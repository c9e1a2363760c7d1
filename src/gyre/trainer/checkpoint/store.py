"""Snapshot store: the resumable states of a run on disk. In: what the ranks wrote into a folder.
Out: complete snapshots, or their faults.

    <folder>/step-00000020/manifest.json                  files, runs of tensors, sizes, checksums;
                                                          written last.
                           rank-00000.safetensors, …      each rank's parts.
                           state.json, blobs/<name>       the loop's state.

A snapshot is written into a temporary folder and renamed when its manifest is on disk; older ones
are pruned after that. The previous snapshot therefore stays intact until the new one is complete.
Only the first rank modifies the store's folder.

A damaged snapshot that a run skipped at startup does not count towards those kept. It is removed
once the run passes its step.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gyre.core.errors import SnapshotError
from gyre.core.events import Emit
from gyre.core.files import sync, write_text
from gyre.distributed.layout import BoxRun
from gyre.trainer.checkpoint.manifest import (
    BadManifest,
    SnapshotManifest,
    Stretch,
    from_text,
    to_text,
)
from gyre.trainer.checkpoint.shard_file import Damage, find_fault, read_blocks
from gyre.trainer.checkpoint.shards import Kind
from gyre.weights.boxes import copy_common

NAME = re.compile(r"step-(\d{8,})")
MANIFEST, STATE, BLOBS = "manifest.json", "state.json", "blobs"
READ_AGAIN = (
    "resume once more: every snapshot is looked through first, and the one before this is taken"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    file: str
    tensor: str  # empty where it is none of a tensor's bytes
    reason: str

    def __str__(self) -> str:
        return f"{self.file}{f', {self.tensor}' if self.tensor else ''}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A snapshot on disk: the loop's state loaded, the tensors open for reading."""

    step: int  # loop step after which it was taken
    tensors: SnapshotTensors
    state: Mapping[str, Any]
    blobs: Mapping[str, bytes]
    path: Path


class SnapshotStore:
    """The snapshots of one stage of a run. One save at a time."""

    def __init__(
        self, folder: Path, *, keep: int, emit: Emit, resumed_step: int | None = None
    ) -> None:
        """Open the store. `resumed_step`: step of the snapshot that the run resumed from, 0 for
        none; later snapshots were skipped. None: unknown."""
        assert keep > 0
        self._folder = Path(folder)
        self._keep = keep
        self._emit = emit
        self._passed = (
            ()
            if resumed_step is None
            else tuple(step for step in self.steps() if step > resumed_step)
        )

    @property
    def folder(self) -> Path:
        return self._folder

    def begin(self, step: int, nonce: str) -> Path:
        """Create the temporary folder of a snapshot. `nonce` separates it from that of an earlier
        attempt whose last threads may still run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self.remove_leftovers()
        aside = self._folder / f"writing-step-{step:08d}-{nonce}"
        (aside / BLOBS).mkdir(parents=True)
        return aside

    def publish(self, aside: Path, manifest: SnapshotManifest) -> Path:
        """Publish `aside`, which all ranks have written, as a snapshot; prune older ones."""
        sync(aside / BLOBS)
        write_text(aside / MANIFEST, to_text(manifest), durable=True)
        path = self._folder / f"step-{manifest.step:08d}"
        _refuse_foreign(path)
        if path.exists():  # a resumed run that has passed over a damaged one
            self._emit("snapshot.replaced", path=path.name)
            shutil.rmtree(path)
        os.rename(aside, path)
        sync(self._folder)
        self._passed = tuple(step for step in self._passed if step != manifest.step)
        self._prune(manifest.step)
        size_bytes = sum(file.size_bytes for file in manifest.files.values())
        ranks = sum(name.startswith("rank-") for name in manifest.files)
        self._emit(
            "snapshot.saved", step=manifest.step, path=path.name, size_bytes=size_bytes, ranks=ranks
        )
        return path

    def paths(self) -> list[Path]:
        """Return the snapshot folders on disk, complete or not, oldest first."""
        if not self._folder.is_dir():
            return []
        return sorted((p for p in self._folder.iterdir() if NAME.fullmatch(p.name)), key=step_of)

    def steps(self) -> tuple[int, ...]:
        return tuple(step_of(path) for path in self.paths())

    def skip(self, path: Path, faults: list[Fault]) -> None:
        """Record that a snapshot is skipped, with the reason."""
        first = faults[0]
        reason = "; ".join(str(fault) for fault in faults[:8])
        self._emit(
            "snapshot.skipped", path=path.name, file=first.file, tensor=first.tensor, reason=reason
        )

    def remove_leftovers(self) -> None:
        """Remove the leftovers of an interrupted save. Raises SnapshotError for files that no save
        creates."""
        for path in sorted(self._folder.glob("writing-step-*")):
            _refuse_foreign(path)
            self._emit("snapshot.leftover_removed", path=path.name)
            shutil.rmtree(path)

    def _prune(self, newest: int) -> None:
        going = steps_to_prune(self.steps(), newest=newest, passed=self._passed, keep=self._keep)
        for path in self.paths():
            if step_of(path) not in going:
                continue
            try:
                shutil.rmtree(path)
            except OSError as error:
                self._emit("snapshot.prune_failed", path=path.name, reason=str(error))
                continue
            if step_of(path) in self._passed:
                self._emit("snapshot.leftover_removed", path=path.name)


def steps_to_prune(
    steps: Sequence[int], *, newest: int, passed: Collection[int], keep: int
) -> list[int]:
    """Return which snapshots on disk, oldest first, to prune after step `newest`.

    Those with later steps are kept and not counted. Either the run has `passed` them over and will
    reach their steps again, or this thread belongs to an attempt that another has overtaken.
    """
    behind = [step for step in steps if step <= newest]
    good = [step for step in behind if step not in passed]
    return [step for step in behind if step not in good[-keep:]]


class SnapshotTensors:
    """A PartSource over a snapshot's tensors. Reads only what is requested and verifies all that it
    reads."""

    def __init__(self, path: Path, manifest: SnapshotManifest) -> None:
        self._path = path
        self._manifest = manifest

    def kinds(self) -> dict[str, Kind]:
        return {name: tensor.kind for name, tensor in self._manifest.tensors.items()}

    def read(self, name: str, run: BoxRun, out_N: Tensor) -> None:
        tensor = self._manifest.tensors[name]
        dtype, columns = tensor.kind.dtype, math.prod(tensor.kind.shape[1:])
        for saved in tensor.runs:
            begin = saved.run.start
            low, high = ((at - begin) * dtype.itemsize for at in saved.run.reach(run, columns))
            if low == high:
                continue
            try:
                for at, block in read_blocks(self._path / saved.file, saved.extent, low, high):
                    cut = block[max(low - at, 0) : high - at]
                    values_N = torch.frombuffer(cut, dtype=dtype)
                    first = begin + max(low, at) // dtype.itemsize
                    found = replace(saved.run, start=first, stop=first + len(values_N))
                    copy_common(out_N, run, values_N, found, num_columns=columns)
            except Damage as damage:
                raise SnapshotError(
                    f"snapshot {self._path}: {saved.file}, {name}: {damage}", hint=READ_AGAIN
                ) from damage


def load(path: Path) -> Snapshot:
    """Open a snapshot that was found intact. Raises SnapshotError if it no longer is."""
    try:
        manifest = _read_manifest(path)
        blobs = {
            name.removeprefix(f"{BLOBS}/"): name
            for name in manifest.files
            if name.startswith(f"{BLOBS}/")
        }
        return Snapshot(
            step=step_of(path),
            tensors=SnapshotTensors(path, manifest),
            state=json.loads(_read_file(path, STATE, manifest)),
            blobs={key: _read_file(path, name, manifest) for key, name in blobs.items()},
            path=path,
        )
    except (BadManifest, Damage) as fault:
        raise SnapshotError(f"snapshot {path}: {fault}", hint=READ_AGAIN) from fault


def find_faults(path: Path, *, share: int = 0, num_shares: int = 1) -> list[Fault]:
    """Compare a snapshot's files with its manifest; an empty list means it is intact. All shares
    together verify every byte."""
    try:
        manifest = _read_manifest(path)
    except BadManifest as fault:
        return [Fault(file=MANIFEST, tensor="", reason=str(fault))]
    faults = []
    for name, file in manifest.files.items():
        size_bytes = (path / name).stat().st_size if (path / name).is_file() else -1
        if size_bytes != file.size_bytes:
            got = (
                "is not there"
                if size_bytes < 0
                else f"has {size_bytes} bytes, its manifest says {file.size_bytes}"
            )
            faults.append(Fault(file=name, tensor="", reason=got))
    if faults:
        return faults
    for stretch in _deal(manifest, share, num_shares):
        if (reason := find_fault(path / stretch.file, stretch.extent)) is not None:
            faults.append(Fault(file=stretch.file, tensor=stretch.tensor, reason=reason))
    return faults


def join_faults(shares: Iterable[Sequence[Fault]]) -> list[Fault]:
    """Merge the faults of all shares without duplicates. Every share reports a missing file, since
    a node may miss one that another has."""
    return list(dict.fromkeys(fault for faults in shares for fault in faults))


def _refuse_foreign(path: Path) -> None:
    """Raise SnapshotError for links and files: a save creates only folders, so these belong to
    others and stay."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        what = "a link" if path.is_symlink() else "no folder"
        raise SnapshotError(
            f"{path} is {what}, and a snapshot would be written there", hint="move it away"
        )


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _deal(manifest: SnapshotManifest, share: int, num_shares: int) -> list[Stretch]:
    """Return the stretches of one share; shares have about equal bytes."""
    stretches = list(manifest.stretches())
    total, at, mine = sum(stretch.extent.size_bytes for stretch in stretches), 0, []
    for stretch in stretches:
        if min(num_shares - 1, at * num_shares // max(1, total)) == share:
            mine.append(stretch)
        at += stretch.extent.size_bytes
    return mine


def _read_manifest(path: Path) -> SnapshotManifest:
    try:
        return from_text((path / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadManifest(f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadManifest(f"cannot be read: {error}") from error


def _read_file(path: Path, name: str, manifest: SnapshotManifest) -> bytes:
    if name not in manifest.files:
        raise Damage(f"{name} is not there")
    extent = manifest.files[name].head
    return b"".join(
        bytes(block) for _, block in read_blocks(path / name, extent, 0, extent.size_bytes)
    )
