"""The public functions of this process: ``attention``, ``rms_norm``, and the others."""

from __future__ import annotations

from layerzero.engine.call import Call
from layerzero.ops import FUNCTIONS

CALLS: dict[str, Call] = {name: Call(function) for name, function in FUNCTIONS.items()}
