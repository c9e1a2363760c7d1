"""A CUDA driver for virtual memory without a GPU: the same C functions over host memory, with
strict accounts.

Every call is checked against the rules of the real one: whole granules, one mapping per range, no
mapping without physical memory, access before use, nothing unmapped while streams may run, nothing
released or freed twice. Memory behind a range is garbage when it comes and is overwritten when it
goes, as it may be on a device. Without access rights or mapping, a range is inaccessible to the
process: a touch ends it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from gyre.memory.pools.cuda_vmm import AccessDesc, AllocationProp, Driver, Location

GRANULE = 1 << 14
ORDINAL = 3
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
NO_ACCESS, ACCESS, PRIVATE_ANONYMOUS, FIXED = 0, 3, 0x22, 0x10


def behind(reference: Any) -> Any:
    """The object that a `ctypes.byref` refers to."""
    return reference._obj


@dataclass
class Range:
    size: int
    handle: int | None = None
    accessible: bool = False


class FakeLibrary:
    """The functions that `virtual.SIGNATURES` names. `fail` maps a function to the CUresult that
    its next call gives; it then does nothing."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.ranges: dict[int, Range] = {}
        self.handles: dict[int, int] = {}  # handle → size
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []
        self.quiet = True  # whether every stream has been waited for since memory was last mapped
        self._next_handle = 0x7000

    @property
    def used_bytes(self) -> int:
        return sum(self.handles.values())

    def _enter(self, name: str) -> int:
        self.calls.append(name)
        return self.fail.pop(name, 0)

    def cuGetErrorName(self, code: int, text) -> int:
        names = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 1: b"CUDA_ERROR_INVALID_VALUE"}
        if code not in names:
            return 1
        behind(text).value = names[code]
        return 0

    def cuMemGetAllocationGranularity(self, size, prop, option: int) -> int:
        check_prop(behind(prop))
        assert option == 0
        behind(size).value = GRANULE
        return self._enter("cuMemGetAllocationGranularity")

    def cuMemAddressReserve(
        self, pointer, size: int, alignment: int, address: int, flags: int
    ) -> int:
        assert size > 0 and size % GRANULE == 0 and (alignment, address, flags) == (0, 0, 0)
        if code := self._enter("cuMemAddressReserve"):
            return code
        at = LIBC.mmap(None, size, NO_ACCESS, PRIVATE_ANONYMOUS, -1, 0)
        assert at not in (None, ctypes.c_void_p(-1).value)
        self.ranges[at] = Range(size)
        behind(pointer).value = at
        return 0

    def cuMemAddressFree(self, address: int, size: int) -> int:
        found = self.ranges[address]
        assert found.size == size and found.handle is None, "freed while mapped, or in part"
        if code := self._enter("cuMemAddressFree"):
            return code
        del self.ranges[address]
        assert LIBC.munmap(address, size) == 0
        return 0

    def cuMemCreate(self, handle, size: int, prop, flags: int) -> int:
        check_prop(behind(prop))
        assert size > 0 and size % GRANULE == 0 and flags == 0
        if code := self._enter("cuMemCreate"):
            return code
        if self.used_bytes + size > self.total_bytes:
            return 2
        self._next_handle += 1
        self.handles[self._next_handle] = size
        behind(handle).value = self._next_handle
        return 0

    def cuMemRelease(self, handle: int) -> int:
        assert handle in self.handles, "released twice"
        assert all(found.handle != handle for found in self.ranges.values()), (
            "released while mapped"
        )
        if code := self._enter("cuMemRelease"):
            return code
        del self.handles[handle]
        return 0

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:
        found = self.ranges[address]
        assert found.handle is None, "mapped twice"
        assert found.size == size == self.handles[handle] and (offset, flags) == (0, 0)
        if code := self._enter("cuMemMap"):
            return code
        found.handle, self.quiet = handle, False
        return 0

    def cuMemSetAccess(self, address: int, size: int, desc, count: int) -> int:
        found = self.ranges[address]
        assert found.handle is not None and found.size == size and count == 1
        assert isinstance(behind(desc), AccessDesc) and behind(desc).flags == 3
        assert (behind(desc).location.type, behind(desc).location.id) == (1, ORDINAL)
        if code := self._enter("cuMemSetAccess"):
            return code
        assert LIBC.mprotect(address, size, ACCESS) == 0
        ctypes.memset(address, 0xA5, size)
        found.accessible = True
        return 0

    def cuMemUnmap(self, address: int, size: int) -> int:
        found = self.ranges[address]
        assert found.handle is not None and found.size == size, "not mapped, or unmapped in part"
        assert self.quiet or not found.accessible, "unmapped while streams may run"
        if code := self._enter("cuMemUnmap"):
            return code
        found.handle, found.accessible = None, False
        at = LIBC.mmap(address, size, NO_ACCESS, PRIVATE_ANONYMOUS | FIXED, -1, 0)
        assert at == address
        return 0

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.quiet = True

    def give_back(self) -> None:
        self.calls.append("give_back")

    def bytes_at(self, address: int, size: int, keep: object) -> torch.Tensor:
        start, found = next((a, r) for a, r in self.ranges.items() if a <= address < a + r.size)
        assert found.accessible and address + size <= start + found.size
        array = (ctypes.c_ubyte * size).from_address(address)
        array.keep = keep  # pyright: ignore
        return torch.frombuffer(array, dtype=torch.uint8)


def check_prop(prop: AllocationProp) -> None:
    flags = prop.allocFlags
    assert (prop.type, prop.requestedHandleTypes, prop.win32HandleMetaData) == (1, 0, None)
    assert (prop.location.type, prop.location.id) == (1, ORDINAL)
    assert (
        flags.compressionType,
        flags.gpuDirectRDMACapable,
        flags.usage,
        bytes(flags.reserved),
    ) == (
        0,
        0,
        0,
        b"\0" * 4,
    )


def make_driver(total_bytes: int = 64 << 20) -> tuple[Driver, FakeLibrary]:
    library = FakeLibrary(total_bytes)
    driver = Driver(
        library=library,
        device=torch.device("cpu"),
        location=Location(type=1, id=ORDINAL),
        synchronize=library.synchronize,
        give_back=library.give_back,
        bytes_at=library.bytes_at,
    )
    return driver, library
