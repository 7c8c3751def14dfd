"""The CUDA driver's virtual memory calls, through libcuda by ctypes.

They raise MemoryError where the device has no memory, RuntimeError for everything else.
Read: cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess of the CUDA driver API 13.0.
Library: libcuda.so.1 of the driver.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_OUT_OF_MEMORY = 2
_BY_ALL = 1


def _check(call: str, result: int) -> None:
    if result == _OUT_OF_MEMORY:
        raise MemoryError(f"{call}: the device is out of memory")
    if result:
        raise RuntimeError(f"{call}: the CUDA driver answered {result}")


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


class Driver:
    """What a range of addresses is made with. Sizes and addresses in bytes, handles as integers."""

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
        """Of CUDA that the driver speaks, 12040 for 12.4."""
        found = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def granularity(self, device: int) -> int:
        """Bytes that memory comes in."""
        found, properties = _SIZE(), self._properties(device)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(properties), 0)
        return found.value

    def reserve(self, size: int) -> int:
        """Addresses without memory."""
        found = _ADDRESS()
        self._call("cuMemAddressReserve", ctypes.byref(found), size, 0, 0, 0)
        return found.value

    def create(self, size: int, device: int) -> int:
        """Memory without addresses."""
        found, properties = _HANDLE(), self._properties(device)
        self._call("cuMemCreate", ctypes.byref(found), size, ctypes.byref(properties), 0)
        return found.value

    def map(self, address: int, size: int, handle: int, device: int) -> None:
        """Put memory behind addresses, readable and writable by its device."""
        self._call("cuMemMap", address, size, 0, handle, 0)
        access = _Access(_Location(_ON_DEVICE, device), _READ_WRITE)
        self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)

    def unmap(self, address: int, size: int) -> None:
        """Take it away."""
        self._call("cuMemUnmap", address, size)

    def release(self, handle: int) -> None:
        """Give memory back."""
        self._call("cuMemRelease", handle)

    def free(self, address: int, size: int) -> None:
        """Give addresses back."""
        self._call("cuMemAddressFree", address, size)

    def managed(self, size: int) -> int:
        """Memory that CPU and GPU share, of the current context."""
        found = _ADDRESS()
        self._call("cuMemAllocManaged", ctypes.byref(found), size, _BY_ALL)
        return found.value

    def free_managed(self, address: int) -> None:
        """Give that back."""
        self._call("cuMemFree_v2", address)


@functools.cache
def driver() -> Driver | None:
    """The driver's calls; None where there is no driver."""
    try:
        return Driver()
    except (OSError, AttributeError, RuntimeError):
        return None
