"""A backend in one file: an RMS norm and an attention, declared like the built-in ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel

EXAMPLE = Backend(
    name="example",
    summary="An example of a third-party backend",
    import_name="layerzero_example_plugin",
    distribution="layerzero-example-plugin",
    versions=">=1,<2",
)


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    def rms_norm(input: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    return rms_norm


KERNELS = (
    Kernel(
        id="example.rms_norm",
        operations=("norm.rms",),
        backend=EXAMPLE,
        load=_load_rms_norm,
        accepts=("eps",),
        limits=(limit.dtype("float32"), limit.dim("hidden", max=4096)),
        deterministic=True,
        priority=95,
    ),
)
