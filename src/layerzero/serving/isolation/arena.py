"""Memory that this process shares with one child: where tensors lie there, and when their room is free again.

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
import tempfile
import time
import weakref
from collections import deque

import torch

from layerzero.core.system import forking
from layerzero.engine import accelerator
from layerzero.engine.isolation import span

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


LARGE = 1 << 17
"""Bytes whose copy takes longer than a message."""

GAIN = 2.0
"""How much faster a copy past the caches must be: what it wrote is read from memory."""

TRIED_EVERY = 64
"""After how many copies the slower way is tried again."""


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
        base: the address of the first.
        tensor: a tensor at so many bytes, of a dtype, shape and strides.
    """

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


class _Gone(weakref.ref[memoryview]):
    """Knows which room is free once its object is gone."""

    __slots__ = ("at", "size")
    at: int
    size: int


class Arena(Mapping):
    """The room in the shared memory, handed out by the side that calls; one thread at a time takes any.

    Attributes:
        held: bytes of results that live, or went since room was taken last.
        filling: the room that the other process writes into now, if any: it stays shared at a fork.
    """

    def __init__(self, size: int) -> None:
        """Raises: OSError where the system has no such memory."""
        self.file = shared_file(size)
        super().__init__(self.file)
        self._bytes, self.held = memoryview(self.view), 0
        self.filling: int | None = None
        self._free: dict[int, list[int]] = {}
        self._top = 0
        self._live: dict[int, _Gone] = {}
        self._gone: deque[_Gone] = deque()  # the collector may run anywhere: it takes no lock
        self._own: set[int] = set()
        forking.around(self._leave, _nothing)

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

    def _leave(self) -> None:
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


def _nothing() -> None:
    """Behind a fork there is nothing to do."""
