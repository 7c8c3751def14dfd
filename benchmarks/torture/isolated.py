"""Kernels that end a process of their own: each costs one call, which another kernel answers, and no process but that.

python benchmarks/torture --part isolated                1,000 ends, shared by several processes
"""

from __future__ import annotations

import logging
import random
import time
import warnings
from collections import Counter

import torch
from _norm import right
from keeping import Found, cache, tries

import layerzero as lz
from layerzero.engine.dispatch import ENGINE
from layerzero.serving.isolation import kernels

APART = {"backend_isolation": "subprocess", "isolate": ["isolated.*"], "prefer": ["isolated.ends"]}


def ended(draw: random.Random, until: float, times: int | None) -> Found:
    """End the process of a kernel in a call that it then answers otherwise; a new process answers the next call."""
    import _isolated

    logging.disable()  # of what fails, which is all of it
    zero = Counter({"wrong results": 0, "calls raised": 0, "ends that none was seen of": 0})
    other: Counter[str] = Counter({"processes ended, this one lived on": 0})
    weight, longest_s = torch.randn(64), 0.0
    with cache(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in tries(until, times, zero):
            ENGINE.health.reset()
            calm, fatal = torch.randn(draw.randrange(1, 300), 64).clamp_(max=0.9), torch.randn(8, 64)
            fatal[0, 0] = draw.randrange(len(_isolated.ENDS)) + 1
            try:
                with lz.scope(**APART):
                    first = lz.rms_norm(calm, weight)
                    worker = kernels.LIBRARIES["user",].worker
                    before, began = worker.ends, time.monotonic()
                    second = lz.rms_norm(fatal, weight)
                    longest_s = max(longest_s, time.monotonic() - began)
            except Exception as error:  # noqa: BLE001  # this is what is counted
                zero["calls raised"] += 1
                print(f"{type(error).__name__}: {error}")
                continue
            if worker.ends != before + 1:
                zero["ends that none was seen of"] += 1
                with lz.scope(**APART):
                    print(fatal[0, 0], lz.explain("rms_norm", fatal, weight))
            other["processes ended, this one lived on"] += worker.ends - before
            for data, found in ((calm, first), (fatal, second)):
                zero["wrong results"] += not torch.allclose(found, right(data, weight), atol=1e-4)
    kernels.end_all()
    return zero, {**other, "s the longest such call": round(longest_s, 3)}


PARTS = [ended]
