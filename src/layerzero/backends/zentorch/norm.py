"""zentorch's RMS norms, which take 0.02 to 0.5 of torch's time (Intel Xeon with AMX, 2026-11-21).

Library: zentorch 2.13.0.2, MIT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.one_thread import small_alone
from layerzero.backends.zentorch.library import BFLOAT16, DTYPES, VECTORS, ZENTORCH, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    operator = small_alone(operators().zentorch_rms_norm.default)
    hidden = facts.size("hidden")

    def run(input: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
        # It takes the first axis for the rows: of three axes it leaves most unwritten, of one it overruns the memory.
        output: Tensor = operator(input.view(-1, hidden), weight, epsilon)
        return output.view(input.shape)

    return run


def _load_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    operator = small_alone(operators().zentorch_add_rms_norm_.default)
    hidden = facts.size("hidden")

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output = input.clone(memory_format=torch.contiguous_format)  # it writes the norm over its input, the caller's
        operator(output.view(-1, hidden), weight, residual.view(-1, hidden), eps)
        increment_version(residual)  # as the operator should: whoever saved it for a backward pass must hear of it
        return output

    return run


def _eps_normal(facts: Facts) -> Reason | None:
    """It reads eps as float32, and returns memory that it never wrote where that is 0."""
    eps = facts["eps"]
    normal = isinstance(eps, (int, float)) and eps >= 1e-37
    return None if normal else Reason(ReasonCode.CONSTRAINT_FAILED, "eps", "at least 1e-37", eps)


_EPS = limit.Custom("eps >= 1e-37", _eps_normal)

KERNELS = (
    Kernel(
        id="zentorch.rms_norm",
        operations=("norm.rms",),
        backend=ZENTORCH,
        load=_load_rms_norm,
        accepts=("eps",),
        renames={"eps": "epsilon"},
        limits=(VECTORS, BFLOAT16, DTYPES, _EPS, limit.contiguous("input", "weight")),
        priority=60,
    ),
    Kernel(
        id="zentorch.add_rms_norm",
        operations=("norm.add_rms",),
        backend=ZENTORCH,
        load=_load_add_rms_norm,
        accepts=("eps",),
        limits=(VECTORS, BFLOAT16, DTYPES, _EPS, limit.contiguous("residual", "weight")),
        priority=60,
    ),
)
