"""Random arguments of rotations with an append: both kinds of caches in any memory, slots in any order or none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops.draw import Draw
from layerzero.ops.paged.declare import CACHE_LAYOUTS
from layerzero.ops.paged.draw import quantize
from layerzero.ops.rope.draw import draw_table, norm_weights

_HEAD_DIMS = (2, 7, 16, 33, 64, 80, 128)
_HEAD_DIM_WEIGHTS = (1, 1, 2, 1, 5, 2, 4)


def _caches(
    draw: Draw, lead: tuple[int, int], kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """In NHD: apart, side by side in one tensor, or padded."""
    form = draw.of(("apart", "joined", "padded"), (3, 1, 1))
    if form == "joined" and dims[0] == dims[1]:
        joined = draw.normal((lead[0], 2, lead[1], kv_heads, dims[0]), dtype)
        return [joined[:, 0], joined[:, 1]]
    extra = 8 if form == "padded" else 0
    return [draw.normal((*lead, kv_heads, dim + extra), dtype)[..., :dim] for dim in dims]


def _transposed(draw: Draw, lead: tuple[int, int], kv_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """In NHD, each page of the keys the other way round in memory, as vLLM's CPU kernels want them."""
    pages, page_size = lead
    keys = draw.normal((pages, kv_heads, width, page_size), dtype).permute(0, 3, 1, 2)
    return [keys, draw.normal((pages, kv_heads, page_size, width), dtype).transpose(1, 2)]


def rope_append_(draw: Draw, dtype: torch.dtype, *, joined: bool = False) -> dict[str, Any]:
    """Draw a call of ``lz.rope_append_``; ``joined``: one whose parts have one width, with a table of angles alone."""
    kv_heads = draw.of((1, 2, 3))
    heads = kv_heads * draw.of((1, 2, 4))
    head_dim = draw.of(_HEAD_DIMS, _HEAD_DIM_WEIGHTS)
    dims = head_dim, draw.of(_HEAD_DIMS) if not joined and draw.chance(0.1) else head_dim
    half = head_dim // 2 if draw.chance(0.6) else draw.of([each for each in (1, 3, 8, 16) if 2 * each <= head_dim])
    paged = draw.chance(0.5)
    transposed = paged and draw.chance(0.3)
    if transposed:  # kernels that read such caches know fewer sizes
        dims, half = (draw.of((32, 64, 128)),) * 2, draw.of((8, 16))
    arguments: dict[str, Any] = {}
    if paged:
        lead = draw.of((1, 2, 9)), draw.of((16, 32, 48) if transposed else (1, 3, 8, 16))
        token: tuple[int, ...] = (min(draw.of((0, 1, 2, 5, 17), (1, 6, 6, 6, 4)), lead[0] * lead[1]),)
        rows = draw.of((1, 40, 129))
        slots = torch.randperm(lead[0] * lead[1], generator=draw.data)[: token[0]]
        if draw.chance(0.3):
            slots = slots.masked_fill(torch.rand(token, generator=draw.data) < draw.of((0.3, 1.1)), -1)
        arguments["slot_mapping"] = draw.laid_out(slots.to(draw.device), expand=False)
        positions = draw.integers(token, rows - 1, torch.int64)
    else:
        lead = draw.of((1, 2, 3)), draw.of((1, 8, 40))
        token = lead[0], min(draw.of((0, 1, 2, 5, 17), (1, 8, 4, 4, 2)), lead[1])
        rows = lead[1] + draw.of((0, 3, 60))
        count = draw.of((lead[0], 1)) if draw.chance(0.7) else 0
        places = [torch.randperm(lead[1], generator=draw.data)[: token[1]] for _ in range(max(count, 1))]
        positions = (torch.stack(places) if count else places[0]).to(draw.device)
    if draw.chance(0.25):
        positions = positions.int()
    cos, sin = draw_table(draw, rows, half, draw.of((torch.float32, dtype), (3, 2)), angles_alone=joined)
    layout = draw.of(CACHE_LAYOUTS)
    if transposed:
        caches = _transposed(draw, lead, kv_heads, dims[0], dtype)
    else:
        caches = _caches(draw, lead, kv_heads, dims, dtype)
    if layout != CACHE_LAYOUTS[0]:
        caches = [each.transpose(1, 2) for each in caches]
        caches = [each.contiguous() for each in caches] if draw.chance(0.5) and not transposed else caches
    arguments |= {
        "query": draw.laid_out(draw.normal((*token, heads, dims[0]), dtype)),
        "key": draw.laid_out(draw.normal((*token, kv_heads, dims[0]), dtype)),
        "value": draw.laid_out(draw.normal((*token, kv_heads, dims[1]), dtype)),
        "cos": cos,
        "sin": sin,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "positions": draw.laid_out(positions, expand=False),
        "layout": layout,
    }
    if draw.chance(0.4):
        arguments["interleaved"] = True
    if paged and not joined and not transposed and draw.chance(0.25):
        return quantize(draw, arguments)
    draw.poison(arguments, ("query", "key", "value"))
    return arguments


def split_qkv_norm_rope_append_(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.split_qkv_norm_rope_append_``: the parts of a call of ``lz.rope_append_``, joined."""
    arguments = rope_append_(draw, dtype, joined=True)
    qkv = torch.cat([arguments.pop(name) for name in ("query", "key", "value")], -2).flatten(-2)
    if draw.chance(0.6):
        arguments |= norm_weights(draw, dtype, arguments["key_cache"].shape[-1])
    return {"qkv": draw.laid_out(qkv), **arguments}
