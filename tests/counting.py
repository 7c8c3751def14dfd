"""Work, counted: it is the same on a loaded machine as on an idle one, where times are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import layerzero
from layerzero.tuning.measurement.clocks import Sample


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


def calls_of_ours(act: Callable[[], Any]) -> list[str]:
    """Every call that ``act`` makes of a Python function of the package or of a plan, by name; the third time."""
    root = str(Path(layerzero.__file__).parent)
    found: list[str] = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith((root, "<layerzero")):
            found.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")

    for _ in range(2):
        act()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return found


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
