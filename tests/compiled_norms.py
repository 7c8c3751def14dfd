"""A norm that compiles for each width, for tests of builds."""

from __future__ import annotations

from torch.nn.functional import rms_norm

import layerzero as lz


def width(facts):
    return facts.size("hidden")


def compiled_norm(loads, *, built=None, **more):
    """Register ``mine.compiled``: ``loads`` is told the width of each load, ``built`` holds those that are there."""

    def load(facts):
        loads(width(facts))
        return lambda input, weight, *, eps: rms_norm(input, weight.shape, weight, eps)

    if built is not None:
        more |= {"build_key": width, "prebuilt": lambda facts: width(facts) in built}
    declared = {"backend": lz.Backend("mine", "compiles", origin="code"), "load": load, "accepts": ("eps",), **more}
    lz.register_backend([lz.Kernel(id="mine.compiled", operations=("norm.rms",), jit=True, **declared)])
