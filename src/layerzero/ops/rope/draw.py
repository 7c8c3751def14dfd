"""Random arguments of rotations: partial widths, shared and shuffled positions, tables in any memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops.draw import Draw

_HEAD_DIMS = (2, 7, 16, 33, 64, 80, 96, 128)
_HEAD_DIM_WEIGHTS = (1, 1, 2, 1, 5, 2, 1, 4)


def draw_table(draw: Draw, rows: int, half: int, dtype: torch.dtype, *, angles_alone: bool) -> tuple[Tensor, Tensor]:
    """Side by side in one tensor, or each in memory of its own; now and then angles, now and then any numbers."""
    if angles_alone or draw.chance(0.7):
        angles = draw.uniform((rows, half), torch.float32) * 6.3
        pair = angles.cos(), angles.sin()
    else:
        pair = draw.normal((rows, half), torch.float32), draw.normal((rows, half), torch.float32)
    if draw.chance(0.6):
        joined = torch.cat(pair, -1).to(dtype)
        return joined[:, :half], joined[:, half:]
    cos, sin = (draw.laid_out(each.to(dtype)) for each in pair)
    return cos, sin


def _positions(draw: Draw, rows: int, batch: tuple[int, ...], seq: int) -> Tensor | None:
    """Places in any order, some twice; now and then those that are meant without any."""
    form = draw.of(("each", "shared", "one row", "none"), (5, 2, 1, 2))
    if form == "none" and seq <= rows:
        return None
    shape = {"shared": (seq,), "one row": (1, seq) if batch else (seq,)}.get(form, (*batch, seq))
    kind = draw.of((torch.int64, torch.int32), (3, 1))
    return draw.laid_out(draw.integers(shape, rows - 1, kind), expand=False)


def _arguments(draw: Draw, dtype: torch.dtype, *, angles_alone: bool = False) -> dict[str, Any]:
    kv_heads = draw.of((1, 2, 3))
    heads = kv_heads * draw.of((1, 2, 4))
    head_dim = draw.of(_HEAD_DIMS, _HEAD_DIM_WEIGHTS)
    half = head_dim // 2 if draw.chance(0.6) else draw.of([each for each in (1, 3, 8, 16, 20) if 2 * each <= head_dim])
    seq = draw.of((0, 1, 2, 5, 17), (1, 10, 6, 6, 3))
    batch = () if draw.chance(0.5) else (draw.of((1, 2, 3)),)
    rows = draw.of((max(seq, 1), 40, 129))
    table = draw.of((torch.float32, dtype), (3, 2))
    cos, sin = draw_table(draw, rows, half, table, angles_alone=angles_alone)
    arguments: dict[str, Any] = {
        "query": draw.normal((*batch, seq, heads, head_dim), dtype),
        "key": draw.normal((*batch, seq, kv_heads, head_dim), dtype),
        "cos": cos,
        "sin": sin,
    }
    positions = _positions(draw, rows, batch, seq)
    if positions is not None:
        arguments["positions"] = positions
    arguments |= draw.maybe(0.4, interleaved=lambda: True)
    layout = draw.of(("BSHD", "BHSD")) if batch else ""
    if layout == "BHSD":
        arguments |= {name: arguments[name].transpose(1, 2).contiguous() for name in ("query", "key")}
    if layout:
        arguments["layout"] = layout
    return arguments


def rope(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.rope``."""
    arguments = _arguments(draw, dtype)
    arguments |= {name: draw.laid_out(arguments[name]) for name in ("query", "key")}
    return draw.poison(arguments, ("query", "key"))


def rope_one(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.rope_one``: the queries of one of ``lz.rope``."""
    arguments = _arguments(draw, dtype)
    del arguments["key"]
    arguments = {"input": draw.laid_out(arguments.pop("query")), **arguments}
    return draw.poison(arguments, ("input",))


def rope_(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.rope_``: queries and keys anywhere, or parts of one projection's output."""
    arguments = _arguments(draw, dtype)
    query, key = arguments["query"], arguments["key"]
    tokens_first = arguments.get("layout") != "BHSD"
    if tokens_first and draw.chance(0.4):
        width, each = query.shape[-1], (query.shape[-2], key.shape[-2], key.shape[-2])
        packed = torch.full((*query.shape[:-2], sum(each) * width), float("nan"), dtype=dtype, device=query.device)
        parts = torch.split(packed, [heads * width for heads in each], -1)
        for name, tensor, part in zip(("query", "key"), (query, key), parts, strict=False):
            arguments[name] = part.view(tensor.shape).copy_(tensor)
        return arguments
    arguments |= {name: draw.laid_out(arguments[name], expand=False) for name in ("query", "key")}
    return draw.poison(arguments, ("query", "key"))


def norm_weights(draw: Draw, dtype: torch.dtype, width: int) -> dict[str, Any]:
    """Weights of norms near 1 and what goes with them; near 0 where one is added to them."""
    plus_one = draw.chance(0.25)
    middle = 0.0 if plus_one else 1.0
    arguments: dict[str, Any] = {
        name: draw.laid_out((draw.normal((width,), torch.float32) * 0.2 + middle).to(dtype))
        for name in ("q_weight", "k_weight")
    }
    if plus_one or draw.chance(0.2):
        arguments["plus_one"] = plus_one
    arguments |= draw.maybe(0.3, eps=lambda: draw.of((1e-6, 1e-5, 1e-3, 0.5)))
    return arguments


def qk_norm_rope(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.qk_norm_rope``: tables of angles alone, since normalised numbers are what they are."""
    arguments = _arguments(draw, dtype, angles_alone=True)
    arguments |= norm_weights(draw, dtype, arguments["query"].shape[-1])
    arguments |= {name: draw.laid_out(arguments[name]) for name in ("query", "key")}
    return draw.poison(arguments, ("query", "key"))


def split_qkv_norm_rope(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.split_qkv_norm_rope``: the parts of a call of ``lz.rope``, joined."""
    arguments = _arguments(draw, dtype, angles_alone=True)
    if arguments.pop("layout", None) == "BHSD":
        arguments |= {name: arguments[name].transpose(1, 2) for name in ("query", "key")}
    query, key = arguments.pop("query"), arguments.pop("key")
    joined = torch.cat((query, key, draw.normal(key.shape, dtype)), -2).flatten(-2)
    if draw.chance(0.6):
        arguments |= norm_weights(draw, dtype, query.shape[-1])
    arguments |= {"qkv": draw.laid_out(joined), "heads": query.shape[-2], "kv_heads": key.shape[-2]}
    return draw.poison(arguments, ("qkv",))
