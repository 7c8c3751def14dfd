"""What a backend makes once for calls of one shape and keeps: constant tensors, plans, graphs of operators.

Making them copies from the host, allocates or compiles, which a CUDA graph capture forbids; and a captured graph goes
on using what it saw. So a kernel that needs one is legal in a capture only after a call of the same shape outside of
it, and what a capture used is kept for the life of the process.

What some operators want of threads: a context before their first call in one, and launches from one at a time.

Caches of compilers: what artefacts of the CuTe DSL depend on, and where they, Triton's and the driver's lie.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.metadata
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Hashable
from getpass import getuser
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.system import forking


class _Bound(threading.local):
    """Whether a thread's device has its context there."""

    here = False


_BOUND = _Bound()


def give_context(tensor: Tensor) -> None:
    """Give the thread its device's context, for operators whose first call is the driver's cuTensorMapEncodeTiled.

    A thread has none before a call of the runtime's, which neither an allocation from the cache is nor
    ``torch.cuda.device``: error 201 (FlashInfer's tinygemm, H200, 2026-12-01). CUTLASS writes a line of it, and goes on
    with a descriptor of zeros (``make_tma_copy_desc`` of CUTLASS 4, without asserts).
    """
    if not _BOUND.here and tensor.is_cuda and torch.cuda.current_device() == tensor.device.index:
        torch.cuda.set_device(tensor.device)  # for another device the operator's own guard does the same
        _BOUND.here = True


_LAUNCHING: dict[tuple[str, int | None], threading.Lock] = {}


def launch_lock(owner: str, device_index: int | None) -> threading.Lock:
    """The lock under which launches of some kernels on a device come from one thread at a time.

    It is for those whose host code runs without the GIL and shares between threads what it sets before a launch. One a
    device: ranks in threads may wait for each other's.
    """
    return _LAUNCHING.setdefault((owner, device_index), forking.lock())


class Prepared:
    """Things made by ``make(*key)``, the ``size`` made last, and all that a capture used."""

    def __init__(self, make: Callable[..., Any], size: int) -> None:
        self._make, self._size = make, size
        self._kept: dict[Hashable, Any] = {}
        self._pinned: dict[Hashable, Any] = {}
        self._lock = forking.lock()
        atexit.register(self.forget)

    def forget(self) -> None:
        """Let everything go: at the end of the process, before the libraries that made it tell of leaks."""
        with self._lock:
            self._kept.clear()
            self._pinned.clear()

    def get(self, *key: Hashable, capturing: bool) -> Any:
        """The thing for a key; it is made where it is missing. Raises RuntimeError if that happens in a capture."""
        with self._lock:
            thing = self._pinned.get(key, self._kept.get(key))
            if thing is None:
                if capturing:
                    raise RuntimeError(f"{self._make.__name__}{key} was not made before the CUDA graph capture")
                thing = self._make(*key)
                if not (isinstance(thing, Tensor) and thing.is_cuda):
                    return self._keep(key, thing)
            else:
                if capturing:
                    self._pinned[key] = thing
                return thing
        # Another stream may read it next. The lock is not held meanwhile: what the stream has yet to do may be
        # an exchange with the GPU of another thread, which would wait for that thread.
        torch.cuda.current_stream(thing.device).synchronize()
        with self._lock:
            return self._keep(key, thing)

    def _keep(self, key: Hashable, thing: Any) -> Any:
        """Keep a thing in the place of the oldest; what another thread has made meanwhile stays."""
        while key not in self._kept and len(self._kept) >= self._size:
            del self._kept[next(iter(self._kept))]
        return self._kept.setdefault(key, thing)

    def has(self, *key: Hashable) -> bool:
        return key in self._kept or key in self._pinned

    def before_capture(self, text: str, key: Callable[[Facts], tuple[Hashable, ...]]) -> limit.Custom:
        """A limit: under capture the thing for the ``key`` of a call must be there already."""

        def check(facts: Facts) -> Reason | None:
            if not facts["capturing"] or self.has(*key(facts)):
                return None
            wanted, hint = f"{text} made before", "Call it once with these shapes outside of the capture"
            return Reason(ReasonCode.CUDA_GRAPH_UNSAFE, text, wanted, "not made", hint)

        return limit.Custom(f"under capture: {text} made by an earlier call", check)


GRAIN = 32768
"""Elements; ``at::internal::GRAIN_SIZE`` of torch 2.10 to 2.13."""

_RUNTIMES = re.compile(r"/lib(gomp|iomp5|omp)[-.0-9a-f]*\.so[.0-9]*$")


@functools.cache
def runtime() -> Any:
    """The one OpenMP runtime of this process; None where there is none, or several."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:  # no Linux
        return None
    found = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if _RUNTIMES.search(line)}
    if len(found) != 1:
        return None
    library = ctypes.PyDLL(found.pop())
    return library if hasattr(library, "omp_set_num_threads") else None


def small_alone(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that runs in the calling thread alone where its first tensor has less than :data:`GRAIN` elements."""
    library = runtime()
    if library is None:
        return operator
    allowed, allow = library.omp_get_max_threads, library.omp_set_num_threads

    def alone(first: Tensor, *rest: Any) -> Any:
        if first.numel() >= GRAIN:
            return operator(first, *rest)
        before = allowed()
        allow(1)
        try:
            return operator(first, *rest)
        finally:
            allow(before)

    return alone


@functools.cache
def stamps() -> tuple[str, ...]:
    """What an artefact depends on besides a call: versions of Python and of what compiles it."""
    found = [f"{sys.version_info.major}.{sys.version_info.minor}"]
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        try:
            found.append(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return tuple(found)


def temporary(name: str) -> Path | None:
    """The folder of a library for this user among temporary files; none for a user without a name."""
    try:
        return Path(tempfile.gettempdir()) / getuser() / name
    except (KeyError, OSError):
        return None


def triton_cache() -> Path:
    """The folder, as Triton 3 names it; nothing of Triton is imported to know."""
    named = os.environ.get("TRITON_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def driver_cache() -> Path | None:
    """Where the CUDA driver keeps what it compiled of PTX, by its own key; none where it keeps nothing.

    What a child compiled is noted there, so that no later process compiles it again: until 2026-11-23 every one took a
    minute of its background for it. The driver drops what is oldest beyond CUDA_CACHE_MAXSIZE (1 GB).
    Source: CUDA programming guide 13.0, environment variables.
    """
    if os.environ.get("CUDA_CACHE_DISABLE") == "1":
        return None
    return named_folder("CUDA_CACHE_PATH", ".nv", "ComputeCache")


def named_folder(variable: str, *below_home: str) -> Path | None:
    """The folder that the environment names, else one of the user's; None for a user without a home."""
    named = os.environ.get(variable)
    try:
        return Path(named) if named else Path.home().joinpath(*below_home)
    except RuntimeError:
        return None
