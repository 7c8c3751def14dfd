"""``lz.rope_append_``: its signature, the checks of a call, and the route."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.checks import check_dense, overlaps, write_problems
from layerzero.ops.paged import written
from layerzero.ops.paged.declare import CACHE_LAYOUTS
from layerzero.ops.paged.quantized import QUANTIZED, scale_problems
from layerzero.ops.rope.route import apart
from layerzero.ops.rope_append import draw
from layerzero.ops.rope_append.declare import ROPE_APPEND, ROPE_APPEND_PAGED
from layerzero.ops.rope_append.quantized import ROPE_APPEND_QUANTIZED

_NAME = "rope_append_"
CACHES = ("key_cache", "value_cache")
_SCALES = ("key_scale", "value_scale")
_READ = ("query", "key", "value", "cos", "sin", "positions", "slot_mapping", *_SCALES)


def rope_append_(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor | None = None,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    interleaved: bool = False,
    layout: str = "NHD",
) -> Tensor:
    """Rotate queries and keys, write keys and values into a cache in place, and return the queries.

    ``lz.rope`` and ``lz.append_paged_kv_`` as one call, or a write into a contiguous cache where there are no slots.

    Shapes: paged: query (T, H, D), key (T, K, D), value (T, K, D_v), positions and slot_mapping (T,), caches
        (P, N, K, D) and (P, N, K, D_v) in NHD; contiguous: query (B, S, H, D), key (B, S, K, D), value (B, S, K, D_v),
        positions (B, S), (1, S) or (S,), caches (B, L, K, D) and (B, L, K, D_v) in NHD. Axes 1 and 2 of caches are
        swapped in HND. cos and sin (P, R/2), R at most D; scales (), (K,) or (P, N, K) → query's.
    Dtype: queries, keys, values and caches the same floating dtype, or paged caches of float8_e4m3fn, float8_e5m2 or
        int8 beside float32 scales; cos, sin and positions as of ``lz.rope``; slot_mapping int64.
    Args:
        positions: the row of the table for each token; of a contiguous cache also where it is written to, so that the
            table has a row for each of L places, and each place of a sequence comes once.
        slot_mapping: of a paged cache, ``page * page_size + offset`` of each token, -1 for padding, each slot at most
            once, as ``StepMetadata.slot_mapping`` makes it; None for a contiguous one.
        key_scale, value_scale: of a cache of float8 or int8, as of ``lz.append_quantized_kv_``; None for others.
        interleaved: as of ``lz.rope``.
        layout: of the caches, ``"NHD"`` or ``"HND"``.
    Returns: the rotated query. Rotated keys are in the cache alone.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share elements with what is
        read or with each other, before anything is written; on a CPU and in debug mode for positions and slots that
        lead nowhere or are named twice, too.
    Source: RoFormer, arXiv:2104.09864; reshape_and_cache of vLLM, arXiv:2309.06180.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(_NAME, arguments)
    paged, narrow = arguments["slot_mapping"] is not None, _is_quantized(arguments)
    operation = ROPE_APPEND_QUANTIZED if narrow else ROPE_APPEND_PAGED if paged else ROPE_APPEND
    problems = _rank_problems(arguments, 3 if paged or narrow else 4)
    layout = arguments["layout"]
    if not isinstance(layout, str) or layout not in CACHE_LAYOUTS:
        problems.append(f"layout: wanted {' or '.join(CACHE_LAYOUTS)}, got {told(layout)}")
    if narrow and not problems:
        problems = scale_problems(arguments, layout)
        problems += [] if paged else ["slot_mapping: wanted a tensor beside a cache of float8 or int8, got None"]
    if problems:
        raise InvalidCallError(_NAME, problems)
    written.check(_NAME, {each: arguments[each] for each in CACHES}, layout)
    left_out = ("layout", *(() if paged else ("slot_mapping",)), *(() if narrow else _SCALES))
    canonical = {name: value for name, value in arguments.items() if name not in left_out}
    problems = operation.schema.validate(layout=layout, **canonical)
    problems = problems or size_problems(arguments, layout)
    problems = problems or memory_problems(arguments, _READ)
    if problems:
        raise InvalidCallError(_NAME, problems)
    # scales may be one a place of the cache, whose number of pages stays
    varies = tuple(each for each in varying(arguments, layout) if not narrow or each != "pages")
    return Routed(operation, canonical, layout, varies=varies)


def _is_quantized(arguments: dict[str, Any]) -> bool:
    """Whether a call has a cache of codes, or scales as for one."""
    cache = arguments["key_cache"]
    of_codes = isinstance(cache, Tensor) and cache.dtype in QUANTIZED
    return of_codes or any(arguments[name] is not None for name in _SCALES)


def _rank_problems(arguments: dict[str, Any], ndim: int) -> list[str]:
    """What is wrong with the numbers of axes, by which everything else is read."""
    problems = []
    wanted = "(tokens, heads, head dim)" if ndim == 3 else "(batch, sequence, heads, head dim) without slot_mapping"
    for name in ("query", "key", "value", *CACHES, "cos", "sin", "positions"):
        tensor = arguments[name]
        if not isinstance(tensor, Tensor):
            problems.append(f"{name}: wanted a tensor, got {type(tensor).__name__}")
        elif name in ("query", "key", "value") and tensor.ndim != ndim:
            problems.append(f"{name}: wanted {wanted}, got {tensor.ndim}D {tuple(tensor.shape)}")
        elif name in CACHES and tensor.ndim != 4:
            problems.append(f"{name}: wanted a 4D tensor, got {tensor.ndim}D {tuple(tensor.shape)}")
    return problems


def size_problems(arguments: dict[str, Any], layout: str) -> list[str]:
    """What the schema cannot say: the table's width and length, the shape of positions."""
    query, key, cos, sin, positions = (arguments[name] for name in ("query", "key", "cos", "sin", "positions"))
    problems, width, head_dim = [], 2 * cos.shape[-1], query.shape[-1]
    if not 0 < width <= head_dim:
        wanted = f"half of 2 to {head_dim} rotated entries of a head"
        problems.append(f"cos: wanted a width of {wanted}, got {cos.shape[-1]}")
    if cos.dtype != sin.dtype:
        problems.append(f"sin: wanted dtype {dtype_name(cos.dtype)} like cos, got {dtype_name(sin.dtype)}")
    if 0 in (query.shape[-2], key.shape[-2], arguments["value"].shape[-1]):
        shapes = ", ".join(f"{name} {tuple(arguments[name].shape)}" for name in ("query", "key", "value"))
        problems.append(f"wanted heads and widths above 0, got {shapes}")
    if arguments["slot_mapping"] is not None:
        if query.shape[0] and not cos.shape[0]:
            problems.append(f"cos: wanted a row for each position, got shape {tuple(cos.shape)}")
        return problems
    (batch, seq), length = query.shape[:2], arguments["key_cache"].shape[1 + layout.index("N")]
    if cos.shape[0] < length:
        problems.append(f"cos: wanted a row for each of {length} places of the cache, got {cos.shape[0]}")
    if seq > length:
        problems.append(f"key_cache: wanted a place for each of {seq} tokens, got {length}")
    if tuple(positions.shape) not in ((seq,), (1, seq), (batch, seq)):
        wanted = " or ".join(dict.fromkeys(str(each) for each in ((batch, seq), (1, seq), (seq,))))
        problems.append(f"positions: wanted shape {wanted}, got {tuple(positions.shape)}")
    return problems


def memory_problems(arguments: dict[str, Any], read: tuple[str, ...]) -> list[str]:
    """What forbids writing into the caches."""
    problems = write_problems(arguments, CACHES, read)
    keys, values = (arguments[name] for name in CACHES)
    if keys is values or (not keys.is_meta and overlaps(keys, values) and not apart(keys, values)):
        problems.append("value_cache: wanted elements of its own, got memory that it shares with key_cache")
    return problems


def varying(arguments: dict[str, Any], layout: str) -> tuple[str, ...]:
    """Sizes that may differ within a power of two; a contiguous cache must have a place for each of their tokens."""
    if arguments["slot_mapping"] is not None:
        return "tokens", "pages", "table"
    query, positions = arguments["query"], arguments["positions"]
    shared = positions.ndim == 1 or positions.shape[0] == 1  # else each sequence has its row, and their number stays
    most = (1 << int(query.shape[1]).bit_length()) - 1
    long_enough = most <= arguments["key_cache"].shape[1 + layout.index("N")]
    return (*(("batch",) if shared else ()), *(("seq",) if long_enough else ()))


ROPE_APPEND_FUNCTION = Function(
    name=_NAME,
    signature=rope_append_,
    route=_route,
    operations=(ROPE_APPEND, ROPE_APPEND_PAGED, ROPE_APPEND_QUANTIZED),
    draw=draw.rope_append_,
    renamed={"rope_append": _NAME},
    may_share_storage=frozenset({frozenset(CACHES)}),
)
