"""Norm and rotation out of what a library has for each: two norms into new memory, rotated where they lie."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Norm = Callable[[Tensor, Tensor, float], Tensor]
"""Of contiguous heads (..., H, D) with a weight (D,) and eps, into new contiguous memory."""

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor]]
"""Of query, key, cos, sin, positions, interleaved; it may write over query and key and return them."""

ACCEPTS = ("positions", "interleaved", "eps")
"""What such a kernel honours; libraries that add one to the weight say so themselves."""


def norm_then_rope(norm: Norm, rotate: Rotate) -> Callable[..., tuple[Tensor, Tensor]]:
    """What a kernel of posenc.qk_norm_rope calls."""

    def run(
        query: Tensor,
        key: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        positions: Tensor | None = None,
        interleaved: bool = False,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        return rotate(norm(query, q_weight, eps), norm(key, k_weight, eps), cos, sin, positions, interleaved)

    return run
