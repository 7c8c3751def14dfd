"""Ranges of addresses that are reserved as a whole; memory is behind those that were committed.

The CUDA driver's calls go through libcuda by ctypes. They raise MemoryError where the device has no memory,
RuntimeError for everything else. Read: cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess of the CUDA driver
API 13.0. Library: libcuda.so.1 of the driver.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.core.reasons import ReasonCode
from layerzero.ops.kv.form import KVCacheError

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
        self._call("cuMemFree_v2", address)


@functools.cache
def driver() -> Driver | None:
    """The driver's calls; None where there is no driver."""
    try:
        return Driver()
    except (OSError, AttributeError, RuntimeError):
        return None


_GRAIN = 64 * 1024
_READ, _READ_WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE


class CpuRange:
    """Anonymous memory that reads as zeros and takes room once it was made writable.

    The operating system maps memory as it is written, so that a contiguous tensor would grow by itself. This adds the
    same steps as on a GPU, so that what uses them is tested without one: a write outside of what was committed ends the
    process there, too.

    Attributes:
        granularity: bytes that memory comes in.
        committed_bytes: memory behind the addresses now.
        keeper: what lives as long as any tensor of the addresses does.
    """

    def __init__(self, size: Callable[[int], int]) -> None:
        self.granularity, self.committed_bytes = _GRAIN, 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, max(size(_GRAIN), _GRAIN), flags, _READ_WRITE)
        self.keeper = self._memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._protect(0, len(self._memory), _READ)

    def _protect(self, offset: int, size: int, protection: int) -> None:
        if self._libc.mprotect(self._address + offset, size, protection):
            raise MemoryError(f"mprotect of {size} bytes failed with errno {ctypes.get_errno()}")

    def commit(self, offset: int, size: int) -> None:
        """Make memory writable."""
        self._protect(offset, size, _READ_WRITE)
        self.committed_bytes += size

    def release(self, offset: int, size: int) -> None:
        """Give memory back; it reads as zeros."""
        self._memory.madvise(mmap.MADV_DONTNEED, offset, size)
        self._protect(offset, size, _READ)
        self.committed_bytes -= size

    def settle(self) -> None:
        """Nothing is under way on a CPU."""

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """All of it; the mapping lives as long as the tensor does."""
        return torch.frombuffer(self._memory, dtype=dtype)

    def close(self) -> None:
        """Give the memory back now, the addresses once no tensor has them."""
        self._memory.madvise(mmap.MADV_DONTNEED)
        self._protect(0, len(self._memory), _READ)
        self.committed_bytes = 0


class _Memory:
    """Addresses as torch takes them in; keeps what owns them alive."""

    def __init__(self, owner: object, address: int, size: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def _driver_for(device: torch.device) -> Driver:
    found = driver()
    if found is None:
        problem = f"wanted a CUDA driver with virtual memory for {device}, got none; take another strategy"
        raise KVCacheError(problem, ReasonCode.DRIVER_VERSION_UNSUPPORTED)
    return found


def _with_context(device: torch.device) -> torch.device:
    """The device with its number, after its context was made: without one the driver knows no addresses."""
    torch.zeros(1, device=device)
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


class _Managed:
    """Memory that CPU and GPU share, as long as a tensor of it lives."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._driver = _driver_for(device)
        self._device = device
        with torch.cuda.device(device):
            self.address = self._driver.managed(size)
        weakref.finalize(self, self._driver.free_managed, self.address)


def managed_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros in memory that CPU and GPU share. Raises: KVCacheError without a driver that has such."""
    where = _with_context(device)
    size = math.prod(shape) * dtype.itemsize
    owner = _Managed(where, size)
    return torch.as_tensor(_Memory(owner, owner.address, size), device=where).view(dtype).view(shape).zero_()


class CudaRange:
    """Addresses of a GPU: memory is made in pieces of the driver's granularity and mapped where it is needed.

    Calls are made with the device's context current. Attributes: as of :class:`CpuRange`.
    """

    def __init__(self, device: torch.device, size: Callable[[int], int]) -> None:
        found = self._driver = _driver_for(device)
        self._device = _with_context(device)
        self.granularity = found.granularity(self._device.index)
        self.committed_bytes = 0
        self._size = max(size(self.granularity), self.granularity)
        self._address = found.reserve(self._size)
        self._handles: dict[int, int] = {}

    @property
    def keeper(self) -> object:
        """Itself: torch keeps it for as long as it knows the addresses."""
        return self

    def commit(self, offset: int, size: int) -> None:
        """Make memory piece by piece and map it. Raises: MemoryError."""
        done = []
        with torch.cuda.device(self._device):
            try:
                for place in range(offset, offset + size, self.granularity):
                    self._piece(place)
                    done.append(place)
            except (MemoryError, RuntimeError):
                for place in done:
                    self.release(place, self.granularity)
                raise

    def _piece(self, place: int) -> None:
        index = self._device.index
        try:
            handle = self._driver.create(self.granularity, index)
        except MemoryError:
            torch.cuda.empty_cache()  # what torch keeps for later is of no use to the driver
            handle = self._driver.create(self.granularity, index)
        try:
            self._driver.map(self._address + place, self.granularity, handle, index)
        except (MemoryError, RuntimeError):
            self._driver.release(handle)
            raise
        self._handles[place] = handle
        self.committed_bytes += self.granularity

    def release(self, offset: int, size: int) -> None:
        """Unmap and give back; nothing on the device may use it any more."""
        with torch.cuda.device(self._device):
            for place in range(offset, offset + size, self.granularity):
                self._driver.unmap(self._address + place, self.granularity)
                self._driver.release(self._handles.pop(place))
                self.committed_bytes -= self.granularity

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """All addresses; the first must have memory, by which torch tells whose they are."""
        memory = _Memory(self, self._address, self._size)
        return torch.as_tensor(memory, device=self._device).view(dtype)

    def close(self) -> None:
        """Wait for the device, then give back memory and addresses."""
        if not self._address:
            return
        self.settle()
        self.release_all()
        with torch.cuda.device(self._device):
            self._driver.free(self._address, self._size)
        self._address = 0

    def release_all(self) -> None:
        """Give back every piece."""
        for place in list(self._handles):
            self.release(place, self.granularity)


AddressRange = CpuRange | CudaRange


def reserve(device: torch.device, size: Callable[[int], int]) -> AddressRange:
    """Reserve addresses of a device; ``size`` tells how many bytes, given the granularity.

    Raises: KVCacheError with DRIVER_VERSION_UNSUPPORTED or KV_STRATEGY_UNSUPPORTED where the device has no such thing.
    """
    if device.type == "cuda":
        return CudaRange(device, size)
    return CpuRange(size)
