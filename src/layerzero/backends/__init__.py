"""Kernel libraries: a file each, or a folder where one has several families; what declares kernels holds ``KERNELS``.

All declarations are read at the first call (10 ms); a library itself is imported when one of its kernels was chosen.

Add a backend: write its file and its line here, in alphabetical order..
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator

from layerzero.core.kernel import Kernel, Trust

BUILTIN: tuple[str, ...] = (
    "aiter",
    "apex",
    "cudnn_frontend",
    "cudnn_ragged",
    "flash_attn",
    "flashinfer",
    "ggml",
    "habana",
    "humming",
    "layerzero_triton",
    "liger",
    "liger_gradients",
    "onnxruntime",
    "quack",
    "splintr",
    "tokenizer_readers",
    "tokenizers",
    "torch",
    "vllm",
    "vllm_cpu",
    "xformers",
    "zentorch",
)
"""Modules of this package, sorted."""


def builtin_kernels() -> Iterator[Kernel]:
    """Every kernel that is declared here, library by library.

    A library of which no version is in ``tested`` never ran: its kernels are untried, whatever they declare.
    """
    for kernel in _declared():
        ran = kernel.backend.tested or kernel.trust is not Trust.DECLARED
        yield kernel if ran else dataclasses.replace(kernel, trust=Trust.UNTRIED)


def _declared() -> Iterator[Kernel]:
    for name in BUILTIN:
        module = importlib.import_module(f"{__name__}.{name}")
        for part in sorted(each.name for each in pkgutil.iter_modules(getattr(module, "__path__", ()))):
            yield from getattr(importlib.import_module(f"{__name__}.{name}.{part}"), "KERNELS", ())
        yield from getattr(module, "KERNELS", ())
