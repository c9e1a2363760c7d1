"""Hub tensors: safetensors files that are filled in any order, from runs of our parameters. In: the
hub tensors of each file, then runs. Out: the files; a checksum of each tensor on disk; the tensors
that differ from the runs.

The safetensors package writes a file from whole tensors in memory. Here the header comes first, and
each run is written to its position on arrival, through at most BLOCK_BYTES of host memory. The
package reads the files.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gyre.distributed.layout import BoxRun
from gyre.models.names import HubEntry

BLOCK_BYTES = 16 << 20
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def plan_shards(sizes_bytes: Sequence[int], shard_bytes: int) -> list[list[int]]:
    """Return indices by shard, in order. A shard exceeds `shard_bytes` only for a single larger
    tensor."""
    shards: list[list[int]] = [[]]
    used = 0
    for i, size in enumerate(sizes_bytes):
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(i)
        used += size
    return shards


class HubTensors:
    """Open files, each with a header and space for its tensors. A context manager."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Sequence[HubEntry]],
        dtype: torch.dtype,
        *,
        new: bool = True,
    ) -> None:
        """Open the files. `new` creates them; otherwise they exist and are only read."""
        self._dtype = dtype
        self._handles = list[int]()
        # hub name → handle, offset in the file, bytes
        self._at: dict[str, tuple[int, int, int]] = {}
        self._entries: dict[str, list[HubEntry]] = {}  # by our parameter
        try:
            for name, entries in files.items():
                self._open(folder / name, entries, new)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> HubTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def write(self, name: str, run: BoxRun, values_N: Tensor) -> None:
        """Write a run of our parameter's numbers to their positions."""
        for handle, at, block_N in self._places(name, run, values_N):
            data, done = _bytes_of(block_N), 0
            while done < len(data):
                done += os.pwrite(handle, data[done:], at + done)

    def differs(self, name: str, run: BoxRun, values_N: Tensor) -> bool:
        """Return whether the files hold other bytes for these numbers."""
        return any(
            os.pread(handle, block_N.nbytes, at) != _bytes_of(block_N)
            for handle, at, block_N in self._places(name, run, values_N)
        )

    def checksums(self) -> dict[str, str]:
        """Return 16 hex digits of blake2b over each hub tensor's bytes on disk, equal to
        `export.checksum`."""
        found = {}
        for hub_name, (handle, at, size_bytes) in self._at.items():
            digest = hashlib.blake2b(digest_size=8)
            for low in range(0, size_bytes, BLOCK_BYTES):
                digest.update(os.pread(handle, min(BLOCK_BYTES, size_bytes - low), at + low))
            found[hub_name] = digest.hexdigest()
        return found

    def _open(self, path: Path, entries: Sequence[HubEntry], new: bool) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at, places = 0, {}
        for entry in entries:
            size_bytes = torch.Size(entry.shape).numel() * self._dtype.itemsize
            offsets = [at, at + size_bytes]
            header[entry.hub_name] = {
                "dtype": DTYPE_NAMES[self._dtype],
                "shape": list(entry.shape),
                "data_offsets": offsets,
            }
            places[entry.hub_name] = (at, size_bytes)
            at += size_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        first = len(text) + 8
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC if new else os.O_RDONLY, 0o644)
        self._handles.append(handle)
        if new:
            os.ftruncate(handle, first + at)
            os.pwrite(handle, len(text).to_bytes(8, "little") + text, 0)
        for entry in entries:
            offset, size_bytes = places[entry.hub_name]
            self._at[entry.hub_name] = (handle, first + offset, size_bytes)
            self._entries.setdefault(entry.name, []).append(entry)

    def _places(
        self, name: str, run: BoxRun, values_N: Tensor
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (file, offset, values on the host) of a run, in blocks."""
        if run.columns is not None:
            values_N = values_N.cpu()  # once, since each row of the columns is a block
        columns = torch.Size(self._entries[name][0].shape[1:]).numel()
        for start, stop, at in run.whole_runs(columns):
            yield from self._blocks(name, start, stop, values_N[at : at + stop - start])

    def _blocks(
        self, name: str, start: int, stop: int, values_N: Tensor
    ) -> Iterator[tuple[int, int, Tensor]]:
        item, step = self._dtype.itemsize, BLOCK_BYTES // self._dtype.itemsize
        for entry in self._entries[name]:
            row = torch.Size(entry.shape[1:]).numel()
            low, high = max(start, entry.row_start * row), min(stop, entry.row_stop * row)
            handle, at, _ = self._at[entry.hub_name]
            for first in range(low, high, step):
                last = min(high, first + step)
                block_N = values_N[first - start : last - start].to(self._dtype).cpu().contiguous()
                yield handle, at + (first - entry.row_start * row) * item, block_N


def _bytes_of(host_N: Tensor) -> memoryview:
    """Return the tensor's bytes. Tensor.numpy() would permanently mark the storage as not
    resizable."""
    return memoryview((ctypes.c_ubyte * host_N.nbytes).from_address(host_N.data_ptr())).cast("B")
