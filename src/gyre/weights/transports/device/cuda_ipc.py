"""CUDA IPC: device memory that other processes of the host open. In: a size; or a handle of 64
bytes. Out: bytes on a device, shared until they are closed.

The memory is of the driver's plain allocator, and of nothing else: virtual memory, which the
engine's and the trainer's weights have, cannot be exported. A process cannot open its own handle.
Memory of another GPU is mapped over NVLink or PCIe, if the two GPUs are peers.
"""

# N bytes

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import torch
from torch import Tensor

from gyre.core.errors import InputError, MemoryBudgetError

HANDLE_BYTES = 64
OUT_OF_MEMORY = 2
PEER_UNSUPPORTED = 217
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Staging(Protocol):
    """Memory that two processes have."""

    bytes_N: Tensor  # uint8

    @property
    def handle(self) -> bytes:
        """Return what another process opens it by: at most 256 bytes, filled up with zeros."""
        ...

    def close(self) -> None:
        """End the use here. Who opened it closes first."""
        ...


class _Handle(ctypes.Structure):
    """CUipcMemHandle: 64 bytes, passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


_POINTER = ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemAlloc_v2": (ctypes.POINTER(_POINTER), ctypes.c_size_t),
    "cuMemFree_v2": (_POINTER,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _POINTER),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_POINTER), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class CudaStaging:
    """Memory that this process allocated, or opened."""

    def __init__(self, device: torch.device, size_bytes: int, handle: bytes = b"") -> None:
        """Allocate it; or open another process's by its handle. MemoryBudgetError without room,
        InputError where it cannot be opened."""
        if device.type != "cuda":
            raise InputError(
                f"cuda-ipc is for memory of GPUs, and this process works on {device}",
                hint="use shared memory (shm), or a group over gloo",
            )
        self._device = device
        self._is_opened = bool(handle)
        self._library = _load()
        self._address = self._open(handle) if handle else self._allocate(size_bytes)
        self.bytes_N = bytes_at(device, self._address, size_bytes)

    @property
    def handle(self) -> bytes:
        found = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(found), self._address)
        return bytes(found)

    def close(self) -> None:
        self.bytes_N = torch.empty(0, dtype=torch.uint8)
        self._call("cuIpcCloseMemHandle" if self._is_opened else "cuMemFree_v2", self._address)

    def _allocate(self, size_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), size_bytes)
        return address.value

    def _open(self, handle: bytes) -> int:
        address, given = ctypes.c_uint64(), _Handle.from_buffer_copy(handle[:HANDLE_BYTES])
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, LAZY_PEER_ACCESS)
        return address.value

    def _call(self, name: str, *arguments: Any) -> None:
        with torch.cuda.device(self._device):
            # binds the device's context to this thread, which the driver's functions need
            torch.cuda.synchronize(self._device)
            code = int(getattr(self._library, name)(*arguments))
        if code == OUT_OF_MEMORY:
            raise MemoryBudgetError(
                f"no room on {self._device} for staging buckets of weights",
                hint="leave more to them, or set cluster.weight_transport = 'shm'",
            )
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            known = text.value.decode() if text.value else f"CUDA error {code}"
            peers = ": the two GPUs are no peers" if code == PEER_UNSUPPORTED else ""
            raise InputError(
                f"{name} failed on {self._device} with {known}{peers}",
                hint="read the version from its slot: cluster.weight_transport = 'shm'",
            )


def bytes_at(device: torch.device, address: int, size_bytes: int) -> Tensor:
    """Return bytes at an address as a tensor of this device, which does not own them. They may be
    another GPU's, which this process need not see: a copy by address finds them."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    storage = torch._C._construct_storage_from_data_pointer(address, device, size_bytes)
    found = torch.empty(0, dtype=torch.uint8, device=device)
    return found.set_(storage, 0, (size_bytes,))  # pyright: ignore


def open_cuda(device: torch.device, size_bytes: int, handle: bytes) -> CudaStaging:
    """Open another process's memory."""
    return CudaStaging(device, size_bytes, handle)


def _load() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = list(arguments), ctypes.c_int
    except (OSError, AttributeError) as error:
        raise InputError(
            f"cuda-ipc needs NVIDIA's driver: {error}", hint="use shared memory (shm)"
        ) from error
    return library
