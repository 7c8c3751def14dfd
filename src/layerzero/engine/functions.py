"""The public functions of this process: ``attention``, ``rms_norm``, … and their torch operators."""

from __future__ import annotations

from layerzero.engine.call import Call
from layerzero.engine.operators import register
from layerzero.ops import FUNCTIONS

CALLS: dict[str, Call] = {name: Call(function) for name, function in FUNCTIONS.items()}
for _call in CALLS.values():
    register(_call)
