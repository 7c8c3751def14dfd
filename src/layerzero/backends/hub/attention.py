"""kernels-community/flash-attn2 and flash-attn3: the packages' functions under the packages' limits.

Read: flash_attn_interface.py of both in huggingface/kernels-community, commit 40d4194f (2026-08):
``flash_attn_func`` has the arguments of flash-attn 2.8 and flash-attn-3 3.0, and gives the same results. Neither ran
here from the hub.
Library: BSD-3-Clause, arXiv:2307.08691 and arXiv:2407.08608.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from layerzero.backends.flash_attn import attention
from layerzero.backends.hub.build import Build
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel

_OF = {"flash-attn2": ("flash_attn.v2", attention.run_v2), "flash-attn3": ("flash_attn.v3", attention.run_v3)}


def kernels(build: Build) -> Sequence[Kernel]:
    """Declare the package's kernel as one of this build."""
    name, run = _OF[build.name]
    declared = next(each for each in attention.KERNELS if each.id == name)

    def load(facts: Facts) -> Callable[..., Any]:
        return run(build.module().flash_attn_func, facts)

    fields = build.fields("attention")
    return (dataclasses.replace(declared, **fields, load=load, aliases=(), priority_since={}, graph_safe=False),)
