"""The tensors of one layer of a cache by layout: their shapes, and where the tokens of a page lie in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

LAYOUTS = ("NHD", "HND", "VLLM")
"""Of a page: tokens first, heads first, or as vLLM's first kernels read it: keys split into 16 bytes, tokens last."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of a layer.

    Attributes:
        name: ``keys``, ``values``, ``ckv``, ``kpe``, ``key_scale``, ``value_scale``.
        inner: its shape behind the pages.
        token_axis: which of its axes is that of a page's tokens.
        dtype: of its elements.
        empty: what it holds where nothing was written.
    """

    name: str
    inner: tuple[int, ...]
    token_axis: int
    dtype: torch.dtype
    empty: float = 0.0

    @property
    def bytes_of_token(self) -> int:
        """What one token takes."""
        elements = 1
        for axis, size in enumerate(self.inner, 1):
            elements *= 1 if axis == self.token_axis else size
        return elements * self.dtype.itemsize


def heads_planes(
    layout: str, page_size: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Plane, ...]:
    """Keys and values with heads, in a layout."""
    head_dim, value_dim = dims
    if layout == "VLLM":
        x = 16 // dtype.itemsize
        return (
            Plane("keys", (kv_heads, head_dim // x, page_size, x), 3, dtype),
            Plane("values", (kv_heads, value_dim, page_size), 3, dtype),
        )
    if layout == "HND":
        inner, axis = (kv_heads, page_size), 2
    else:
        inner, axis = (page_size, kv_heads), 1
    return Plane("keys", (*inner, head_dim), axis, dtype), Plane("values", (*inner, value_dim), axis, dtype)


def latent_planes(page_size: int, dims: tuple[int, int], dtype: torch.dtype) -> tuple[Plane, ...]:
    """What multi-head latent attention keeps of a token: the compressed keys and values, and the rotated part."""
    return tuple(Plane(name, (page_size, dim), 1, dtype) for name, dim in zip(("ckv", "kpe"), dims, strict=True))


def scale_planes(page_size: int, kv_heads: int) -> tuple[Plane, ...]:
    """A scale for each token and head, tokens first whatever the layout; below 0 until it is set.

    Codes that were written by it are read as NaN. With 0 in its place those of int8 were read as 0, and nobody knew.
    """
    sizes = (page_size, kv_heads), 1, torch.float32
    return tuple(Plane(name, *sizes, empty=-math.inf) for name in ("key_scale", "value_scale"))


def are_columns(planes: Sequence[Plane]) -> bool:
    """Whether the planes of a layer lie side by side in one tensor: those of latent attention, as most kernels read."""
    return [each.name for each in planes] == ["ckv", "kpe"]
