"""Tensor file: streams tensors into one safetensors file. In: a path and named tensors (any device, any strides).
Out: the file, fsynced, with its size and checksum. Caller: trainer.snapshot.

Written here rather than by the safetensors package so that a checksum is taken of the bytes handed to the disk, one
tensor at a time, and a full disk is an OSError with its number. The package reads the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """What must be on disk."""

    size_bytes: int
    blake2b: str  # 32 hex digits


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes in row-major order, copied only when it isn't contiguous on the CPU."""
    host = tensor.detach().cpu().contiguous().reshape(-1)
    return host.view(torch.uint8).numpy().data if host.numel() else memoryview(b"")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileSum:
    header: dict[str, dict] = {}
    at = 0
    for name, tensor in tensors.items():
        stop = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return _stream(path, _tensor_parts(text, tensors))


def _tensor_parts(header: bytes, tensors: Mapping[str, Tensor]) -> Iterable[bytes | memoryview]:
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        yield tensor_bytes(tensor)


def write_bytes(path: Path, data: bytes) -> FileSum:
    return _stream(path, (data,))


def _stream(path: Path, parts: Iterable[bytes | memoryview]) -> FileSum:
    digest, size = hashlib.blake2b(digest_size=16), 0
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            left = memoryview(part)
            digest.update(left)
            size += len(left)
            while left:
                left = left[file.write(left) :]
        os.fsync(file.fileno())
    return FileSum(size_bytes=size, blake2b=digest.hexdigest())
