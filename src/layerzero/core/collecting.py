"""Python's garbage collector, held off while modules of this package load."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_off() -> Iterator[None]:
    """Let nothing be collected inside; after it the collector is as it was.

    What a module makes stays, so there is nothing to find, but what it makes counts: importing this package made the
    collector look through every object of torch, 80 of 190 ms (docs/measurements/first_call.md). Nothing is frozen, no
    threshold is changed, and what was made inside is looked at later, like everything else. A thread that switches the
    collector off meanwhile finds it on afterwards: Python tells nobody who switched it.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
