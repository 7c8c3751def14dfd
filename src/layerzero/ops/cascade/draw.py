"""Random states to merge, and random decodes behind a prefix that all sequences share."""

from __future__ import annotations

from typing import Any

import torch

from layerzero.ops.draw import Draw
from layerzero.ops.paged.declare import CACHE_LAYOUTS
from layerzero.ops.paged.draw import fill, tables
from layerzero.ops.paged.step import StepMetadata

_HEAD_DIMS = (1, 7, 16, 32, 64, 128, 256)


def merge_states(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.merge_attention_states``: parts that saw no key among them, and parts that weigh nothing."""
    tokens, heads, dim = draw.of((0, 1, 2, 5, 33)), draw.of((1, 2, 3, 8)), draw.of(_HEAD_DIMS)
    arguments: dict[str, Any] = {}
    for part in "ab":
        output = draw.normal((tokens, heads, dim), dtype)
        lse = draw.normal((heads, tokens), torch.float32) * draw.of((1.0, 20.0))
        if draw.chance(0.4):
            blind = draw.uniform((heads, tokens), torch.float32) < 0.4
            lse, output = lse.masked_fill(blind, -torch.inf), output.masked_fill(blind.t().unsqueeze(-1), 0.0)
        arguments |= {
            f"output_{part}": draw.laid_out(output, expand=False),
            f"lse_{part}": draw.laid_out(lse, expand=False),
        }
    return arguments


def cascade_attention(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.cascade_attention``: whatever lies beyond a sequence is NaN."""
    batch, kv_heads, page_size = draw.of((1, 2, 3, 5)), draw.of((1, 2, 3)), draw.of((1, 3, 8, 16, 32))
    heads, dim = kv_heads * draw.of((1, 2, 4), (6, 2, 2)), draw.of((1, 7, 16, 32, 64, 128), (1, 1, 2, 2, 4, 3))
    blocks = draw.of((1, 2, 3, 7))
    shared = draw.stream.randint(1, blocks)
    capacity, least = blocks * page_size, shared * page_size
    lens = draw.integers((batch,), capacity - least, torch.int32) + least
    table, pages = tables(draw, lens, blocks, page_size, shared)
    shape = (pages, page_size, kv_heads, dim)
    keys, values = (torch.full(shape, float("nan"), dtype=dtype, device=draw.device) for _ in range(2))
    fill(draw, (keys, values), table, lens, dtype)
    layout = draw.of(CACHE_LAYOUTS)
    caches = [cache if layout == CACHE_LAYOUTS[0] else cache.transpose(1, 2) for cache in (keys, values)]
    arguments: dict[str, Any] = {
        "query": draw.laid_out(draw.normal((batch, 1, heads, dim), dtype)),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_tables": table,
        "context_lens": lens,
        "shared_blocks": shared,
        "layout": layout,
    }
    if draw.chance(0.15):
        arguments["scale"] = draw.of((0.25, 3.0)) * dim**-0.5
    if draw.chance(0.1):
        arguments["window"] = (draw.of((0, 1, 4, 40)), 0)
    if draw.chance(0.1):
        arguments["softcap"] = draw.of((0.5, 5.0, 30.0))
    if draw.chance(0.2):
        arguments["return_lse"] = True
    if draw.chance(0.4):
        arguments["step"] = StepMetadata(table, lens, capturable=draw.chance(0.5))
    return arguments
