"""The slope of each head, as the paper has them."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError


def alibi_slopes(heads: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Tensor:
    """Make the slopes for ``lz.alibi_bias``: a geometric sequence from ``2^(-8/n)`` to ``2^-8`` for n heads.

    Where n is no power of two, p being the next below: those of p heads, then every second of 2 p heads, as the
    paper's own code has it.

    Shapes: → (heads,)
    Dtype: ``dtype``, rounded once from float64.
    Raises: InvalidCallError for a number of heads below 1.
    Source: arXiv:2108.12409.
    """
    if type(heads) is not int or heads < 1:
        raise InvalidCallError("alibi_slopes", [f"heads: wanted a number of at least 1, got {told(heads)}"])
    whole = 1 << (heads.bit_length() - 1)
    between = _of_power(2 * whole)[::2][: heads - whole]
    return torch.cat((_of_power(whole), between)).to(device=device, dtype=dtype)


def _of_power(heads: int) -> Tensor:
    return torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float64))
