"""Random arguments of attention: layouts, head counts, lengths, and everything that hides keys or moves scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.ops.attention import layout as layouts
from layerzero.ops.draw import Draw

_HEAD_DIMS = (1, 7, 8, 16, 32, 33, 64, 96, 128)
_HEAD_DIM_WEIGHTS = (1, 2, 3, 4, 4, 2, 4, 1, 1)
_SEQUENCES = (2, 3, 5, 8, 16, 17, 33, 64)
_LONG = (100, 129, 257, 600)


def attention(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.attention``."""
    batch = draw.of((0, 1, 2, 3), (1, 20, 20, 8))
    kv_heads = draw.of((1, 2, 3, 4))
    heads = kv_heads * draw.of((1, 2, 3, 4), (6, 2, 1, 1))
    head_dim = draw.of(_HEAD_DIMS, _HEAD_DIM_WEIGHTS)
    value_dim = draw.of(_HEAD_DIMS, _HEAD_DIM_WEIGHTS) if draw.chance(0.15) else head_dim
    seq_q, seq_k = _sequences(draw)
    if max(seq_q, seq_k) > 64:
        batch, heads, kv_heads = min(batch, 1), heads // kv_heads, 1
    shapes = ((batch, seq_q, heads, head_dim), (batch, seq_k, kv_heads, head_dim), (batch, seq_k, kv_heads, value_dim))
    layout = draw.of(layouts.LAYOUTS)
    arguments = _masks(draw, dtype, (batch, heads, seq_q, seq_k))
    beyond = _beyond(draw, arguments.get("kv_lens"), seq_k)
    for name, shape in zip(("query", "key", "value"), shapes, strict=True):
        tensor = draw.normal(shape, dtype)
        if beyond is not None and name != "query":
            tensor.masked_fill_(beyond, float("nan"))
        if layout != layouts.CANONICAL:
            tensor = tensor.transpose(1, 2).contiguous()
        arguments[name] = draw.laid_out(tensor, expand=beyond is None)
    if draw.chance(0.15):
        unit = head_dim**-0.5  # scores far from unit normal amplify the rounding of float32 beyond any tolerance
        arguments["scale"] = draw.of((unit, 0.25 * unit, 3.0 * unit, -unit, 0.0, 0, 1 if head_dim < 9 else 0.1))
    if draw.chance(0.08):
        arguments["softcap"] = draw.of((0.5, 5.0, 30.0, 1e-3, 1e6))
    if draw.chance(0.1):
        arguments["sinks"] = draw.laid_out(draw.normal((heads,), draw.of((dtype, torch.float32))))
    if draw.chance(0.15):
        arguments["return_lse"] = True
    if draw.chance(0.05):
        arguments["dropout_p"] = 0.0
    # A NaN reaches every result that sees it; whether a hidden one does is not defined.
    if seq_q <= seq_k and not arguments.keys() & {"attn_mask", "window", "kv_lens"}:
        draw.poison(arguments, ("query",) if arguments.get("causal", True) else ("query", "key", "value"))
    _name_layout(draw, arguments, layout)
    return arguments


def _beyond(draw: Draw, kv_lens: Tensor | None, seq_k: int) -> Tensor | None:
    """Where a cache holds unwritten tokens, on half of the calls with lengths; it must not be read."""
    if kv_lens is None or draw.chance(0.5):
        return None
    beyond: Tensor = torch.arange(seq_k, device=draw.device).view(-1, 1, 1) >= kv_lens.view(-1, 1, 1, 1)
    return beyond


def _sequences(draw: Draw) -> tuple[int, int]:
    """Lengths of queries and keys: decode, square, longer and shorter queries, rarely long or empty ones."""
    seq_k = draw.of(_LONG) if draw.chance(0.06) else draw.of((0, 1, *_SEQUENCES), (1, 4, *[6] * len(_SEQUENCES)))
    kind = draw.of(("decode", "square", "free"), (4, 6, 4))
    seq_q = {"decode": 1, "square": seq_k}.get(kind)
    if seq_q is None:
        seq_q = draw.of((0, 1, *_SEQUENCES), (1, 2, *[6] * len(_SEQUENCES)))
    return seq_q, seq_k


def _masks(draw: Draw, dtype: torch.dtype, target: tuple[int, int, int, int]) -> dict[str, Any]:
    """Everything that hides keys or moves scores by position."""
    batch, heads, _, seq_k = target
    arguments: dict[str, Any] = {}
    if draw.chance(0.3):
        arguments |= {"attn_mask": draw.laid_out(_mask(draw, dtype, target)), "causal": False}
    elif draw.chance(0.7):
        arguments["causal"] = draw.chance(0.5)
    if draw.chance(0.12):
        arguments["window"] = (draw.of((-1, 0, 1, 4, seq_k)), draw.of((-1, 0, 1, 4)))
    if draw.chance(0.1):
        slopes = (heads,) if draw.chance(0.6) else (batch, heads)
        arguments["alibi_slopes"] = draw.laid_out(draw.uniform(slopes, draw.of((dtype, torch.float32))) / 2)
    if draw.chance(0.12):
        arguments["kv_lens"] = draw.laid_out(draw.integers((batch,), seq_k, draw.of((torch.int32, torch.int64))))
    return arguments


def _mask(draw: Draw, dtype: torch.dtype, target: Sequence[int]) -> Tensor:
    """A mask of any shape that broadcasts to the target; some of its rows see nothing."""
    ndim = draw.of((0, 1, 2, 3, 4), (1, 2, 6, 3, 10))
    shape = [1 if draw.chance(0.2) else size for size in target[4 - ndim :]]
    visible: Tensor = draw.uniform(shape, torch.float32) < draw.of((0.5, 0.9))
    if ndim >= 2:
        visible &= draw.uniform((*shape[:-1], 1), torch.float32) < 0.9
    if draw.chance(0.5):
        return visible
    dtype = draw.of((dtype, torch.float32), (8, 3))
    mask = draw.normal(shape, dtype)
    return mask.masked_fill(~visible, float("-inf")) if draw.chance(0.7) else mask


def _name_layout(draw: Draw, arguments: dict[str, Any], layout: str) -> None:
    """Leave the layout out, now and then, where the tensors prove it."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if draw.chance(0.7) or layouts.resolve(query.shape, key.shape, value.shape) != layout:
        arguments["layout"] = layout
