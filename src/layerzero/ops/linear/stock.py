"""torch's own products, with the arguments of ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.ops.activation.formulas import FUNCTIONS
from layerzero.ops.quantize.schemes import scheme_of
from layerzero.ops.quantize.weight_format import WeightFormat, fields_of


def linear(
    input: Tensor,
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


def quantized_linear(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activations: str | None = None,
    out_dtype: torch.dtype | None = None,
    weight_format: str | None = None,
    **others: Tensor | None,
) -> Callable[[], Tensor] | None:
    """The weight as floating numbers and ``torch.nn.functional.linear``; None where rows are quantized, too."""
    if activations is not None or out_dtype not in (None, input.dtype):
        return None
    if weight_format is not None:
        of, given = WeightFormat.of(weight_format), {**others, "weight": weight, "weight_scale": weight_scale}
        fields, scheme, columns = fields_of(given), scheme_of(of), input.shape[-1]

        def run() -> Tensor:
            with torch.no_grad():
                numbers = scheme.dequantized(of, fields, columns, torch.float32).to(input.dtype)
            return functional.linear(input, numbers, bias)

        return run
    assert weight_scale is not None
    scale = weight_scale.reshape(-1, 1)
    return lambda: functional.linear(input, (weight.to(torch.float32) * scale).to(input.dtype), bias)


def mlp(
    input: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None = None,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    activation: str = "silu",
    **_: object,
) -> Callable[[], Tensor]:
    """The products and the activation, one after the other, as models write them."""
    after, inner = FUNCTIONS[activation], down_weight.shape[1]

    def run() -> Tensor:
        through = functional.linear(input, up_weight, up_bias)
        if gate_weight is not None:
            through = after(functional.linear(input, gate_weight, gate_bias)) * through
        elif up_weight.shape[0] == inner:
            through = after(through)
        else:
            through = after(through[..., :inner]) * through[..., inner:]
        return functional.linear(through, down_weight, down_bias)

    return run


def qkv_linear(
    input: Tensor,
    q_weight: Tensor,
    k_weight: Tensor | None = None,
    v_weight: Tensor | None = None,
    *,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
    kv_features: int | None = None,
    **_: object,
) -> Callable[[], tuple[Tensor, ...]]:
    """A product for each weight; of a joined one, a product and its parts."""
    if k_weight is None or v_weight is None:
        count = kv_features or 0
        sizes = [q_weight.shape[0] - 2 * count, count, count]
        return lambda: torch.split(functional.linear(input, q_weight, q_bias), sizes, -1)
    pairs = (q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias)
    return lambda: tuple(functional.linear(input, weight, bias) for weight, bias in pairs)
