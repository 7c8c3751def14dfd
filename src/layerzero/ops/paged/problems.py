"""What is wrong with the tensors of a call over pages, before anybody asks what they mean."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.ops.paged.declare import CACHE_LAYOUTS


def shape_problems(arguments: dict[str, Any], names: tuple[str, ...], ndim: int) -> list[str]:
    """Tensors that are none, or have another number of axes."""
    problems = []
    for name in names:
        tensor = arguments[name]
        if not isinstance(tensor, Tensor):
            problems.append(f"{name}: wanted a tensor, got {type(tensor).__name__}")
        elif tensor.ndim != ndim:
            problems.append(f"{name}: wanted a {ndim}D tensor, got {tensor.ndim}D {tuple(tensor.shape)}")
    return problems


def layout_problems(layout: object) -> list[str]:
    """A layout that is none."""
    fits = isinstance(layout, str) and layout in CACHE_LAYOUTS
    return [] if fits else [f"layout: wanted {' or '.join(CACHE_LAYOUTS)}, got {told(layout)}"]


def head_problems(query: Tensor, key_cache: Tensor, layout: str) -> tuple[list[str], bool]:
    """Sizes of heads that mean nothing, and whether that is because one count does not divide the other."""
    heads, kv_heads = query.shape[-2], key_cache.shape[1 + layout.index("H")]
    if not heads or not kv_heads or not query.shape[-1] or not key_cache.shape[1 + layout.index("N")]:
        shapes = f"query {tuple(query.shape)} and key_cache {tuple(key_cache.shape)} in {layout}"
        return [f"wanted heads, head dim and page size above 0, got {shapes}"], False
    if heads % kv_heads:
        problem = (
            f"query heads must be a multiple of kv heads: got {heads} query heads and {kv_heads} kv heads in {layout} "
            f"(key_cache {tuple(key_cache.shape)}); pass layout= if the axes are the other way round"
        )
        return [problem], True
    return [], False
