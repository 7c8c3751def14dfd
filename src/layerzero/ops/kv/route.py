"""``lz.append_kv_``, ``lz.gather_paged_kv``, ``lz.copy_kv_blocks_``: signatures, the checks of a call, the routes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.checks import check_dense, overlaps, write_problems
from layerzero.ops.kv import draw
from layerzero.ops.kv.declare import APPEND, APPEND_QUANTIZED, COPY_BLOCKS, GATHER
from layerzero.ops.paged import written
from layerzero.ops.paged.problems import layout_problems, shape_problems
from layerzero.ops.paged.quantized import scale_problems
from layerzero.ops.rope.route import apart

_CACHES = ("key_cache", "value_cache")


def append_kv_(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, positions: Tensor, *, layout: str = "NHD"
) -> None:
    """Write the keys and values of new tokens into the rows of a contiguous cache, in place.

    Shapes: key (B, S, K, D), value (B, S, K, D_v); caches (B, L, K, D) and (B, L, K, D_v) in NHD, axes 1 and 2 swapped
        in HND; positions (B, S), (1, S) or (S,).
    Dtype: keys, values and caches the same floating dtype; positions int32 or int64, on the same device.
    Args:
        positions: where each token belongs in its sequence's row; each place of a row at most once. On a GPU either of
            two tokens with one place may be what is written; debug mode finds them.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share memory with the new
        tokens or with each other; on a CPU and in debug mode for places beyond the cache or named twice, too.
    Source: static caches of Transformers 5.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def gather_paged_kv(
    key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *, layout: str = "NHD"
) -> tuple[Tensor, Tensor]:
    """Read the keys and values of tokens out of a paged cache.

    Shapes: caches as in ``lz.paged_attention``; slot_mapping (T,) → (T, K, D), (T, K, D_v).
    Dtype: both caches the same floating dtype; slot_mapping int64, on the same device.
    Args:
        slot_mapping: ``page * page_size + offset`` of each token; -1 gives zeros.
        layout: ``"NHD"`` or ``"HND"``.
    Returns: keys and values, one token after the other.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit; on a CPU and in debug mode for slots beyond
        the cache, too.
    Source: gather_cache of vLLM, arXiv:2309.06180.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def copy_kv_blocks_(
    key_cache: Tensor, value_cache: Tensor, from_pages: Tensor, to_pages: Tensor, *, layout: str = "NHD"
) -> None:
    """Copy pages of a cache into other pages, in place, as if all were read before any is written.

    Shapes: caches as in ``lz.paged_attention``; from_pages and to_pages (M,).
    Dtype: both caches the same floating dtype; pages int64, on the same device.
    Args:
        from_pages: what is read.
        to_pages: where each of them goes, each page at most once. On a GPU either of two pages that go to one may be
            what is written; debug mode finds them.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share elements; on a CPU and
        in debug mode for pages beyond the cache or written twice, too.
    Source: copy_blocks of vLLM, arXiv:2309.06180.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def append_quantized_kv_(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    *,
    layout: str = "NHD",
) -> None:
    """Write the keys and values of new tokens, divided by scales, into a paged cache of float8 or int8, in place.

    Shapes: key (T, K, D), value (T, K, D_v); caches as in ``lz.paged_attention``; slot_mapping (T,); scales (), (K,) or
        (P, N, K), whatever the layout.
    Dtype: keys and values the same floating dtype; caches both float8_e4m3fn, float8_e5m2 or int8; scales float32;
        slot_mapping int64, on the same device.
    Args:
        slot_mapping: as of ``lz.append_paged_kv_``.
        key_scale, value_scale: what the cache's numbers are multiples of, above 0. Quotients beyond the dtype's range
            become its largest number, infinities NaN in float8; those of int8 are rounded to even, from -127 to 127.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share elements; on a CPU and
        in debug mode for slots beyond the cache or named twice, and for scales of new tokens that are not above 0, too.
    Source: reshape_and_cache of vLLM, arXiv:2309.06180.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _checked(name: str, arguments: dict[str, Any], operation: Operation, new: int, varies: tuple[str, ...]) -> Routed:
    """What all of them ask: tensors of the right ranks, one layout, sizes that fit, memory that may be written."""
    check_dense(name, arguments)
    problems = shape_problems(arguments, ("key", "value"), new) if new else []
    problems += shape_problems(arguments, _CACHES, 4) + layout_problems(arguments["layout"])
    if problems:
        raise InvalidCallError(name, problems)
    layout = arguments["layout"]
    written.check(name, {each: arguments[each] for each in _CACHES}, layout)
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
    routed = _checked("append_kv_", arguments, APPEND, 4, ())
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
    return _checked("gather_paged_kv", arguments, GATHER, 0, ("tokens", "pages"))


def _route_copy(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    return _checked("copy_kv_blocks_", arguments, COPY_BLOCKS, 0, ("copied_pages", "pages"))


def _route_quantized(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "append_quantized_kv_"
    routed = _checked(name, arguments, APPEND_QUANTIZED, 3, ("tokens",))
    problems = scale_problems(arguments, arguments["layout"])
    if problems:
        raise InvalidCallError(name, problems)
    return routed


_SHARED = frozenset({frozenset(_CACHES)})

FUNCTIONS = (
    Function(
        name="append_kv_",
        signature=append_kv_,
        route=_route_append,
        operations=(APPEND,),
        draw=draw.append_kv_,
        weight=1,
        renamed={"append_kv": "append_kv_"},
        may_share_storage=_SHARED,
    ),
    Function(
        name="gather_paged_kv",
        signature=gather_paged_kv,
        route=_route_gather,
        operations=(GATHER,),
        draw=draw.gather_paged_kv,
        weight=1,
    ),
    Function(
        name="copy_kv_blocks_",
        signature=copy_kv_blocks_,
        route=_route_copy,
        operations=(COPY_BLOCKS,),
        draw=draw.copy_kv_blocks_,
        weight=1,
        renamed={"copy_kv_blocks": "copy_kv_blocks_"},
        may_share_storage=_SHARED,
    ),
    Function(
        name="append_quantized_kv_",
        signature=append_quantized_kv_,
        route=_route_quantized,
        operations=(APPEND_QUANTIZED,),
        draw=draw.append_quantized_kv_,
        weight=1,
        renamed={"append_quantized_kv": "append_quantized_kv_"},
        may_share_storage=_SHARED,
    ),
)
