"""torch's own activations, with the arguments of ours."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from layerzero.ops.activation.formulas import relu2 as relu2_formula
from layerzero.ops.activation.formulas import swiglu_oai as swiglu_oai_formula

Run = Callable[[], Tensor]


def gelu(input: Tensor, *, approximate: str = "none") -> Run:
    """``torch.nn.functional.gelu``."""
    return lambda: functional.gelu(input, approximate=approximate)


def silu(input: Tensor) -> Run:
    """``torch.nn.functional.silu``."""
    return lambda: functional.silu(input)


def relu2(input: Tensor) -> Run:
    """``torch.nn.functional.relu`` and its square."""
    return lambda: relu2_formula(input)


def silu_mul(input: Tensor, up: Tensor | None = None) -> Run:
    """``torch.nn.functional.silu`` and a product."""
    gate, through = input.chunk(2, -1) if up is None else (input, up)
    return lambda: functional.silu(gate) * through


def gelu_mul(input: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Run:
    """``torch.nn.functional.gelu`` and a product."""
    gate, through = input.chunk(2, -1) if up is None else (input, up)
    return lambda: functional.gelu(gate, approximate=approximate) * through


def swiglu_oai(
    input: Tensor,
    up: Tensor | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Run:
    """The expression of gpt-oss."""
    gate, through = (input[..., ::2], input[..., 1::2]) if up is None else (input, up)
    return lambda: swiglu_oai_formula(gate, through, alpha, limit)
