"""The CUDA driver's virtual memory calls: through cuda-python where it is installed, else through libcuda by ctypes.

Both ways raise the same: MemoryError where the device has no memory, RuntimeError for everything else.
Read: cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess of the CUDA driver API 13.0.
Library: cuda-python >= 12 (cuda.bindings.driver), NVIDIA's licence; libcuda.so.1 of the driver.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import Any, Protocol

_OUT_OF_MEMORY = 2
_BY_ALL = 1


class Driver(Protocol):
    """What a range of addresses is made with. Sizes and addresses in bytes, handles as integers."""

    def version(self) -> int:
        """Of CUDA that the driver speaks, 12040 for 12.4."""

    def granularity(self, device: int) -> int:
        """Bytes that memory comes in."""

    def reserve(self, size: int) -> int:
        """Addresses without memory."""

    def create(self, size: int, device: int) -> int:
        """Memory without addresses."""

    def map(self, address: int, size: int, handle: int, device: int) -> None:
        """Put memory behind addresses, readable and writable by its device."""

    def unmap(self, address: int, size: int) -> None:
        """Take it away."""

    def release(self, handle: int) -> None:
        """Give memory back."""

    def free(self, address: int, size: int) -> None:
        """Give addresses back."""

    def managed(self, size: int) -> int:
        """Memory that CPU and GPU share, of the current context."""

    def free_managed(self, address: int) -> None:
        """Give that back."""


def _check(call: str, result: int) -> None:
    if result == _OUT_OF_MEMORY:
        raise MemoryError(f"{call}: the device is out of memory")
    if result:
        raise RuntimeError(f"{call}: the CUDA driver answered {result}")


class _Bindings:
    """cuda-python's own functions."""

    def __init__(self) -> None:
        self._cuda: Any = importlib.import_module("cuda.bindings.driver")
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        result, *values = getattr(self._cuda, name)(*arguments)
        _check(name, int(result))
        return values[0] if values else None

    def _properties(self, device: int) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        return properties

    def version(self) -> int:
        return int(self._call("cuDriverGetVersion"))

    def granularity(self, device: int) -> int:
        least = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._properties(device), least))

    def reserve(self, size: int) -> int:
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0))

    def create(self, size: int, device: int) -> int:
        return int(self._call("cuMemCreate", size, self._properties(device), 0))

    def map(self, address: int, size: int, handle: int, device: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size, [access], 1)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def managed(self, size: int) -> int:
        return int(self._call("cuMemAllocManaged", size, _BY_ALL))

    def free_managed(self, address: int) -> None:
        self._call("cuMemFree", address)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ADDRESS, _SIZE, _FLAGS, _HANDLE = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "cuMemGetAllocationGranularity": (ctypes.POINTER(_SIZE), ctypes.POINTER(_Properties), ctypes.c_int),
    "cuMemAddressReserve": (ctypes.POINTER(_ADDRESS), _SIZE, _SIZE, _ADDRESS, _FLAGS),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemCreate": (ctypes.POINTER(_HANDLE), _SIZE, ctypes.POINTER(_Properties), _FLAGS),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, _HANDLE, _FLAGS),
    "cuMemSetAccess": (_ADDRESS, _SIZE, ctypes.POINTER(_Access), _SIZE),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemRelease": (_HANDLE,),
    "cuMemAllocManaged": (ctypes.POINTER(_ADDRESS), _SIZE, ctypes.c_uint),
    "cuMemFree_v2": (_ADDRESS,),
}
_ON_DEVICE, _PINNED, _READ_WRITE = 1, 1, 3


class _Library:
    """The same functions of libcuda, with typed signatures."""

    def __init__(self, name: str = "libcuda.so.1") -> None:
        self._cuda = ctypes.CDLL(name)
        for function, types in _SIGNATURES.items():
            getattr(self._cuda, function).argtypes = types
            getattr(self._cuda, function).restype = ctypes.c_int
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        _check(name, getattr(self._cuda, name)(*arguments))

    @staticmethod
    def _properties(device: int) -> _Properties:
        return _Properties(type=_PINNED, location=_Location(_ON_DEVICE, device))

    def version(self) -> int:
        found = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def granularity(self, device: int) -> int:
        found, properties = _SIZE(), self._properties(device)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(properties), 0)
        return found.value

    def reserve(self, size: int) -> int:
        found = _ADDRESS()
        self._call("cuMemAddressReserve", ctypes.byref(found), size, 0, 0, 0)
        return found.value

    def create(self, size: int, device: int) -> int:
        found, properties = _HANDLE(), self._properties(device)
        self._call("cuMemCreate", ctypes.byref(found), size, ctypes.byref(properties), 0)
        return found.value

    def map(self, address: int, size: int, handle: int, device: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)
        access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
        self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def managed(self, size: int) -> int:
        found = _ADDRESS()
        self._call("cuMemAllocManaged", ctypes.byref(found), size, _BY_ALL)
        return found.value

    def free_managed(self, address: int) -> None:
        self._call("cuMemFree_v2", address)


@functools.cache
def driver() -> Driver | None:
    """The driver's calls; None where there is no driver."""
    try:
        return _Bindings()
    except ImportError:
        pass
    except RuntimeError:
        return None
    try:
        return _Library()
    except (OSError, AttributeError, RuntimeError):
        return None
