"""``lz.alibi_bias``: its signature, the checks of a call, the route, and random calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.alibi.declare import ALIBI
from layerzero.ops.checks import check_dense
from layerzero.ops.draw import Draw


def alibi_bias(
    slopes: Tensor,
    q_len: int,
    kv_len: int,
    *,
    causal: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Make the bias of attention with linear biases, for ``lz.attention(..., attn_mask=bias, causal=False)``.

    ``-slope * |i + kv_len - q_len - j|`` for query i and key j: the last query stands at the last key, as causal masks
    of ``lz.attention`` are aligned.

    Shapes: slopes (H,) → (H, q_len, kv_len), which broadcasts over a batch.
    Dtype: slopes floating; computes in float32 or wider; returns out_dtype, or that of slopes. The device is theirs.
    Units: q_len and kv_len in tokens.
    Args:
        slopes: one for each head; ``lz.alibi_slopes(heads)`` makes those of the paper, for any number of heads.
        causal: -inf at keys beyond the query, since a mask comes in place of ``causal=True`` there.
        out_dtype: a floating dtype.
    Raises: InvalidCallError for other shapes or dtypes, and for lengths below 1 or above 2**24.
    Source: arXiv:2108.12409.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("alibi_bias", arguments)
    problems = ALIBI.schema.validate(**arguments)
    out_dtype = arguments["out_dtype"]
    if isinstance(out_dtype, torch.dtype) and not out_dtype.is_floating_point:
        problems.append(f"out_dtype: wanted a floating dtype, got {str(out_dtype).removeprefix('torch.')}")
    if problems:
        raise InvalidCallError("alibi_bias", problems)
    if out_dtype == arguments["slopes"].dtype:
        arguments["out_dtype"] = None  # the default, spelled out
    return Routed(ALIBI, arguments, varies=("heads",))


def draw(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call: any slopes, few queries or many, fewer keys than queries now and then."""
    heads = draw.of((0, 1, 3, 4, 8, 12), (1, 4, 4, 4, 4, 4))
    arguments: dict[str, Any] = {
        "slopes": draw.laid_out(draw.uniform((heads,), dtype)),
        "q_len": draw.of((1, 2, 7, 16, 33)),
        "kv_len": draw.of((1, 3, 8, 17, 64)),
    }
    if draw.chance(0.4):
        arguments["causal"] = True
    if draw.chance(0.2):
        arguments["out_dtype"] = torch.promote_types(dtype, torch.float32)
    draw.poison(arguments, ("slopes",))
    return arguments


FUNCTIONS = (Function("alibi_bias", alibi_bias, _route, (ALIBI,), draw=draw, weight=1),)
