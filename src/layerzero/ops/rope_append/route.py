"""``lz.rope_append_``: its signature, the checks of a call, the route, and random calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.errors import refuse
from layerzero.core.operation import Function, Routed
from layerzero.ops.declaration import check_dense, shape_problems
from layerzero.ops.draw import Draw
from layerzero.ops.paged.declare import CACHE_LAYOUTS
from layerzero.ops.paged.draw import caches, in_layout, quantize, slots
from layerzero.ops.paged.quantized import has_codes, scale_problems
from layerzero.ops.paged.route import CACHES, cache_problems, check_written, memory_problems
from layerzero.ops.rope.draw import draw_table, norm_weights
from layerzero.ops.rope.route import table_problems
from layerzero.ops.rope_append.declare import ROPE_APPEND, ROPE_APPEND_PAGED, ROPE_APPEND_QUANTIZED

_HEAD_DIMS = (2, 7, 16, 33, 64, 80, 128)
_HEAD_DIM_WEIGHTS = (1, 1, 2, 1, 5, 2, 4)


def random_call(draw: Draw, dtype: torch.dtype, *, joined: bool = False) -> dict[str, Any]:
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
        arguments["slot_mapping"] = draw.laid_out(slots(draw, lead[0] * lead[1], token[0]), expand=False)
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
    made = caches(draw, lead, kv_heads, dims, dtype, transposed=transposed)
    keys, values = in_layout(draw, made, layout, transposed=transposed)
    arguments |= {
        "query": draw.laid_out(draw.normal((*token, heads, dims[0]), dtype)),
        "key": draw.laid_out(draw.normal((*token, kv_heads, dims[0]), dtype)),
        "value": draw.laid_out(draw.normal((*token, kv_heads, dims[1]), dtype)),
        "cos": cos,
        "sin": sin,
        "key_cache": keys,
        "value_cache": values,
        "positions": draw.laid_out(positions, expand=False),
        "layout": layout,
    }
    arguments |= draw.maybe(0.4, interleaved=lambda: True)
    if paged and not joined and not transposed and draw.chance(0.25):
        return quantize(draw, arguments)
    return draw.poison(arguments, ("query", "key", "value"))


def random_split_call(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.split_qkv_norm_rope_append_``: the parts of a call of ``lz.rope_append_``, joined."""
    arguments = random_call(draw, dtype, joined=True)
    qkv = torch.cat([arguments.pop(name) for name in ("query", "key", "value")], -2).flatten(-2)
    if draw.chance(0.6):
        arguments |= norm_weights(draw, dtype, arguments["key_cache"].shape[-1])
    return {"qkv": draw.laid_out(qkv), **arguments}


_NAME = "rope_append_"
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

    Shapes: paged: query (T, H, D), key (T, K, D), value (T, K, D_v), positions and slot_mapping (T,), caches (P, N, K,
        D) and (P, N, K, D_v) in NHD; contiguous: query (B, S, H, D), key (B, S, K, D), value (B, S, K, D_v), positions
        (B, S), (1, S) or (S,), caches (B, L, K, D) and (B, L, K, D_v) in NHD. Axes 1 and 2 of caches are swapped in
        HND. cos and sin (P, R/2), R at most D; scales (), (K,) or (P, N, K) → query's.
    Dtype: queries, keys, values and caches the same floating dtype, or paged caches of float8_e4m3fn, float8_e5m2 or
        int8 with scales as of ``lz.append_quantized_kv_``; cos, sin and positions as of ``lz.rope``; slot_mapping
        int64.
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
    paged, narrow = arguments["slot_mapping"] is not None, has_codes(arguments)
    operation = ROPE_APPEND_QUANTIZED if narrow else ROPE_APPEND_PAGED if paged else ROPE_APPEND
    flat, tokens = paged or narrow, ("query", "key", "value")
    wanted = "(tokens, heads, head dim)" if flat else "(batch, sequence, heads, head dim) without slot_mapping"
    problems = rank_problems(arguments, tokens, 3 if flat else 4, wanted)
    layout = arguments["layout"]
    if narrow and not problems:
        problems = scale_problems(arguments, layout)
        problems += [] if paged else ["slot_mapping: wanted a tensor with a cache of float8 or int8, got None"]
    refuse(_NAME, problems)
    check_written(_NAME, arguments)
    left_out = ("layout", *(() if paged else ("slot_mapping",)), *(() if narrow else _SCALES))
    canonical = {name: value for name, value in arguments.items() if name not in left_out}
    problems = operation.schema.validate(layout=layout, **canonical)
    problems = problems or size_problems(arguments, layout)
    problems = problems or memory_problems(arguments, _READ)
    refuse(_NAME, problems)
    # scales may be one a place of the cache, whose number of pages stays
    varies = tuple(each for each in varying(arguments, layout) if not narrow or each != "pages")
    return Routed(operation, canonical, layout, varies=varies)


def rank_problems(arguments: dict[str, Any], tokens: tuple[str, ...], ndim: int, wanted: str) -> list[str]:
    """What is wrong with the numbers of axes and the layout, by which everything else is read."""
    problems = shape_problems(arguments, tokens, ndim, wanted) + cache_problems(arguments)
    return problems + shape_problems(arguments, ("cos", "sin", "positions"))


def size_problems(arguments: dict[str, Any], layout: str) -> list[str]:
    """What the schema cannot say: the table's width and length, the shape of positions."""
    query, key, cos, sin = (arguments[name] for name in ("query", "key", "cos", "sin"))
    problems = table_problems(cos, sin, query.shape[-1], interleaved=bool(arguments["interleaved"]))
    if 0 in (query.shape[-2], key.shape[-2], arguments["value"].shape[-1]):
        shapes = ", ".join(f"{name} {tuple(arguments[name].shape)}" for name in ("query", "key", "value"))
        problems.append(f"wanted heads and widths above 0, got {shapes}")
    if arguments["slot_mapping"] is not None:
        if query.shape[0] and not cos.shape[0]:
            problems.append(f"cos: wanted a row for each position, got shape {tuple(cos.shape)}")
        return problems
    length = arguments["key_cache"].shape[1 + layout.index("N")]
    if cos.shape[0] < length:
        problems.append(f"cos: wanted a row for each of {length} places of the cache, got {cos.shape[0]}")
    return problems + place_problems(arguments, query, layout)


def place_problems(arguments: dict[str, Any], tokens: Tensor, layout: str) -> list[str]:
    """What is wrong with the places of tokens (B, S, ...) in the rows of a contiguous cache."""
    (batch, seq), length = tokens.shape[:2], arguments["key_cache"].shape[1 + layout.index("N")]
    shape = tuple(arguments["positions"].shape)
    problems = [f"key_cache: wanted a place for each of {seq} tokens, got {length}"] if seq > length else []
    if shape not in ((seq,), (1, seq), (batch, seq)):
        wanted = " or ".join(dict.fromkeys(str(each) for each in ((batch, seq), (1, seq), (seq,))))
        problems.append(f"positions: wanted shape {wanted}, got {shape}")
    return problems


def varying(arguments: dict[str, Any], layout: str) -> tuple[str, ...]:
    """Sizes that may differ within a power of two."""
    if arguments["slot_mapping"] is not None:
        return "tokens", "pages", "table"
    return varying_in_rows(arguments, arguments["query"], layout)


def varying_in_rows(arguments: dict[str, Any], tokens: Tensor, layout: str) -> tuple[str, ...]:
    """The same of a contiguous cache, which must have a place for each of their tokens."""
    positions = arguments["positions"]
    shared = positions.ndim == 1 or positions.shape[0] == 1  # else each sequence has its row, and their number stays
    most = (1 << int(tokens.shape[1]).bit_length()) - 1
    long_enough = most <= arguments["key_cache"].shape[1 + layout.index("N")]
    return (*(("batch",) if shared else ()), *(("seq",) if long_enough else ()))


ROPE_APPEND_FUNCTION = Function(
    name=_NAME,
    signature=rope_append_,
    route=_route,
    operations=(ROPE_APPEND, ROPE_APPEND_PAGED, ROPE_APPEND_QUANTIZED),
    draw=random_call,
    renamed={"rope_append": _NAME},
    may_share_storage=frozenset({frozenset(CACHES)}),
)
