"""A tuning run of a few calls."""

from __future__ import annotations

import layerzero as lz
from others import OTHERS


def tuned(*args, **kwargs):
    given = {"dtype": "float32", "leave_out": OTHERS, "samples": 3, "isolate": False}
    return lz.tune(*args, **{**given, **kwargs})
