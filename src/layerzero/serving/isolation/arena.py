"""Memory that this process shares with one child: where tensors lie there, and when their room is free again.

Of a GPU's memory that is two buffers (:class:`Buffer`), which the child opens by CUDA IPC. This process owns both, so
that none goes with a child that ends.

It is one sparse file without a name, mapped once by both; pages take memory as they are used. A result stays where the
child wrote it, and its room is free again once the last tensor there is gone: copying it out took 25 us a MiB more
(EPYC Zen 4, 2026-11-27). Before a fork, results become this process's own memory, at the same addresses, so that parent
and child have what a fork gives them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import secrets
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from layerzero.core.errors import IsolatedKernelError
from layerzero.core.system import forking
from layerzero.engine import accelerator
from layerzero.engine.isolation import span
from layerzero.serving.isolation.messages import Open

PAGE = mmap.PAGESIZE

MAX_KEPT = 256
"""Tensors of the shared memory that each side remembers; making one takes 4 us."""

KEPT_BYTES = 1 << 25
"""Room that is larger gives its pages back to the system when it is free."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_READ_WRITE, _MAP_FIXED = mmap.PROT_READ | mmap.PROT_WRITE, 0x10


def shared_file(size: int) -> int:
    """A file without a name, of so many bytes, none of which takes memory yet. Raises: OSError."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("layerzero", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, size)
    return file


LARGE, GAIN, TRIED_EVERY = 1 << 17, 2.0, 64
"""Bytes whose copy takes long; how much faster one past the caches must be; copies until the slower way is tried."""


class Copier:
    """Copies into memory that another CPU used last, in the way that lately took less.

    A store past the caches does not wait for lines that the other CPU's cache holds: 1 MiB took 41 us so, and by
    memmove 24 or 430, as the host had put the two CPUs (EPYC, 2026-11-28). Only the extension has it.
    """

    def __init__(self) -> None:
        self._ns, self._count = [0.0, 0.0], 0  # a byte, of either way

    def __call__(self, to: int, address: int, size: int) -> None:
        """Copy so many bytes between addresses; other threads run meanwhile."""
        if size < LARGE or (stream := getattr(accelerator.HOT, "stream", None)) is None:
            ctypes.memmove(to, address, size)
            return
        self._count += 1
        streams = (GAIN * self._ns[1] < self._ns[0]) is bool(self._count % TRIED_EVERY)
        began = time.perf_counter_ns()
        (stream if streams else ctypes.memmove)(to, address, size)
        took = (time.perf_counter_ns() - began) / size
        self._ns[streams] = min(took, 1.25 * self._ns[streams]) or took  # an interruption says little


class Mapping:
    """The shared memory as one process sees it.

    Attributes:
        view: its bytes.
        first, base: the place and the address of the first.
        tensor: a tensor at so many bytes, of a dtype, shape and strides.
    """

    first = 0

    def __init__(self, file: int) -> None:
        self.size = os.fstat(file).st_size
        self.view = mmap.mmap(file, self.size)
        self.base: int = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.tensor = functools.lru_cache(MAX_KEPT)(functools.partial(tensor_in, self.view))


def tensor_in(
    memory: mmap.mmap | memoryview | None, at: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """A tensor at so many bytes of a buffer, which one without elements needs not.

    It is no view, since autograd forbids writing into some of these.
    """
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=span(shape, strides), offset=at).as_strided_(shape, strides)


class DeviceMemory:
    """Bytes of a GPU, with what :class:`Mapping` has."""

    def __init__(self, data: torch.Tensor, first: int = 0) -> None:
        self.data, self.first, self.base, self.size = data, first, data.data_ptr(), data.numel()

    def tensor(self, at: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """A view at a place, of a dtype, shape and strides; what has no elements lies nowhere."""
        if 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype, device=self.data.device)
        start = at - self.first
        part = self.data[start : start + span(shape, strides) * dtype.itemsize]
        return part.view(dtype).as_strided(shape, strides)


GIVEN, RESULTS = 0, 1
"""What a buffer is for."""

LEAST_BYTES = 1 << 21  # of a buffer: less than a segment takes the device as much
MARK_BYTES, _NO_COUNTER = 16, b"/layerzero_has_no_counter"
_LINE = 64  # of an address: tensors keep it, so that a vector load finds them as aligned as they were


_SPARE: dict[tuple[torch.device, int], list[Any]] = {}
"""Pools whose buffer is gone, by its device and size.

None ever ends: torch ends the process where a pool does while any stream captures, or after a capture was lost
(``synchronize_and_free_events`` of c10/cuda, torch 2.11, H200, 2026-11-30). The next buffer of that size takes one.
"""


class Buffer(DeviceMemory):
    """Memory of a GPU that another process can open, in a pool of its own: a handle opens whole segments of one.

    Attributes:
        handle: what opens it, as often as wanted.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Raises: RuntimeError, in words of torch's, where this memory has no handle; OutOfMemoryError."""
        if (backend := torch.cuda.get_allocator_backend()) != "native":
            raise RuntimeError(f"the allocator {backend} of torch gives no handles")
        with torch.inference_mode(mode=False), torch.cuda.device(device):
            spare = _SPARE.setdefault((device, size), [])
            pool = spare.pop() if spare else torch.cuda.MemPool()  # of the current device
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))  # it outlives this process's modules, too
            weakref.finalize(self, spare.append, pool).atexit = False
            with torch.cuda.use_mem_pool(pool, device):
                super().__init__(torch.empty(size, dtype=torch.uint8, device=device))
        handle = self.data.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        # torch counts processes that opened this, and frees it at 0 only: never, if one ended. It is freed here once
        # the last one answered or ended; so none is counted, and none finds a counter to make it less than 0
        torch.UntypedStorage._release_ipc_counter_cuda(*handle[4:6])
        self.handle = (*handle[:4], _NO_COUNTER, 0, *handle[6:])

    def marked(self) -> bytes:
        """Its first bytes, drawn anew."""
        mark = secrets.token_bytes(MARK_BYTES)
        self.data[:MARK_BYTES].copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))
        return mark


def bytes_at(tensor: torch.Tensor, address: int, size: int) -> torch.Tensor:
    """So many bytes from an address, of a tensor's storage. Raises: IsolatedKernelError where it has not all."""
    storage = tensor.untyped_storage()
    start = address - storage.data_ptr()
    if start + size > storage.nbytes():
        raise IsolatedKernelError("wanted tensors that overlap to share one storage, got several over the same memory")
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, start, (size,), (1,))


class Gpu:
    """How tensors of a GPU reach the process: through buffers that both see, or by copies through the host's memory.

    Attributes:
        reason: why it is the host's memory; empty where it is CUDA IPC.
        buffers: the last ones of each use, which outlive the process.
        opened: those that the process which runs now has open.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.reason = device, ""
        self.opened: dict[int, Buffer] = {}
        self.buffers: dict[int, Buffer] = {}
        self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @property
    def way(self) -> str:
        """The GPU, and how its tensors reach the process, in words that follow a cost."""
        how = f"by copies through the host: {self.reason}" if self.reason else "by CUDA IPC"
        return f", for tensors on {self.device} {how}"

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let copies of a call wait for those of the call before. Raises: IsolatedKernelError for what cannot cross."""
        if elsewhere := [each.device for each in tensors if each.device != self.device]:
            raise IsolatedKernelError(f"wanted all tensors on {self.device}, got one on {elsewhere[0]}")
        torch.cuda.current_stream(self.device).wait_event(self._read)

    def wait(self) -> None:
        """Wait until what was copied is there: the process has other streams."""
        torch.cuda.current_stream(self.device).synchronize()

    def end(self) -> None:
        """Note the last copy out of the buffers, which another stream may have to wait for."""
        self._read.record(torch.cuda.current_stream(self.device))

    def room(self, use: int, size: int, tell: Callable[[Open], object]) -> Buffer:
        """A buffer of so many bytes at least; the process opens a new one. Raises: RuntimeError, and what that does."""
        found = self.opened.get(use)
        if found is None or found.size < size:
            found = self.buffers.get(use)
            if found is None or found.size < size:
                found = Buffer(max(LEAST_BYTES, 1 << (size - 1).bit_length()), self.device)
            self.opened.pop(use, None)
            torch.cuda.current_stream(self.device).wait_event(self._read)
            tell(Open(str(self.device), use, found.handle, found.marked()))
            self.buffers[use] = self.opened[use] = found  # what was in its place is let go of there, too
        return found


def placed(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int], reach: tuple[int, int], take: Callable[[int], int]
) -> tuple[tuple[int, ...], tuple[int, int], list[tuple[int, int, int, int]]]:
    """Where each tensor is to lie in shared memory, the room that was taken, and what is to be copied there.

    That is a place in the room, an address, bytes, and whose they are. What overlaps is copied once, as it lies, so
    that tensors which share memory do so there; what lies within ``reach`` already, as a result, stays.
    """
    shared, shared_end = reach
    spans = [(each.data_ptr(), index) for index, each in enumerate(tensors)]
    if len(spans) > 1:
        spans.sort()
    at, moved = [0] * len(tensors), []
    copies: list[tuple[int, int, int, int]] = []
    first = stop = taken = 0
    for address, index in spans:
        end = address + sizes[index]
        if shared <= address < shared_end:
            at[index] = address - shared
        elif end > address:
            if copies and address < stop:
                stop = max(stop, end)
                copies[-1] = (copies[-1][0], first, stop - first, copies[-1][3])
            else:
                taken = -(-(taken + stop - first) // _LINE) * _LINE + address % _LINE
                first, stop = address, end
                copies.append((taken, first, stop - first, index))
            moved.append((index, taken + address - first))
    if not copies:
        return tuple(at), (0, 0), copies
    size = taken + stop - first
    room = take(size)
    for index, place in moved:
        at[index] = room + place
    return tuple(at), (room, size), copies


class _Gone(weakref.ref[memoryview]):
    """Knows which room is free once its object is gone."""

    __slots__ = ("at", "size")
    at: int
    size: int


class Arena(Mapping):
    """The room in the shared memory, handed out by the side that calls; one thread at a time takes any.

    It lives as long as any result; its file and memory go with the last one, when the collector comes to it.

    Attributes:
        held: bytes of results that live, or went since room was taken last.
        filling: the room that the other process writes into now, if any: it stays shared at a fork.
    """

    def __init__(self, size: int) -> None:
        """Raises: OSError where the system has no such memory."""
        self.file = shared_file(size)
        weakref.finalize(self, os.close, self.file)
        super().__init__(self.file)
        kept: Any = type("Kept", (ctypes.Array,), {"_type_": ctypes.c_ubyte, "_length_": size, "arena": self})
        self._bytes, self.held = memoryview(kept.from_buffer(self.view)), 0  # by these a result keeps the arena
        self.filling: int | None = None
        self._free: dict[int, list[int]] = {}
        self._live: dict[int, _Gone] = {}
        self._gone: deque[_Gone] = deque()  # the collector may run anywhere: it takes no lock
        self._top, self._own = 0, set[int]()
        _ARENAS[id(self)] = self

    def take(self, size: int) -> int:
        """Room for so many bytes, at the start of a page. Raises: MemoryError."""
        while self._gone:
            self._give_back(self._gone.popleft())
        size = -(-size // PAGE) * PAGE or PAGE
        free = self._free.get(size)
        if free:
            return free.pop()
        if self._top + size > self.size:
            self._join()
            larger = [each for each in self._free if each >= size]
            if larger:
                return self._split(min(larger), size)
        if self._top + size > self.size:
            text = "results that still live hold it; raise isolation.memory_mb, or copy them"
            raise MemoryError(f"wanted {size} bytes of the {self.size} shared with a process, got no room: {text}")
        at, self._top = self._top, self._top + size
        return at

    def give(self, at: int, size: int) -> None:
        """Have the room for so many bytes free again."""
        size = -(-size // PAGE) * PAGE or PAGE
        if size >= KEPT_BYTES and hasattr(mmap, "MADV_REMOVE"):
            self.view.madvise(mmap.MADV_REMOVE, at, size)
        self._free.setdefault(size, []).append(at)

    def _join(self) -> None:
        """Make neighbours that are free one, also with what lies above all that was taken."""
        joined: list[tuple[int, int]] = []
        for at, size in sorted([(at, size) for size, places in self._free.items() for at in places]):
            first, before = joined.pop() if joined and sum(joined[-1]) == at else (at, 0)
            joined.append((first, before + size))
        if joined and sum(joined[-1]) == self._top:
            self._top, _ = joined.pop()
        self._free = {}
        for at, size in joined:
            self._free.setdefault(size, []).append(at)

    def _split(self, free: int, size: int) -> int:
        """The beginning of a free room of so many bytes; what is left of it stays free."""
        at = self._free[free].pop()
        if not self._free[free]:
            del self._free[free]
        if free > size:
            self._free.setdefault(free - size, []).append(at + size)
        return at

    def reach(self) -> tuple[int, int]:
        """The first address that the other process sees, and the end; none while results are kept from a fork."""
        return (0, 0) if self._own else (self.base, self.base + self.size)

    def hold(self, size: int) -> tuple[int, memoryview]:
        """Room for results and its bytes; it is free again when these and all tensors in them are gone.

        It is what the other process fills until ``filling`` is None again.
        """
        at = self.filling = self.take(size)
        room = self._bytes[at : at + size]
        gone = _Gone(room, self._gone.append)
        gone.at, gone.size = at, size
        self._live[at] = gone
        self.held += size
        return at, room

    def _give_back(self, gone: _Gone) -> None:
        del self._live[gone.at]
        self.held -= gone.size
        if gone.at in self._own:
            self._own.discard(gone.at)
            self._map(gone.at, gone.size, mmap.MAP_SHARED)
        self.give(gone.at, gone.size)

    def leave(self) -> None:
        """Make living results memory of this process alone, in their places: a fork is about to copy it."""
        for at, gone in list(self._live.items()):
            if at != self.filling and at not in self._own and gone() is not None:
                self._own.add(at)
                self._map(at, gone.size, mmap.MAP_PRIVATE)  # of the file: other threads may read these results now
                self.view[at : at + gone.size] = self.view[at : at + gone.size]  # the system copies what is written

    def _map(self, at: int, size: int, flags: int) -> None:
        where = self.base + at
        if _LIBC.mmap(where, size, _READ_WRITE, flags | _MAP_FIXED, self.file, at) != where:
            raise OSError(ctypes.get_errno(), "wanted to map the memory of results anew, got an error")


_ARENAS: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()


def _leave() -> None:
    for each in [found() for found in _ARENAS.valuerefs()]:  # at once: other threads make some meanwhile
        if each is not None:
            each.leave()


forking.around(_leave, lambda: None)
