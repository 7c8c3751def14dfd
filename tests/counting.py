"""Work, counted: what a call does in Python, which is the same on a loaded machine as on an idle one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def events(act: Callable[[], Any]) -> list[str]:
    """Every call of a function that ``act`` makes, of Python's and of C's, by name; the third time it runs."""
    found: list[str] = []

    def note(frame, event, argument):
        if event == "call":
            found.append(frame.f_code.co_qualname)
        elif event == "c_call":
            found.append(argument.__qualname__)

    for _ in range(2):
        act()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return [name for name in found if name not in ("setprofile", act.__code__.co_qualname)]
