"""Python's garbage collector, held off while modules of this package load, and while a CUDA graph is captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from layerzero.core.system import forking

_HELD: list[bool] = []
"""One for each that holds the collector off: it is switched on when the last of them lets go."""

_CHANGING = forking.rlock()  # reentrant: what is collected meanwhile may end with something that loads a module


@contextmanager
def held_off() -> Iterator[None]:
    """Let nothing be collected inside; after it the collector is as it was.

    What a module makes stays, so there is nothing to find, but what it makes counts: importing this package made the
    collector look through every object of torch, 80 of 190 ms (docs/measurements/first_call.md). Nothing is frozen, no
    threshold is changed, and what was made inside is looked at later, like everything else. A thread that switches the
    collector off meanwhile finds it on afterwards: Python tells nobody who switched it.

    A CUDA graph that nobody holds any more may lie in a cycle of references, and to free one while another is captured
    breaks the capture: FlashAttention 3 ended the process over it (vllm 0.20.0, torch 2.11, H200, 2026-11-23).
    """
    with _CHANGING:
        ours = gc.isenabled() or bool(_HELD)  # a capture goes on where the module is loaded that another thread loads
        if ours:
            _HELD.append(True)
            gc.disable()
    try:
        yield
    finally:
        if ours:
            _let_go()


def _let_go() -> None:
    with _CHANGING:
        if _HELD:
            _HELD.pop()
            if not _HELD:
                gc.enable()


def _in_child() -> None:
    """Switch it on in a forked child, too: it was a thread of its parent that held it off."""
    if _HELD:
        _HELD.clear()
        gc.enable()


forking.in_child(_in_child)
