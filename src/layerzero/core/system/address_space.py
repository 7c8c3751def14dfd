"""A bound on this process's address space while something runs in it, so that what is too large fails to allocate."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from layerzero.core.system import forking

_STATM = Path("/proc/self/statm")


class _Bound:
    """The bound, as long as any thread is inside."""

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._inside = 0
        self.before: tuple[int, int] | None = None

    def enter(self, room: int) -> None:
        import resource

        with self._lock:
            self._inside += 1
            if self._inside > 1:
                return
            pages = int(_STATM.read_text().split()[0])
            soft, hard = self.before = resource.getrlimit(resource.RLIMIT_AS)
            wanted = pages * resource.getpagesize() + room
            own = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)
            resource.setrlimit(resource.RLIMIT_AS, (own, hard))

    def leave(self) -> None:
        import resource

        with self._lock:
            self._inside -= 1
            if not self._inside and self.before is not None:
                resource.setrlimit(resource.RLIMIT_AS, self.before)
                self.before = None


_BOUND = _Bound()


@contextmanager
def bounded(room: float) -> Iterator[None]:
    """Let this process reserve so many bytes more than it has, and no others; Linux alone.

    The bound is the whole process's: who enters while another thread is inside has that one's.
    """
    if sys.platform != "linux" or room == float("inf"):
        yield
        return
    _BOUND.enter(int(room))
    try:
        yield
    finally:
        _BOUND.leave()


def lift(process: int) -> None:
    """Give a child process what this one had before: it may have been started within a bound, and would keep it."""
    before = _BOUND.before
    if before is not None:
        import resource

        with suppress(ProcessLookupError):  # it has ended already
            resource.prlimit(process, resource.RLIMIT_AS, before)
