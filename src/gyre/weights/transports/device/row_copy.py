"""Row copy: rows of host memory into a GPU's, by its copy engine. In: rows at a pitch in
page-locked memory. Out: the same rows, one behind the other on the device.

torch would copy them together on the host first.
"""

# R rows, B bytes of a row

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

HOST, DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE


class _Side(ctypes.Structure):
    """One side of a CUDA_MEMCPY2D."""

    _fields_ = (
        ("x_bytes", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch_bytes", ctypes.c_size_t),
    )


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source", _Side),
        ("destination", _Side),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


def copy_rows(host_RB: Tensor, device_RB: Tensor, stream: torch.cuda.Stream) -> None:
    """Copy bytes on the stream, whose device is current. RuntimeError where CUDA refuses."""
    assert host_RB.dtype == device_RB.dtype == torch.uint8 and host_RB.shape == device_RB.shape
    rows, width = host_RB.shape
    stream.query()  # binds the device's context to this thread, which the driver's function needs
    found = _Copy(
        source=_Side(kind=HOST, host=host_RB.data_ptr(), pitch_bytes=host_RB.stride(0)),
        destination=_Side(
            kind=DEVICE, device=device_RB.data_ptr(), pitch_bytes=device_RB.stride(0)
        ),
        width_bytes=width,
        height=rows,
    )
    code = _load().cuMemcpy2DAsync_v2(ctypes.byref(found), stream.cuda_stream)
    if code:
        raise RuntimeError(f"cuMemcpy2DAsync of {rows} rows of {width} bytes: CUDA error {code}")


@cache
def _load() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    function = library.cuMemcpy2DAsync_v2
    function.argtypes = [ctypes.POINTER(_Copy), ctypes.c_void_p]
    function.restype = ctypes.c_int
    return library
