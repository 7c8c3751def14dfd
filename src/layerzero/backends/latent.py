"""Latent and rotated parts as one tensor, for libraries that read both through one pointer."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.reasons import Reason, ReasonCode


def joined(latent: Tensor, rotated: Tensor) -> Tensor:
    """Both side by side: where they lie so in memory as they are, in a copy otherwise.

    Shapes: latent (..., C), rotated (..., R) → (..., C + R)
    """
    width = latent.shape[-1] + rotated.shape[-1]
    beside = latent.data_ptr() + latent.shape[-1] * latent.element_size() == rotated.data_ptr()
    if beside and latent.stride() == rotated.stride() and latent.stride(-1) == 1:
        whole = latent.untyped_storage()
        if whole.data_ptr() == rotated.untyped_storage().data_ptr():
            return latent.as_strided((*latent.shape[:-1], width), latent.stride())
    return torch.cat((latent, rotated), -1)


def _columns_of_one(facts: Facts) -> Reason | None:
    """Planes whose tokens step by the width of both; the addresses are looked at in the call."""
    latent, rotated = facts.tensors["ckv_cache"], facts.tensors["kpe_cache"]
    _, page_size, width = latent.shape
    both = width + rotated.shape[2]
    wanted = (page_size * both, both, 1)
    if latent.strides == wanted == rotated.strides:
        return None
    return Reason(
        ReasonCode.NOT_CONTIGUOUS,
        "ckv_cache",
        f"strides {wanted}, as kpe_cache: columns of one dense tensor",
        f"{latent.strides} and {rotated.strides}",
        "Make both planes as views of one tensor (pages, page_size, latent + rope)",
    )


COLUMNS_OF_ONE = limit.Custom("ckv_cache and kpe_cache: columns of one dense tensor", _columns_of_one)
WIDTHS = (limit.dim("latent_dim", one_of=(512,)), limit.dim("rope_dim", one_of=(64,)))
"""DeepSeek's, which kernels are built for."""
