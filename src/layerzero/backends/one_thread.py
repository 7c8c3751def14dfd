"""Small work of a CPU library in the calling thread alone, as torch does it itself.

torch's loops stay in one thread below ``at::internal::GRAIN_SIZE`` elements. Libraries that open an OpenMP region
whatever the work wait in it for cores that other processes hold: on two cores beside ten runnable threads zentorch's
and vLLM's ``add_rms_norm`` of 40 x 768 took 23 ms, torch's own 0.25 or less; in one thread they take 0.05 and 0.02 (AMD
EPYC, 2026-11-22).

How many threads a region gets is told to the OpenMP runtime that torch brought, which libraries built against torch
share. It holds for the calling thread only, and costs a microsecond. Where there is no such runtime, or more than one,
nothing changes.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

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
