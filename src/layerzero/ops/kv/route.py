"""The routes of what moves tokens in and out of caches, the checks of their calls, and random calls.

Random calls have any memory, and places in any order, none of them twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.errors import refuse
from layerzero.core.operation import Function, Routed
from layerzero.ops.draw import Draw
from layerzero.ops.kv import declare
from layerzero.ops.paged.append import SHARED, check_moved
from layerzero.ops.paged.declare import CACHE_LAYOUTS
from layerzero.ops.paged.draw import quantize
from layerzero.ops.paged.quantized import scale_problems


def _route_append(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    routed = check_moved("append_kv_", arguments, declare.APPEND, 4, ())
    key, positions, layout = arguments["key"], arguments["positions"], arguments["layout"]
    (batch, seq), length = key.shape[:2], arguments["key_cache"].shape[1 + layout.index("N")]
    problems = []
    if tuple(positions.shape) not in ((seq,), (1, seq), (batch, seq)):
        problems.append(
            f"positions: wanted shape ({batch}, {seq}), (1, {seq}) or ({seq},), got {tuple(positions.shape)}"
        )
    if seq > length:
        problems.append(f"key_cache: wanted a place for each of {seq} tokens, got {length}")
    refuse("append_kv_", problems)
    shared = positions.ndim == 1 or positions.shape[0] == 1  # else each sequence has its row, and their number stays
    long_enough = (1 << int(seq).bit_length()) - 1 <= length
    return replace(routed, varies=(*(("batch",) if shared else ()), *(("seq",) if long_enough else ())))


def _route_gather(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    return check_moved("gather_paged_kv", arguments, declare.GATHER, 0, ("tokens", "pages"))


def _route_copy(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    return check_moved("copy_kv_blocks_", arguments, declare.COPY_BLOCKS, 0, ("copied_pages", "pages"))


def _route_quantized(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "append_quantized_kv_"
    routed = check_moved(name, arguments, declare.APPEND_QUANTIZED, 3, ("tokens",))
    refuse(name, scale_problems(arguments, arguments["layout"]))
    return routed


_HEAD_DIMS = (1, 7, 16, 64, 128)


def _draw_caches(draw: Draw, lead: tuple[int, int], dtype: torch.dtype) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """Both caches in a layout, apart or side by side in each token, and their heads and widths."""
    kv_heads, dim = draw.of((1, 2, 3)), draw.of(_HEAD_DIMS)
    value_dim = draw.of(_HEAD_DIMS) if draw.chance(0.1) else dim
    if draw.chance(0.3) and value_dim == dim:
        joined = draw.normal((*lead, 2, kv_heads, dim), dtype)
        caches = [joined[:, :, 0], joined[:, :, 1]]
    else:
        caches = [draw.normal((*lead, kv_heads, width), dtype) for width in (dim, value_dim)]
    layout = draw.of(CACHE_LAYOUTS)
    if layout != CACHE_LAYOUTS[0]:
        caches = [each.transpose(1, 2) for each in caches]
        caches = [each.contiguous() for each in caches] if draw.chance(0.5) else caches
    return {"key_cache": caches[0], "value_cache": caches[1], "layout": layout}, (kv_heads, dim, value_dim)


def _draw_new(draw: Draw, token: tuple[int, ...], heads: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    kv_heads, dim, value_dim = heads
    return {
        "key": draw.laid_out(draw.normal((*token, kv_heads, dim), dtype)),
        "value": draw.laid_out(draw.normal((*token, kv_heads, value_dim), dtype)),
    }


def _draw_append(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    lead = draw.of((1, 2, 3)), draw.of((1, 8, 40))
    seq = min(draw.of((0, 1, 2, 5, 17), (1, 8, 4, 4, 2)), lead[1])
    arguments, heads = _draw_caches(draw, lead, dtype)
    count = draw.of((lead[0], 1, 0))
    places = [torch.randperm(lead[1], generator=draw.data)[:seq] for _ in range(max(count, 1))]
    positions = (torch.stack(places) if count else places[0]).to(draw.device)
    positions = positions.int() if draw.chance(0.25) else positions
    made = {**_draw_new(draw, (lead[0], seq), heads, dtype), **arguments}
    return made | {"positions": draw.laid_out(positions, expand=False)}


def _draw_gather(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.gather_paged_kv``: slots may come twice, or be none."""
    pages, page_size = draw.of((1, 2, 9)), draw.of((1, 3, 8, 16))
    arguments, _ = _draw_caches(draw, (pages, page_size), dtype)
    tokens = draw.of((0, 1, 2, 5, 17), (1, 6, 6, 6, 4))
    slots = torch.randint(-1 if draw.chance(0.3) else 0, pages * page_size, (tokens,), generator=draw.data)
    return arguments | {"slot_mapping": draw.laid_out(slots.to(draw.device))}


def _draw_copy(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.copy_kv_blocks_``: a page may be read and written."""
    pages, page_size = draw.of((1, 2, 9, 12)), draw.of((1, 3, 8, 16))
    arguments, _ = _draw_caches(draw, (pages, page_size), dtype)
    copies = min(draw.of((0, 1, 2, 3, 5, 6), (1, 2, 3, 3, 4, 4)), pages)
    sources = torch.randint(0, pages, (copies,), generator=draw.data).to(draw.device)
    targets = torch.randperm(pages, generator=draw.data)[:copies].to(draw.device)
    named = {"from_pages": draw.laid_out(sources, expand=False), "to_pages": draw.laid_out(targets, expand=False)}
    return arguments | named


def _draw_quantized(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.append_quantized_kv_``: some quotients lie beyond the range."""
    pages, page_size = draw.of((1, 2, 9)), draw.of((1, 3, 8, 16))
    arguments, heads = _draw_caches(draw, (pages, page_size), dtype)
    tokens = min(draw.of((0, 1, 2, 5, 17), (1, 6, 6, 6, 4)), pages * page_size)
    slots = torch.randperm(pages * page_size, generator=draw.data)[:tokens]
    if draw.chance(0.3):
        slots = slots.masked_fill(torch.rand(tokens, generator=draw.data) < draw.of((0.3, 1.1)), -1)
    made = {**_draw_new(draw, (tokens,), heads, dtype), **quantize(draw, arguments)}
    return made | {"slot_mapping": draw.laid_out(slots.to(draw.device), expand=False)}


FUNCTIONS = tuple(
    Function(
        name=each.__name__,
        signature=each,
        route=route,
        operations=(operation,),
        draw=draw,
        weight=1,
        renamed={each.__name__.removesuffix("_"): each.__name__} if each.__name__.endswith("_") else {},
        may_share_storage=SHARED if each.__name__.endswith("_") else frozenset(),
    )
    for each, route, operation, draw in (
        (declare.append_kv_, _route_append, declare.APPEND, _draw_append),
        (declare.gather_paged_kv, _route_gather, declare.GATHER, _draw_gather),
        (declare.copy_kv_blocks_, _route_copy, declare.COPY_BLOCKS, _draw_copy),
        (declare.append_quantized_kv_, _route_quantized, declare.APPEND_QUANTIZED, _draw_quantized),
    )
)
