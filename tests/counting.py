"""Work, counted: it is the same on a loaded machine as on an idle one, where times are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from layerzero.tuning.measuring.clocks import Sample


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


class Told:
    """A clock on which a call takes as many microseconds as its kernel told."""

    def __init__(self, told):
        self.told = told

    def once(self, run):
        self.told.clear()
        run()
        return float(sum(self.told) or 10)

    def sample(self, run, about_us):
        return Sample(self.once(run))

    def calmer(self):
        return None
