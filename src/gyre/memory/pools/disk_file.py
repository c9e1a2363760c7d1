"""Disk file: one component's bytes in one raw file, with a manifest of checksums beside it.

In: flat uint8 tensors (segments) in a fixed order. Out: the same bytes, or SnapshotError naming the
component. Written to a temporary file, fsynced, read back and compared before the rename.

Both directions go through one staging buffer of at most STAGING_BYTES, so the disk tier needs
almost no host memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from gyre.core.errors import MemoryBudgetError, SnapshotError
from gyre.core.files import partial_path, replacing, sync
from gyre.memory.pools.host_buffer import HostBuffer
from gyre.memory.records import STAGING_BYTES


class DiskFile:
    """`<folder>/<name>.bin` and `<name>.json`. No file stays open between calls."""

    def __init__(self, folder: Path, name: str) -> None:
        assert "/" not in name, name
        self.name = name
        self.data_path = folder / f"{name}.bin"
        self.manifest_path = folder / f"{name}.json"
        self._manifest: dict | None = None

    def size_bytes(self) -> int:
        return self.data_path.stat().st_size if self.data_path.exists() else 0

    def remove(self) -> None:
        if self.data_path.parent.is_dir():
            for path in (self.data_path, self.manifest_path, partial_path(self.data_path)):
                path.unlink(missing_ok=True)
        self._manifest = None

    def write(self, segments: Sequence[Tensor]) -> None:
        """Store the segments. On return they are on disk and verified by reading back; on error
        nothing is left."""
        try:
            self.data_path.parent.mkdir(parents=True, exist_ok=True)
            # synced here: each of the two files once, their folder once for both
            with replacing(self.data_path, durable=False) as aside:
                checksums = self._write_data(aside, segments)
                manifest = {
                    "component": self.name,
                    "size_bytes": sum(segment.numel() for segment in segments),
                    "segments": [
                        {"size_bytes": segment.numel(), "blake2b": checksum}
                        for segment, checksum in zip(segments, checksums, strict=True)
                    ],
                }
                self._check_written(aside, manifest)
                with replacing(self.manifest_path, durable=False) as manifest_aside:
                    manifest_aside.write_text(json.dumps(manifest), encoding="utf-8")
                    sync(manifest_aside)
            sync(self.data_path.parent)
        except OSError as error:
            self.remove()
            raise MemoryBudgetError(
                f"{self.name}: could not be written to {self.data_path}: {error.strerror or error}",
                hint="free space there, or point memory.disk_folder at a larger disk",
            ) from error
        self._manifest = manifest

    def read(self, segments: Sequence[Tensor]) -> None:
        """Fill the segments. Raises SnapshotError when file or manifest differ from what was
        written."""
        manifest = self._read_manifest()
        sizes = [segment.numel() for segment in segments]
        assert sizes == [entry["size_bytes"] for entry in manifest["segments"]], self.name
        if (got := self.size_bytes()) != manifest["size_bytes"]:
            self._refuse(
                f"{self.data_path} has {got} bytes, its manifest says {manifest['size_bytes']}"
            )
        try:
            self._read_data(segments, [entry["blake2b"] for entry in manifest["segments"]])
        except OSError as error:
            self._refuse(f"{self.data_path} cannot be read: {error.strerror or error}")

    def map(self) -> list[Tensor]:
        """Return the segments mapped rather than read, without allocating host memory. Verifies
        their checksums first; raises SnapshotError as `read` does."""
        manifest = self._read_manifest()
        try:
            self._check_written(self.data_path, manifest)
            sizes = [entry["size_bytes"] for entry in manifest["segments"]]
            mapped = torch.from_file(
                str(self.data_path), shared=False, size=sum(sizes), dtype=torch.uint8
            )
        except OSError as error:
            self._refuse(f"{self.data_path} cannot be read: {error.strerror or error}")
        return list(mapped.split(sizes))

    def _read_data(self, segments: Sequence[Tensor], checksums: Sequence[str]) -> None:
        with (
            open(self.data_path, "rb", buffering=0) as file,
            _Staging(segments, self.name) as staging,
        ):
            for index, (segment, checksum) in enumerate(zip(segments, checksums, strict=True)):
                digest = hashlib.blake2b(digest_size=8)
                for part in segment.split(STAGING_BYTES):
                    host = staging.view(part)
                    _read_exactly(file, host)
                    digest.update(_raw(host))
                    if host is not part:
                        part.copy_(host)
                if digest.hexdigest() != checksum:
                    self._refuse(
                        f"bytes of segment {index} in {self.data_path} do not match their checksum"
                    )

    def _write_data(self, path: Path, segments: Sequence[Tensor]) -> list[str]:
        checksums = []
        with open(path, "wb", buffering=0) as file, _Staging(segments, self.name) as staging:
            for segment in segments:
                digest = hashlib.blake2b(digest_size=8)
                for part in segment.split(STAGING_BYTES):
                    host = staging.view(part)
                    if host is not part:
                        host.copy_(part)
                    digest.update(_raw(host))
                    write_all(file, host)
                checksums.append(digest.hexdigest())
            os.fsync(file.fileno())
        return checksums

    def _check_written(self, path: Path, manifest: dict) -> None:
        """Read the file back and compare it while the source still exists."""
        with open(path, "rb") as file:
            for index, entry in enumerate(manifest["segments"]):
                digest, left = hashlib.blake2b(digest_size=8), entry["size_bytes"]
                while left > 0 and (block := file.read(min(left, 8 << 20))):
                    digest.update(block)
                    left -= len(block)
                if left or digest.hexdigest() != entry["blake2b"]:
                    self._refuse(f"segment {index} read back from {path} is not what was written")

    def _read_manifest(self) -> dict:
        assert self._manifest is not None, f"{self.name}: read before write"
        try:
            found = json.loads(self.manifest_path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            self._refuse(f"its manifest {self.manifest_path} cannot be read: {error}")
        if found != self._manifest:
            self._refuse(f"its manifest {self.manifest_path} is not the one that was written")
        return self._manifest

    def _refuse(self, what: str) -> NoReturn:
        raise SnapshotError(
            f"component {self.name} cannot be reloaded from disk: {what}",
            hint="check the disk under memory.disk_folder, then resume the run from its last "
            "snapshot",
        )


class _Staging:
    """Host memory for reads and writes: the segment itself on a CPU, a pinned buffer for a
    device."""

    def __init__(self, segments: Sequence[Tensor], owner: str) -> None:
        sizes = [segment.numel() for segment in segments if segment.device.type != "cpu"]
        self._buffer = (
            HostBuffer(min(max(sizes), STAGING_BYTES), pin=True, owner=owner)
            if any(sizes)
            else None
        )

    def __enter__(self) -> _Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self._buffer = None

    def view(self, part: Tensor) -> Tensor:
        return (
            part
            if self._buffer is None or part.device.type == "cpu"
            else self._buffer.bytes[: part.numel()]
        )


def _raw(host: Tensor) -> memoryview:
    """Return the tensor's bytes. `Tensor.numpy()` would permanently mark the storage as not
    resizable."""
    return memoryview((ctypes.c_ubyte * host.numel()).from_address(host.data_ptr())).cast("B")


def write_all(file, host: Tensor) -> None:
    left = _raw(host)
    while left:
        left = left[file.write(left) :]


def _read_exactly(file, host: Tensor) -> None:
    left = _raw(host)
    while left:
        count = file.readinto(left)
        if not count:
            raise OSError("the file ended early")
        left = left[count:]
