"""PyTorch's own normalisation kernels, on every platform.

Library: torch >= 2.10, BSD-3-Clause. Called below ``torch.nn.functional``, whose Python is a share of a small call; the
results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.norm_limits import ElementsBelow, sum_then
from layerzero.backends.torch.attention import FLOATS, always, kernel
from layerzero.core import limits as limit
from layerzero.core.facts import Facts

# on a GPU a float64 row with an infinity ends in NaN, not in 0 next to it (H200, torch 2.11, 2026-11-21)
FINITE = limit.rule(
    "dtype: float32, float16 or bfloat16 on a GPU",
    lambda facts: facts.device.platform == "cpu" or facts["dtype"] is not torch.float64,
    "DTYPE_UNSUPPORTED",
    got="float64",
)


def rows_below(*sizes: str) -> limit.Limit:
    """Elements of rows that torch norms on a GPU, as far as it reaches them."""
    hint = "torch 2.11 computes where a row starts in 32 bits, and writes none beyond (H200, 2026-11-30)"
    return ElementsBelow(2**32, sizes, hint, ("cuda", "rocm"))


def _summed_by_one(facts: Facts) -> bool:
    """Threads share out the sum of a single row of 32,768 numbers or more, and of no row among others (torch 2.13)."""
    return facts.size("hidden") < 2**15 or facts.device.platform != "cpu"


_CHANNELS_LAST = (4, 5)
"""Numbers of axes that channels-last memory has."""


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    """The operator that ``torch.rms_norm`` calls where it has nothing to decide.

    It checks what was checked before, and takes another way for channels-last memory. Hit and 1 x 64 on one thread of a
    CPU, in units of ``torch.nn.functional.rms_norm``: this 0.93, ``torch.rms_norm`` 1.03 (torch 2.13, 2026-11-22).
    """
    shape = (facts.size("hidden"),)
    fused = getattr(torch, "_fused_rms_norm", None)
    if fused is None or facts["input_ndim"] in _CHANNELS_LAST:
        rms_norm = torch.rms_norm

        def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
            return rms_norm(input, shape, weight, eps)

        return run

    def run_fused(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return fused(input, shape, weight, eps)[0]  # type: ignore[no-any-return]

    return run_fused


def _load_add_rms_norm_inplace(facts: Facts) -> Callable[..., Any]:
    rms_norm = _load_rms_norm(facts)

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> None:
        residual.add_(input)
        input.copy_(rms_norm(residual, weight, eps=eps))

    return run


KERNELS = (
    *(
        kernel(
            f"torch.{name}",
            operation,
            load,
            limits=(FLOATS, FINITE, rows_below("rows", "hidden")),
            accepts=("eps",),
            grad=True,
            batch_invariant=_summed_by_one,
            tp_invariant=True,
            handles_negated=True,
            priority=10,
            stock=operation == "norm.rms",
        )
        for name, operation, load in (
            ("rms_norm", "norm.rms", _load_rms_norm),
            ("add_rms_norm", "norm.add_rms", lambda facts: sum_then(_load_rms_norm(facts))),
            ("add_rms_norm_inplace", "norm.add_rms.inplace", _load_add_rms_norm_inplace),
        )
    ),
    kernel(
        "torch.layer_norm",
        "norm.layer",
        always(torch.layer_norm),  # the function around it reads a switch that the operator ignores, 0.7 of 4 us
        FLOATS,
        rows_below("rows", "hidden"),
        limit.dim("hidden", min=2),  # of one element it returns rounding noise
        accepts=("normalized_shape", "weight", "bias", "eps"),
        grad=True,
        batch_invariant=True,
        tp_invariant=True,
        handles_negated=True,
        priority=40,
        stock=True,
    ),
)
