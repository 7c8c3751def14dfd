"""torch's own norms, with the arguments of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

Run = Callable[[], torch.Tensor]


def rms_norm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Run:
    """``torch.nn.functional.rms_norm``."""
    return lambda: functional.rms_norm(input, weight.shape, weight, eps)


def layer_norm(
    input: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Run:
    """``torch.nn.functional.layer_norm``."""
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    return lambda: functional.layer_norm(input, shape, weight, bias, eps)


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
) -> Run:
    """``residual.add_`` and ``torch.nn.functional.rms_norm``."""

    def run() -> torch.Tensor:
        residual.add_(input)
        return functional.rms_norm(residual, weight.shape, weight, eps)

    return run


def add_rms_norm_(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
) -> Callable[[], None]:
    """``residual.add_`` and ``torch.nn.functional.rms_norm``, copied over the input."""

    def run() -> None:
        residual.add_(input)
        input.copy_(functional.rms_norm(residual, weight.shape, weight, eps))

    return run
