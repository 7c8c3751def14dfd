"""A kernel that ends its process in the way that the first number of a call names; it runs in one of its own."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

from _norm import right
from torch import Tensor

import layerzero as lz

ENDS: list[Callable[[], object]] = [
    lambda: os.kill(os.getpid(), signal.SIGSEGV),
    lambda: os.kill(os.getpid(), signal.SIGFPE),
    lambda: os.kill(os.getpid(), signal.SIGKILL),
    lambda: ctypes.string_at(0),
    os.abort,
    lambda: os._exit(3),
]
"""By number, from 1."""


@lz.register_kernel("norm.rms", "isolated.ends", supported_dtypes=["float32"], priority=99)
def ends(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    number = int(input.flatten()[0])
    if number > 0:
        ENDS[number - 1]()
    return right(input, weight, eps)
