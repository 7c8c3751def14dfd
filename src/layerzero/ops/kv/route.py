"""The routes of what moves tokens in and out of caches, and the checks of their calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.checks import check_dense, overlaps, shape_problems, write_problems
from layerzero.ops.kv import declare, draw
from layerzero.ops.paged.append import SHARED
from layerzero.ops.paged.quantized import scale_problems
from layerzero.ops.paged.route import cache_problems, check_written
from layerzero.ops.rope.route import apart

_CACHES = ("key_cache", "value_cache")


def _checked(name: str, arguments: dict[str, Any], operation: Operation, new: int, varies: tuple[str, ...]) -> Routed:
    """What all of them ask: tensors of the right ranks, one layout, sizes that fit, memory that may be written."""
    check_dense(name, arguments)
    problems = shape_problems(arguments, ("key", "value"), new) if new else []
    problems += cache_problems(arguments)
    if problems:
        raise InvalidCallError(name, problems)
    check_written(name, arguments)
    layout = arguments["layout"]
    canonical = {each: value for each, value in arguments.items() if each != "layout"}
    problems = operation.schema.validate(layout=layout, **canonical)
    if not problems and operation.schema.mutated:
        read = tuple(each for each in canonical if each not in _CACHES)
        problems += write_problems(arguments, _CACHES, read)
        keys, values = (arguments[each] for each in _CACHES)
        if keys is values or (not keys.is_meta and overlaps(keys, values) and not apart(keys, values)):
            problems.append("value_cache: wanted elements of its own, got memory that it shares with key_cache")
    if problems:
        raise InvalidCallError(name, problems)
    return Routed(operation, canonical, layout, varies=varies)


def _route_append(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    routed = _checked("append_kv_", arguments, declare.APPEND, 4, ())
    key, positions, layout = arguments["key"], arguments["positions"], arguments["layout"]
    (batch, seq), length = key.shape[:2], arguments["key_cache"].shape[1 + layout.index("N")]
    problems = []
    if tuple(positions.shape) not in ((seq,), (1, seq), (batch, seq)):
        problems.append(
            f"positions: wanted shape ({batch}, {seq}), (1, {seq}) or ({seq},), got {tuple(positions.shape)}"
        )
    if seq > length:
        problems.append(f"key_cache: wanted a place for each of {seq} tokens, got {length}")
    if problems:
        raise InvalidCallError("append_kv_", problems)
    shared = positions.ndim == 1 or positions.shape[0] == 1  # else each sequence has its row, and their number stays
    long_enough = (1 << int(seq).bit_length()) - 1 <= length
    return replace(routed, varies=(*(("batch",) if shared else ()), *(("seq",) if long_enough else ())))


def _route_gather(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    return _checked("gather_paged_kv", arguments, declare.GATHER, 0, ("tokens", "pages"))


def _route_copy(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    return _checked("copy_kv_blocks_", arguments, declare.COPY_BLOCKS, 0, ("copied_pages", "pages"))


def _route_quantized(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "append_quantized_kv_"
    routed = _checked(name, arguments, declare.APPEND_QUANTIZED, 3, ("tokens",))
    problems = scale_problems(arguments, arguments["layout"])
    if problems:
        raise InvalidCallError(name, problems)
    return routed


FUNCTIONS = (
    Function(
        name="append_kv_",
        signature=declare.append_kv_,
        route=_route_append,
        operations=(declare.APPEND,),
        draw=draw.append_kv_,
        weight=1,
        renamed={"append_kv": "append_kv_"},
        may_share_storage=SHARED,
    ),
    Function(
        name="gather_paged_kv",
        signature=declare.gather_paged_kv,
        route=_route_gather,
        operations=(declare.GATHER,),
        draw=draw.gather_paged_kv,
        weight=1,
    ),
    Function(
        name="copy_kv_blocks_",
        signature=declare.copy_kv_blocks_,
        route=_route_copy,
        operations=(declare.COPY_BLOCKS,),
        draw=draw.copy_kv_blocks_,
        weight=1,
        renamed={"copy_kv_blocks": "copy_kv_blocks_"},
        may_share_storage=SHARED,
    ),
    Function(
        name="append_quantized_kv_",
        signature=declare.append_quantized_kv_,
        route=_route_quantized,
        operations=(declare.APPEND_QUANTIZED,),
        draw=draw.append_quantized_kv_,
        weight=1,
        renamed={"append_quantized_kv": "append_quantized_kv_"},
        may_share_storage=SHARED,
    ),
)
