"""Random calls of every function against float64, as ``layerzero fuzz`` makes them."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import time

import torch
from _asked import ASKED
from keeping import Found, cache

from layerzero.testing import fuzz

THREADS = 2
"""Of torch, for one call in some: its kernels take other ways on several. The cores are other processes'."""


class Enough(Exception):  # noqa: N818  # it ends a run that has no other end
    """The time is up, or something was found."""


def calls(draw: random.Random, until: float, times: int | None) -> Found:
    """Calls of the run's seed, from the first that this process has to make."""
    report = fuzz.FuzzReport(ASKED.seed)

    def progress(so_far: fuzz.FuzzReport) -> None:
        nonlocal report
        report = so_far
        if so_far.failures or time.monotonic() >= until:
            raise Enough

    logging.disable(logging.WARNING)  # that a reference runs is no news here
    torch.set_num_threads(THREADS)
    with cache(), contextlib.suppress(Enough):
        report = fuzz.run(times or sys.maxsize, ASKED.seed, first=ASKED.first, progress=progress)
    for failure in report.failures[:5]:
        print(failure)
    return {"wrong": len(report.failures)}, {
        "calls": report.calls,
        "comparisons": report.comparisons,
        "on kept plans": report.reused,
    }


PARTS = (calls,)
