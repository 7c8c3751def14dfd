"""A paged cache of keys and values that knows its layout: what is written in one is not read in another."""

from __future__ import annotations

import torch
from torch import Tensor

from layerzero.core.arguments import told, too_large
from layerzero.core.errors import InvalidCallError
from layerzero.ops.paged import written
from layerzero.ops.paged.declare import CACHE_LAYOUTS


class PagedCache:
    """The pages of one layer.

        cache = lz.PagedCache.allocate(pages=4096, page_size=16, kv_heads=8, head_dim=128, device="cuda")
        lz.append_paged_kv(k, v, cache.keys, cache.values, step.slot_mapping(cache.page_size), layout=cache.layout)
        lz.paged_attention(q, cache.keys, cache.values, tables, lens, step=step, layout=cache.layout)

    While it lives, calls on its memory that name another layout raise, those that were chosen before too. It costs a
    call in the one layout of all caches nothing; where there are caches of both, each call looks at its memory (1 us).

    Attributes:
        keys, values: (P, N, K, D) and (P, N, K, D_v) in ``NHD``; (P, K, N, D) and (P, K, N, D_v) in ``HND``.
        layout: ``NHD`` or ``HND``, the order of tokens and heads in a page.
    Raises: InvalidCallError for tensors that are no cache together, and for memory that another one says is written
        otherwise (KV_CACHE_LAYOUT_MISMATCH).
    """

    __slots__ = ("__weakref__", "keys", "layout", "values")

    def __init__(self, keys: Tensor, values: Tensor, layout: str = "NHD") -> None:
        problems = []
        if layout not in CACHE_LAYOUTS:
            problems.append(f"layout: wanted {' or '.join(CACHE_LAYOUTS)}, got {told(layout)}")
        for name, tensor in (("keys", keys), ("values", values)):
            if not isinstance(tensor, Tensor) or tensor.ndim != 4 or not tensor.is_floating_point():
                got = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
                problems.append(f"{name}: wanted a floating tensor of pages, tokens, heads and head dim, got {got}")
        if not problems and (keys.shape[:3] != values.shape[:3] or keys.device != values.device):
            wanted = f"{tuple(keys.shape[:3])} on {keys.device} as keys"
            problems.append(f"values: wanted {wanted}, got {tuple(values.shape[:3])} on {values.device}")
        if problems:
            raise InvalidCallError("PagedCache", problems)
        self.keys, self.values, self.layout = keys, values, layout
        written.declare(self, {"keys": keys, "values": values}, layout)

    @classmethod
    def allocate(
        cls,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        layout: str = "NHD",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> PagedCache:
        """Make one of zeros; ``value_dim`` is ``head_dim`` if None. Raises: InvalidCallError for what is no size."""
        sizes = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes |= {} if value_dim is None else {"value_dim": value_dim}
        problems = [
            f"{name}: wanted a number of at least 0, got {told(size)}"
            for name, size in sizes.items()
            if type(size) is not int or size < 0 or too_large(size)
        ]
        if problems:
            raise InvalidCallError("PagedCache.allocate", problems)
        inner = (kv_heads, page_size) if layout == "HND" else (page_size, kv_heads)
        keys = torch.zeros(pages, *inner, head_dim, dtype=dtype, device=device)
        values = torch.zeros(pages, *inner, head_dim if value_dim is None else value_dim, dtype=dtype, device=device)
        return cls(keys, values, layout)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.keys.shape[1 + self.layout.index("N")])

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return int(self.keys.shape[1 + self.layout.index("H")])

    def __repr__(self) -> str:
        shape, dtype = tuple(self.keys.shape), self.keys.dtype
        return f"PagedCache({shape[0]} pages of {self.page_size} tokens, {self.kv_heads} heads, {self.layout}, {dtype})"
