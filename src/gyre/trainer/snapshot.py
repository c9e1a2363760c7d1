"""Snapshot store: the resumable state of a run on disk. In: named tensors, a JSON-able state, named byte blobs.
Out: the newest whole snapshot, or None. Callers: loop, through wire.

    <folder>/step-00000020/manifest.json      sizes and checksums of the files below
                           tensors.safetensors, state.json, blobs/<name>

A snapshot is written aside, each file fsynced, renamed, and read back before older ones are pruned. So whatever
happens while one is written, the one before it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from gyre.core.errors import SnapshotError
from gyre.trainer.tensorfile import FileSum, write_bytes, write_tensors

FORMAT = 1
NAME = re.compile(r"step-(\d{8,})")
READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What `save` was given, back from disk."""

    step: int  # loop step after which it was taken
    tensors: Mapping[str, Tensor]  # on the CPU
    state: Mapping[str, Any]
    blobs: Mapping[str, bytes]
    path: Path


class SnapshotStore:
    """The snapshots of one run. One writer at a time."""

    def __init__(self, folder: Path, *, keep: int, emit: Callable[..., None]) -> None:
        assert keep > 0
        self._folder, self._keep, self._emit = Path(folder), keep, emit

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        blobs: Mapping[str, bytes],
    ) -> Path:
        """Write a snapshot and return its folder. On SnapshotError nothing of it is left and nothing else changed."""
        path = self._folder / f"step-{step:08d}"
        aside = self._folder / f"writing-{path.name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            _write_all(aside, step, tensors, state, blobs)
            faults = find_faults(aside)
            if faults:
                raise SnapshotError(
                    f"snapshot of step {step} read back from {self._folder} is not what was written: {faults[0]}",
                    hint="the disk returns other bytes than it was given: check it, or point the run folder elsewhere",
                )
            self._put_in_place(aside, path)
        except OSError as error:
            raise _cannot_write(step, self._folder, error) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        self._prune()
        size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        self._emit("snapshot.saved", step=step, path=path.name, size_bytes=size_bytes)
        return path

    def load_latest(self) -> Snapshot | None:
        """Read the newest snapshot that is whole. Each one passed over is an event that says why."""
        for path in reversed(self._paths()):
            faults = find_faults(path)
            if not faults:
                return self.load(path)
            self._emit("snapshot.skipped", path=path.name, reason="; ".join(faults))
        return None

    def steps(self) -> tuple[int, ...]:
        """Steps of the snapshots on disk, whole or not, ascending."""
        return tuple(_step_of(path) for path in self._paths())

    def load(self, path: Path) -> Snapshot:
        """Read a snapshot that `load_latest` found whole."""
        files = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["files"]
        blobs = {name.removeprefix("blobs/"): (path / name).read_bytes() for name in files if name.startswith("blobs/")}
        return Snapshot(
            step=_step_of(path),
            tensors=safetensors.torch.load_file(path / "tensors.safetensors"),
            state=json.loads((path / "state.json").read_text(encoding="utf-8")),
            blobs=blobs,
            path=path,
        )

    def _paths(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        return sorted((p for p in self._folder.iterdir() if NAME.fullmatch(p.name)), key=_step_of)

    def _put_in_place(self, aside: Path, path: Path) -> None:
        """Give the finished folder its name. One of that name is there when a resumed run passes a torn snapshot."""
        if path.exists():
            self._emit("snapshot.replaced", path=path.name)
            shutil.rmtree(path)
        os.rename(aside, path)
        _sync_folder(self._folder)

    def _remove_leftovers(self) -> None:
        """Remove what a killed process was writing."""
        for path in sorted(self._folder.glob("writing-step-*")):
            self._emit("snapshot.leftover_removed", path=path.name)
            shutil.rmtree(path)

    def _prune(self) -> None:
        for path in self._paths()[: -self._keep]:
            try:
                shutil.rmtree(path)
            except OSError as error:
                self._emit("snapshot.prune_failed", path=path.name, reason=str(error))


def find_faults(path: Path) -> list[str]:
    """Compare a snapshot's files with its manifest. An empty list means that it is whole."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        written_format = manifest["format"]
        files = {name: FileSum(**entry) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"manifest.json cannot be read: {error!r}"]
    if written_format != FORMAT:
        return [f"format {written_format}, this version reads {FORMAT}"]
    faults = []
    for name, written in files.items():
        try:
            got = _sum_file(path / name)
        except OSError as error:
            faults.append(f"{name} cannot be read: {error.strerror}")
            continue
        if got.size_bytes != written.size_bytes:
            faults.append(f"{name} has {got.size_bytes} bytes, its manifest says {written.size_bytes}")
        elif got.blake2b != written.blake2b:
            faults.append(f"{name} does not match its checksum")
    return faults


def _write_all(
    aside: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> None:
    (aside / "blobs").mkdir(parents=True)
    files = {"tensors.safetensors": write_tensors(aside / "tensors.safetensors", tensors)}
    files["state.json"] = write_bytes(aside / "state.json", json.dumps(state, allow_nan=True).encode())
    for name, blob in blobs.items():
        assert "/" not in name and name not in (".", ".."), name
        files[f"blobs/{name}"] = write_bytes(aside / "blobs" / name, blob)
    entries = {name: {"size_bytes": file.size_bytes, "blake2b": file.blake2b} for name, file in files.items()}
    manifest = {"format": FORMAT, "step": step, "files": entries}
    write_bytes(aside / "manifest.json", json.dumps(manifest, indent=1).encode())
    _sync_folder(aside / "blobs")
    _sync_folder(aside)


def _sum_file(path: Path) -> FileSum:
    digest, size = hashlib.blake2b(digest_size=16), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileSum(size_bytes=size, blake2b=digest.hexdigest())


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(step: int, folder: Path, error: OSError) -> SnapshotError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return SnapshotError(
        f"snapshot of step {step} could not be written to {folder}: {error.strerror or error}",
        hint="free space there and resume from the snapshot before it; snapshot.keep = 1 needs the least space"
        if full
        else "check that the folder can be written, then resume from the snapshot before it",
    )
