"""CUDA virtual memory: device addresses that persist while their physical memory is freed and
mapped again.

In: a size, the CUDA driver. Out: an address range reserved once, `map` and `unmap`, and torch
storages over it. Captured graphs, tensor-map descriptors and views stay valid over a round trip.

Invariants. A range is mapped whole or not at all, by one physical allocation. It must not be
accessed while unmapped: a kernel that does destroys the CUDA context. So `unmap` first waits for
every stream of the device, and the caller must have stopped launching. Fresh memory has undefined
contents: the caller of `map` fills it. Torch's allocator does not know these bytes. It neither
counts them nor releases its cache for them, hence `give_back` before `map`. They cannot be exported
by CUDA IPC, and no other device of the process may read them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gyre.core.errors import MemoryBudgetError
from gyre.core.records import Usage
from gyre.core.rounding import round_up

SUCCESS, OUT_OF_MEMORY = 0, 2  # CUresult
TYPE_PINNED = 1  # CUmemAllocationType
LOCATION_DEVICE = 1  # CUmemLocationType
READ_WRITE = 3  # CUmemAccess_flags
GRANULARITY_MINIMUM = 0  # CUmemAllocationGranularity_flags
HAS_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


_UNDER = "virtual_memory"  # attribute of a storage: the VirtualMemory that it is in


class Location(ctypes.Structure):
    """CUmemLocation: 8 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),  # at 0
        ("id", ctypes.c_int),  # at 4: the device
    )


class AllocationFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags: 8 bytes. All zero: neither compressible nor for RDMA."""

    _fields_ = (
        ("compressionType", ctypes.c_ubyte),  # at 0
        ("gpuDirectRDMACapable", ctypes.c_ubyte),  # at 1
        ("usage", ctypes.c_ushort),  # at 2
        ("reserved", ctypes.c_ubyte * 4),  # at 4
    )


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp: 32 bytes."""

    _fields_ = (
        ("type", ctypes.c_int),  # at 0
        ("requestedHandleTypes", ctypes.c_int),  # at 4: none, it is never exported
        ("location", Location),  # at 8
        ("win32HandleMetaData", ctypes.c_void_p),  # at 16
        ("allocFlags", AllocationFlags),  # at 24
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc: 12 bytes."""

    _fields_ = (
        ("location", Location),  # at 0
        ("flags", ctypes.c_int),  # at 8
    )


_POINTER, _SIZE, _HANDLE, _FLAGS = (
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_uint64,
    ctypes.c_uint64,
)

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(_SIZE),
        ctypes.POINTER(AllocationProp),
        ctypes.c_int,
    ),
    "cuMemAddressReserve": (ctypes.POINTER(_POINTER), _SIZE, _SIZE, _POINTER, _FLAGS),
    "cuMemAddressFree": (_POINTER, _SIZE),
    "cuMemCreate": (ctypes.POINTER(_HANDLE), _SIZE, ctypes.POINTER(AllocationProp), _FLAGS),
    "cuMemRelease": (_HANDLE,),
    "cuMemMap": (_POINTER, _SIZE, _SIZE, _HANDLE, _FLAGS),
    "cuMemUnmap": (_POINTER, _SIZE),
    "cuMemSetAccess": (_POINTER, _SIZE, ctypes.POINTER(AccessDesc), _SIZE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The functions of one device that virtual memory needs: the CUDA driver's and torch's."""

    library: Any  # the functions of SIGNATURES by their C names
    device: torch.device  # with its index
    location: Location
    synchronize: Callable[[], None]  # waits for every stream of the device
    give_back: Callable[[], None]  # torch's allocator returns to the driver what no tensor holds
    # (address, length, what must live as long) → uint8 over it
    bytes_at: Callable[[int, int, object], Tensor]

    def call(self, name: str, *arguments: Any, owner: str) -> None:
        """Call a function of the library. Raises MemoryBudgetError on failure."""
        self.check(name, int(getattr(self.library, name)(*arguments)), owner=owner)

    def check(self, name: str, code: int, *, owner: str) -> None:
        if code == SUCCESS:
            return
        raise MemoryBudgetError(
            f"{owner}: {name} failed on {self.device} with {self._name_error(code)}",
            hint="gyre doctor shows the driver and the device; a fault before this one may have "
            "broken the context",
        )

    def granularity(self, *, owner: str) -> int:
        size = ctypes.c_size_t()
        prop = self.allocation_prop()
        arguments = (ctypes.byref(size), ctypes.byref(prop), GRANULARITY_MINIMUM)
        self.call("cuMemGetAllocationGranularity", *arguments, owner=owner)
        return size.value

    def allocation_prop(self) -> AllocationProp:
        return AllocationProp(type=TYPE_PINNED, location=self.location)

    def _name_error(self, code: int) -> str:
        name = ctypes.c_char_p()
        known = int(self.library.cuGetErrorName(code, ctypes.byref(name))) == SUCCESS and name.value
        return f"{name.value.decode()} ({code})" if known and name.value else f"CUDA error {code}"


def find_driver(device: torch.device) -> Driver | None:
    """Return the driver of a CUDA device with virtual memory, or None. Without it storages are
    reallocated at other addresses when they return. Graphs are then captured again, which emits an
    event."""
    if device.type != "cuda":
        return None
    torch.cuda.init()
    device = torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = list(arguments), ctypes.c_int
    except (OSError, AttributeError):  # not NVIDIA's, or older than CUDA 10.2
        return None
    ordinal, supported = ctypes.c_int(), ctypes.c_int()
    if library.cuInit(0) or library.cuDeviceGet(ctypes.byref(ordinal), device.index):
        return None
    if (
        library.cuDeviceGetAttribute(ctypes.byref(supported), HAS_VIRTUAL_MEMORY, ordinal)
        or not supported.value
    ):
        return None
    return Driver(
        library=library,
        device=device,
        location=Location(type=LOCATION_DEVICE, id=ordinal.value),
        synchronize=partial(torch.cuda.synchronize, device),
        give_back=partial(_give_back, device),
        bytes_at=partial(_cuda_bytes, device),
    )


def _give_back(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


class _Window:
    """Device bytes in the form that torch.as_tensor accepts. `keep` lives as long as the resulting
    storage."""

    def __init__(self, address: int, size_bytes: int, keep: object) -> None:
        self._keep = keep
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),  # not read-only
            "strides": None,
            "version": 3,
        }


def _cuda_bytes(device: torch.device, address: int, size_bytes: int, keep: object) -> Tensor:
    with torch.cuda.device(device):
        tensor = torch.as_tensor(_Window(address, size_bytes, keep), device=device)
    assert tensor.data_ptr() == address and tensor.dtype == torch.uint8, "torch made a copy"
    return tensor


class VirtualMemory:
    """An address range with or without physical memory. The range is released when neither the
    object nor a storage over it is left."""

    def __init__(self, size_bytes: int, driver: Driver, *, owner: str) -> None:
        assert size_bytes > 0, owner
        granularity = driver.granularity(owner=owner)
        self.size_bytes = round_up(size_bytes, granularity)
        self.driver = driver
        self.owner = owner
        address = ctypes.c_uint64()
        driver.call(
            "cuMemAddressReserve", ctypes.byref(address), self.size_bytes, 0, 0, 0, owner=owner
        )
        self.address = address.value
        self._handles: list[int] = []  # of the physical memory: one when mapped, else none
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []
        abandon = weakref.finalize(
            self, _abandon, driver, self.address, self.size_bytes, self._handles, owner
        )
        abandon.atexit = False  # a process that ends gives everything back by itself

    @property
    def is_mapped(self) -> bool:
        return bool(self._handles)

    def map(self) -> None:
        """Map physical memory with undefined contents. On any error nothing has changed."""
        assert not self.is_mapped, f"{self.owner}: mapped twice"
        driver, address, size = self.driver, self.address, self.size_bytes
        driver.give_back()
        handle = self._create()
        try:
            driver.call("cuMemMap", address, size, 0, handle, 0, owner=self.owner)
            try:
                access = AccessDesc(location=driver.location, flags=READ_WRITE)
                driver.call(
                    "cuMemSetAccess", address, size, ctypes.byref(access), 1, owner=self.owner
                )
            except BaseException:
                driver.call("cuMemUnmap", address, size, owner=self.owner)
                raise
        except BaseException:
            driver.call("cuMemRelease", handle, owner=self.owner)
            raise
        self._handles.append(handle)

    def unmap(self) -> None:
        """Return the physical memory to the driver; the addresses stay reserved."""
        assert self.is_mapped, f"{self.owner}: unmapped twice"
        _unmap(self.driver, self.address, self.size_bytes, self._handles, self.owner)

    def storage(self, offset_bytes: int, size_bytes: int) -> torch.UntypedStorage:
        """Return bytes of the range as a storage of fixed size. Call it while mapped; it keeps the
        range reserved."""
        assert self.is_mapped and size_bytes > 0, self.owner
        assert 0 <= offset_bytes <= self.size_bytes - size_bytes, self.owner
        storage = self.driver.bytes_at(
            self.address + offset_bytes, size_bytes, self
        ).untyped_storage()
        # torch keeps the object, attributes and all, as long as the storage lives
        setattr(storage, _UNDER, self)
        self._storages.append(weakref.ref(storage))
        return storage

    def storages(self) -> list[torch.UntypedStorage]:
        """Return the live storages over the range."""
        return [storage for ref in self._storages if (storage := ref()) is not None]

    def _create(self) -> int:
        handle, prop = ctypes.c_uint64(), self.driver.allocation_prop()
        code = int(
            self.driver.library.cuMemCreate(
                ctypes.byref(handle), self.size_bytes, ctypes.byref(prop), 0
            )
        )
        if code == OUT_OF_MEMORY:
            raise MemoryBudgetError(
                f"{self.owner} could not be placed on {self.driver.device}: {self.size_bytes} "
                "bytes are not free there",
                hint="lower the sizes of the phase or let another component leave the device",
            )
        self.driver.check("cuMemCreate", code, owner=self.owner)
        return handle.value


def _unmap(driver: Driver, address: int, size_bytes: int, handles: list[int], owner: str) -> None:
    driver.synchronize()  # no kernel or copy of any stream may still use the range
    driver.call("cuMemUnmap", address, size_bytes, owner=owner)
    driver.call("cuMemRelease", handles.pop(), owner=owner)


def _abandon(driver: Driver, address: int, size_bytes: int, handles: list[int], owner: str) -> None:
    if handles:
        _unmap(driver, address, size_bytes, handles, owner)
    driver.call("cuMemAddressFree", address, size_bytes, owner=owner)


def memory_under(storage: torch.UntypedStorage) -> VirtualMemory | None:
    """Return the virtual memory that contains a storage, or None when torch allocated it."""
    return getattr(storage, _UNDER, None)


def is_present(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage has memory; its owner may have parked it."""
    memory = memory_under(storage)
    return storage.nbytes() > 0 and (memory is None or memory.is_mapped)


def virtual_zeros(
    shape: Sequence[int], *, device: torch.device, dtype: torch.dtype, driver: Driver, owner: str
) -> Tensor:
    """Return `torch.zeros` in separate virtual memory."""
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    memory = VirtualMemory(size_bytes, driver, owner=owner)
    memory.map()
    tensor = torch.empty(0, dtype=dtype, device=device)
    tensor.set_(memory.storage(0, size_bytes), 0, torch.Size(shape))  # pyright: ignore
    return tensor.zero_()


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualUsage(Usage):
    """Usage of a component in virtual memory, which torch's allocator does not count."""

    mapped_bytes: int  # what the driver gave for device_bytes, rounded up to whole granules
