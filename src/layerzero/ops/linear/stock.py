"""torch's own products, with the arguments of ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.ops.activation.formulas import FUNCTIONS


def linear(
    input: Tensor,  # noqa: A002  # torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    packed: object = None,  # it changes no result
) -> Callable[[], Tensor] | None:
    """``torch.nn.functional.linear`` and the activation after it; None for a result that is wider than the input."""
    if out_dtype not in (None, input.dtype):
        return None
    if activation is None:
        return lambda: functional.linear(input, weight, bias)
    after = FUNCTIONS[activation]
    return lambda: after(functional.linear(input, weight, bias))
