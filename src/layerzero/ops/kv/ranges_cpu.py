"""Reserved addresses on a CPU: anonymous memory that reads as zeros and takes room once it was made writable.

The operating system maps pages of memory as they are written into, so that a contiguous tensor would grow by itself.
What this adds are the same steps as on a GPU, so that what uses them is tested where there is none: a write outside of
what was committed ends the process there, too.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

_GRAIN = 64 * 1024
_READ, _READ_WRITE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE


class CpuRange:
    """A private anonymous mapping; see :class:`layerzero.ops.kv.ranges.AddressRange`."""

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
