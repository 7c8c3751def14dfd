"""The route of ``lz.paged_attention`` over a cache of float8 or int8."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Routed
from layerzero.core.reasons import ReasonCode
from layerzero.ops.checks import score_problems
from layerzero.ops.paged import quantized, written
from layerzero.ops.paged.mixed_route import OF_FLOATS, one_token_each, token_problems
from layerzero.ops.paged.problems import head_problems, layout_problems, shape_problems
from layerzero.ops.paged.step import StepMetadata, table_problems
from layerzero.ops.ragged.starts import shape_problems as start_problems

_OF_SEVERAL = ("cu_seqlens_q", "max_seqlen_q", "causal")


def is_asked(arguments: dict[str, Any]) -> bool:
    """Whether a call has such a cache, or scales or a permission as for one."""
    cache = arguments["key_cache"]
    has_scales = arguments["key_scale"] is not None or arguments["value_scale"] is not None
    of_codes = isinstance(cache, Tensor) and cache.dtype in quantized.QUANTIZED
    return has_scales or of_codes or arguments["narrow_query"] is not False


def _of_codes_alone(arguments: dict[str, Any]) -> list[str]:
    """What was given as for a cache of codes beside one of floating numbers."""
    dtype = arguments["key_cache"].dtype
    if dtype in quantized.QUANTIZED or not dtype.is_floating_point:
        return []
    return [
        f"{name}: wanted {none} over a cache of {dtype_name(dtype)}, whose numbers have no scales, got {told(given)}"
        for name, none in (("key_scale", None), ("value_scale", None), ("narrow_query", False))
        if (given := arguments[name]) is not none
    ]


def route_quantized(name: str, arguments: dict[str, Any]) -> Routed:
    """Check a call; several tokens a sequence are one operation, one token each is the other."""
    starts, layout, step = arguments["cu_seqlens_q"], arguments["layout"], arguments["step"]
    tables = arguments["block_tables"], arguments["context_lens"]
    problems = table_problems(*tables)
    problems += shape_problems(arguments, ("query",), 4 if starts is None else 3)
    problems += shape_problems(arguments, ("key_cache", "value_cache"), 4) + layout_problems(layout)
    if not problems and starts is not None:
        problems += start_problems("cu_seqlens_q", starts, len(tables[1]) + 1, len(arguments["query"]))
    problems = problems or _of_codes_alone(arguments) or quantized.scale_problems(arguments, layout)
    if problems:
        raise InvalidCallError(name, problems)
    query, key_cache = arguments["query"], arguments["key_cache"]
    if starts is None and query.shape[1] != 1:
        problem = f"query: wanted one token a sequence (B, 1, H, D) without cu_seqlens_q, got {tuple(query.shape)}"
        raise InvalidCallError(name, [problem])
    written.check(name, {each: arguments[each] for each in ("key_cache", "value_cache")}, layout)
    problems, uneven = head_problems(query, key_cache, layout)
    if problems:
        raise InvalidCallError(name, problems, ReasonCode.GQA_HEADS_MISMATCH if uneven else None)
    problems = score_problems(arguments)
    problems += one_token_each(arguments) if starts is None else token_problems(arguments)
    if starts is None and isinstance(step, StepMetadata) and step.kind_for(*tables) in ("foreign", "stale"):
        problems.append("step: wanted the StepMetadata of these block_tables and context_lens as they are, got another")
    problems += [
        f"{each}: wanted None over a cache of {key_cache.dtype}, got a tensor"
        for each in OF_FLOATS
        if starts is not None and arguments[each] is not None
    ]
    left_out = ("layout", "decodes", *OF_FLOATS, *(_OF_SEVERAL if starts is None else ()))
    canonical = {each: value for each, value in arguments.items() if each not in left_out}
    window, scale = canonical["window"], canonical["scale"]
    if not problems and window is not None:
        left = None if window[0] < 0 else (window[0], 0)
        canonical["window"] = left if starts is None else None if tuple(window) == (-1, -1) else tuple(window)
    if isinstance(scale, (int, float)) and math.isclose(scale, query.shape[-1] ** -0.5, rel_tol=1e-7):
        canonical["scale"] = None  # the default, spelled out: kernels without a scale argument stay legal
    operation = quantized.DECODE if starts is None else quantized.PREFILL
    problems += operation.schema.validate(layout=layout, **canonical)
    if problems:
        raise InvalidCallError(name, problems)
    return Routed(operation, canonical, layout, varies=("batch", "tokens", "starts", "max_blocks"))
