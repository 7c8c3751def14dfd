"""The attention call of a step over a cache, without its data: what a kernel is chosen by before there is a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from layerzero.ops.paged.quantized import QUANTIZED

if TYPE_CHECKING:
    from layerzero.ops.kv.cache import KVCache

Call = tuple[str, dict[str, Any]]
"""A function's name and its arguments."""


def attention_over(
    cache: KVCache,
    heads: int,
    batch: int,
    tokens: int,
    *,
    layout: str | None = None,
    dtype: torch.dtype | None = None,
    tree: bool = False,
) -> Call | None:
    """The call of ``batch`` sequences with so many new tokens each over one page that is like the cache's.

    Args:
        heads: of the queries.
        layout, dtype: of the page; those of the cache if None.
        tree: whether new tokens see each other by a mask.
    Returns: None where no function attends over such a cache, or none with a mask.
    """
    layout, dtype = layout or cache.layout, dtype or cache.dtype
    like: dict[str, Any] = {"dtype": torch.bfloat16 if dtype in QUANTIZED else dtype, "device": cache.device}
    given: dict[str, Any] = {
        "block_tables": torch.zeros((batch, 16), dtype=torch.int32, device=cache.device),
        "context_lens": torch.full((batch,), tokens, dtype=torch.int32, device=cache.device),
    }
    if layout == "MLA":
        widths = [each.inner[-1] for each in cache._planes]
        queries = (torch.empty(batch, tokens, heads, width, **like) for width in widths)
        whole = torch.empty(1, max(cache.page_size, tokens), sum(widths), **like)
        planes = torch.split(whole, widths, -1)
        named = zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), (*queries, *planes), strict=True)
        return None if tree else ("mla_attention", {**dict(named), **given, "scale": 1.0})
    if layout not in ("NHD", "HND") or (tree and dtype in QUANTIZED):
        return None
    kv_heads, head_dim, value_dim = cache.head_sizes
    inner = (cache.page_size, kv_heads) if layout == "NHD" else (kv_heads, cache.page_size)
    for name, width in (("key_cache", head_dim), ("value_cache", value_dim)):
        given[name] = torch.empty((1, *inner, width), dtype=dtype, device=cache.device)
    if layout == "HND" and cache._planes[0].transposed:
        given["key_cache"] = given["key_cache"].transpose(2, 3).contiguous().transpose(2, 3)
    if dtype in QUANTIZED:
        given |= {name: torch.ones((), device=cache.device) for name in ("key_scale", "value_scale")}
    given["query"] = torch.empty(batch, 1, heads, head_dim, **like)
    if tokens > 1 or tree:
        given["query"] = torch.empty(batch * tokens, heads, head_dim, **like)
        starts = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device=cache.device)
        given |= {"cu_seqlens_q": starts, "max_seqlen_q": tokens}
    if tree:
        given["tree_mask"] = torch.ones(tokens, tokens, dtype=torch.bool, device=cache.device).tril().repeat(batch, 1)
    return "paged_attention", {**given, "layout": layout}
