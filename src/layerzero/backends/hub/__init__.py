"""Kernels of the Hugging Face hub: found on this disk, checked before they are imported, adapted a family a file.

Nothing is downloaded. ``search`` asks the others: ``find`` looks for repositories, ``lock`` pins them, ``checks`` says
what is wrong with one. ``build`` imports it, and ``effects`` compares a process before and after that.
:mod:`layerzero.engine.hub` registers what is left. An adapter is a module here with ``kernels(build)``, and a line in
``ADAPTERS`` for each repository.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from layerzero.backends.hub.build import Build
from layerzero.core.kernel import Kernel

ADAPTERS = {
    "activation": "activation",
    "finegrained-fp8": "quantization",
    "flash-attn2": "attention",
    "flash-attn3": "attention",
    "fp8-fbgemm": "quantization",
    "layer-norm": "norms",
    "rmsnorm": "norms",
    "rotary": "rotary",
    "vllm-moe": "moe",
}
"""Repository, without its owner, to the module here that declares its kernels."""


def kernels_of(build: Build) -> Sequence[Kernel]:
    """The kernels of a build of a repository in ``ADAPTERS``, as its adapter declares them."""
    adapter = importlib.import_module(f"{__name__}.{ADAPTERS[build.name]}")
    found: Sequence[Kernel] = adapter.kernels(build)
    return found
