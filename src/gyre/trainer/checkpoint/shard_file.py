"""Shard file: one rank's part of a snapshot, in one safetensors file. In: a path, Parts on any
device. Out: the synced file, with size, offsets and a checksum per block, or its first fault.

Written without the safetensors package: checksums are computed block by block on the bytes passed
to the disk, and a full disk raises OSError with its errno. The package can read the file. The
checksum is zlib's CRC-32: it detects disk faults and is several times as fast as a cryptographic
hash.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import torch
from torch import Tensor

from gyre.trainer.checkpoint.shards import Part

BLOCK_BYTES = 16 << 20  # that one checksum covers, and that pass through the host at a time
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A byte range of a file."""

    at: int  # bytes
    size_bytes: int
    crc32: tuple[int, ...]  # of each BLOCK_BYTES, the last one shorter

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Yield (offset within the extent, bytes, checksum)."""
        for index, crc32 in enumerate(self.crc32):
            low = index * BLOCK_BYTES
            yield low, min(BLOCK_BYTES, self.size_bytes - low), crc32


def write_shard(path: Path, parts: Sequence[Part], check: Callable[[], None]) -> list[Extent]:
    """Write the parts and read them back. Returns one extent for the header and one per part.

    `check` is called before every block and may raise. Raises OSError when the disk refuses, and
    ReadBackError when the bytes read differ.
    """
    with open(path, "wb", buffering=0) as file:
        extents = [_write(file, 0, _cut(_header(parts)), check)]
        for part in parts:
            at = extents[-1].at + extents[-1].size_bytes
            extents.append(_write(file, at, _blocks(part.values_N), check))
        os.fsync(file.fileno())
        # what is read back comes from the disk
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for extent in extents:
        if (fault := find_fault(path, extent, check)) is not None:
            raise ReadBackError(f"{path.name} read back is not what was written: {fault}")
    return extents


def write_bytes(path: Path, data: bytes) -> Extent:
    """Write a small file, synced and verified by reading it back."""
    with open(path, "wb", buffering=0) as file:
        extent = _write(file, 0, _cut(data), lambda: None)
        os.fsync(file.fileno())
    if (fault := find_fault(path, extent, lambda: None)) is not None:
        raise ReadBackError(f"{path.name} read back is not what was written: {fault}")
    return extent


def find_fault(path: Path, extent: Extent, check: Callable[[], None] = lambda: None) -> str | None:
    """Return how the bytes on disk differ from those written, or None."""
    try:
        for _ in read_blocks(path, extent, 0, extent.size_bytes):
            check()
    except Damage as damage:
        return str(damage)
    return None


class ReadBackError(OSError):
    """The bytes read back differ from those written."""


class Damage(Exception):
    """Bytes are missing or differ from those written."""


def read_blocks(
    path: Path, extent: Extent, first: int, last: int
) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset within the extent, bytes) of the verified blocks that cover bytes [first,
    last). Raises Damage."""
    try:
        with open(path, "rb", buffering=0) as file:
            buffer = memoryview(bytearray(min(BLOCK_BYTES, extent.size_bytes)))
            for low, size, crc32 in extent.blocks():
                if low + size <= first or low >= last:
                    continue
                block, got = buffer[:size], 0
                file.seek(extent.at + low)
                while got < size and (count := file.readinto(block[got:])):
                    got += count
                if got < size:
                    raise Damage(f"the file ends {size - got} bytes early")
                if zlib.crc32(block) != crc32:
                    raise Damage(
                        f"bytes {extent.at + low} to {extent.at + low + size} do not match their "
                        "checksum"
                    )
                yield low, block
    except OSError as error:
        raise Damage(f"cannot be read: {error.strerror or error}") from error


def _header(parts: Sequence[Part]) -> bytes:
    entries, at = {}, 0
    for part in parts:
        numbers = part.values_N.numel()
        entries[part.key] = {
            "dtype": DTYPE_NAMES[part.values_N.dtype],
            "shape": list(part.shape) if _is_whole(part) else [numbers],
            "data_offsets": [at, at + part.size_bytes],
        }
        at += part.size_bytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _is_whole(part: Part) -> bool:
    return part.values_N.numel() == torch.Size(part.shape).numel()


def _write(
    file: RawIOBase, at: int, blocks: Iterator[memoryview], check: Callable[[], None]
) -> Extent:
    sums, size_bytes = [], 0
    for block in blocks:
        check()
        sums.append(zlib.crc32(block))
        size_bytes += len(block)
        while block:
            block = block[file.write(block) or 0 :]
    return Extent(at=at, size_bytes=size_bytes, crc32=tuple(sums))


def _cut(data: bytes) -> Iterator[memoryview]:
    for low in range(0, len(data), BLOCK_BYTES):
        yield memoryview(data)[low : low + BLOCK_BYTES]


def _blocks(values_N: Tensor) -> Iterator[memoryview]:
    """Yield the bytes in order, copied through the host."""
    if not values_N.numel():
        return
    for block in values_N.detach().split(BLOCK_BYTES // values_N.element_size()):
        host = block.cpu().contiguous()
        # Tensor.numpy() would mark the storage as not resizable, for good
        yield memoryview((ctypes.c_ubyte * host.nbytes).from_address(host.data_ptr())).cast("B")
