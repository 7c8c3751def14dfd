"""The shipped conformance suite: random valid calls, what they should give, and how far a kernel may be from it.

    from layerzero.testing import fuzz, random_call, check

    fuzz.run(1000, seed=0)                          every function, every legal kernel
    fuzz.run(1000, seed=0, kernels=["mine.*"])      the kernels of a third party
    check(random_call(0, 17))                       one call; an empty list means that it is right

    from layerzero.testing import conformance
    conformance.run(kernels=["mine.*"])             everything that a kernel declares, in other processes

No test framework is needed, so that a backend's own tests, vetting and ``layerzero fuzz`` share it. Names are resolved
on first use: a process that waits for children, and a child until its worker is read, need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerzero.testing import compare, fuzz, generate
    from layerzero.testing.compare import Expected, check, difference, expected
    from layerzero.testing.fuzz import Failure, FuzzReport
    from layerzero.testing.generate import RandomCall, case_call, random_call

__all__ = [
    "Expected",
    "Failure",
    "FuzzReport",
    "RandomCall",
    "case_call",
    "check",
    "compare",
    "difference",
    "expected",
    "fuzz",
    "generate",
    "random_call",
]

_HOMES = {
    **dict.fromkeys(("Expected", "check", "difference", "expected"), "compare"),
    **dict.fromkeys(("Failure", "FuzzReport"), "fuzz"),
    **dict.fromkeys(("RandomCall", "case_call", "random_call"), "generate"),
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, name)}")
    return getattr(home, name) if name in _HOMES else home
