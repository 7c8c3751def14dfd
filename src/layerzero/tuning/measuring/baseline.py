"""What somebody without LayerZero would call: torch's own function for each of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from layerzero.ops.attention import layout as layouts
from layerzero.tuning.measuring.timing import Run


def torch_default(function: str, arguments: Mapping[str, Any]) -> Run | None:
    """A call of torch's own function with a call's arguments; None where torch has none for it."""
    make = _DEFAULTS.get(function)
    return None if make is None else make(**arguments)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = True, **others: Any
) -> Run | None:
    layout, scale = others.pop("layout", None) or "BSHD", others.pop("scale", None)
    axis = layouts.sequence_axis(layout)
    single = query.shape[axis] == 1
    aligned = not causal or single or query.shape[axis] == key.shape[axis]  # torch aligns top-left
    if not aligned or any(each is not None and each is not False and each != 0.0 for each in others.values()):
        return None
    heads_first = layout == "BHSD"
    q, k, v = (each if heads_first else each.transpose(1, 2) for each in (query, key, value))
    grouped = q.shape[1] != k.shape[1]

    def run() -> torch.Tensor:
        output = functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal and not single, scale=scale, enable_gqa=grouped
        )
        return output if heads_first else output.transpose(1, 2)

    return run


def _rms_norm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Run:  # noqa: A002  # torch's name
    return lambda: functional.rms_norm(input, weight.shape, weight, eps)


def _layer_norm(
    input: torch.Tensor,  # noqa: A002
    normalized_shape: tuple[int, ...],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Run:
    return lambda: functional.layer_norm(input, normalized_shape, weight, bias, eps)


def _add_rms_norm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
) -> Run:
    def run() -> torch.Tensor:
        residual.add_(input)
        return functional.rms_norm(residual, weight.shape, weight, eps)

    return run


_DEFAULTS: dict[str, Callable[..., Run | None]] = {
    "attention": _attention,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "add_rms_norm": _add_rms_norm,
}
