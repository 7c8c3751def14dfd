"""What is moved in and out of caches: operations, functions, and their calls.

    kv.append.contiguous   tokens into rows         kv.copy_blocks       pages into other pages
    kv.append.batched      tokens into a list
    kv.gather.paged        the tokens of slots      kv.append.quantized  tokens into slots, divided by scales

Pages and rows are (pages, page_size, kv_heads, head_dim) in NHD, (pages, kv_heads, page_size, head_dim) in HND.
Random calls have any memory, and places in any order, none of them twice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis
from layerzero.core.errors import refuse
from layerzero.core.operation import Case, Function, Random, Routed
from layerzero.ops.attention.declare import HEAD_DIMS
from layerzero.ops.declaration import tensor
from layerzero.ops.draw import Draw
from layerzero.ops.paged import draw as paged_draw
from layerzero.ops.paged import layout_record, quantized
from layerzero.ops.paged.append import (
    EXACT,
    INT64,
    KV_HEADS,
    SHARED,
    STEPS,
    caches,
    check_moved,
    moved,
    new_tokens,
    slots,
    slots_case,
    slots_sweep,
    writing,
)
from layerzero.ops.paged.declare import CACHE_LAYOUTS, CACHES, listed
from layerzero.ops.paged.pages import CacheList, nhd
from layerzero.ops.rope_append.declare import PLACES_IN_ROWS, check_list, places_in_rows, write_rows
from layerzero.ops.rope_append.route import place_problems, varying_in_rows

_HEADS = (KV_HEADS, *HEAD_DIMS)
_PAGES = Axis("pages", live=True, works=False)
_TOKENS = Axis("tokens", scales=True, live=True, apart=True)


def append_kv_(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    *,
    layout: str = "NHD",
    cache_dtype: torch.dtype | None = None,  # the route's: it casts
    cache_list: CacheList | None = None,
) -> None:
    """Write the keys and values of new tokens into the rows of a contiguous cache, in place.

    Shapes: key (B, S, K, D), value (B, S, K, D_v); caches (B, L, K, D) and (B, L, K, D_v) in NHD, axes 1 and 2 swapped
        in HND, or a :class:`layerzero.CacheList` of B caches as key_cache, which brings ``cache_list`` and ``layout``;
        positions (B, S), (1, S) or (S,).
    Dtype: keys, values and caches the same floating dtype, or caches of one that holds their numbers; positions int32
        or int64, on the same device.
    Args:
        cache_dtype: the caches' dtype, where new tokens are to be rounded to it.
        cache_list: what ``key_cache`` brings where it is a list.
        positions: where each token belongs in its sequence's row; each place of a row at most once. On a GPU either of
            two tokens with one place may be what is written; debug mode finds them.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share memory with the new
        tokens or with each other; on a CPU and in debug mode for places beyond the cache or named twice, too.
    Source: static caches of Transformers 5.
    """
    key_cache, value_cache = nhd(layout, key_cache, value_cache)
    write_rows(key, value, key_cache, value_cache, positions, cache_list=cache_list)


def _row(name: str, batch: int, seq: int, length: int, kv_heads: int, head_dim: int) -> Case:
    sizes = {"batch": batch, "seq": seq, "length": length, "kv_heads": kv_heads}
    return Case(name, sizes | {"head_dim": head_dim, "value_dim": head_dim})


def _rows_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """A decode step of one row and of several, a prefill; none where sizes are named."""
    for kv_heads, head_dim in ((8, 128), (2, 64)) if not narrow else ():
        for batch, seq in ((1, 1), (16, 1), (1, 512)):
            yield _row(f"B{batch} S{seq} ({kv_heads}/{head_dim})", batch, seq, 1024, kv_heads, head_dim)


APPEND = writing(
    "kv.append.contiguous",
    "Write new keys and values into the rows of a contiguous cache",
    append_kv_,
    inputs=(*new_tokens("batch seq"), *caches("batch length", mutated=True), PLACES_IN_ROWS),
    axes=(
        Axis("batch", scales=True, live=True, apart=True),
        Axis("seq", scales=True, live=True),
        Axis("length", works=False),
        *_HEADS,
    ),
    cases=(
        _row("small", 2, 3, 16, 2, 64),
        _row("llama3_8b_decode_b8", 8, 1, 4096, 8, 128),
        _row("llama3_8b_s512", 1, 512, 4096, 8, 128),
    ),
    note=layout_record.note,
    examples=places_in_rows,
    work=functools.partial(moved, ("batch", "seq")),
    sweep=_rows_sweep,
    **EXACT,
)


def _list_examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    shape = [case.sizes[each] for each in ("batch", "length", "kv_heads")]
    made: dict[str, Any] = {
        f"{name}_cache": torch.zeros(*shape, case.sizes[width], dtype=dtype, device=device)
        for name, width in (("key", "head_dim"), ("value", "value_dim"))
    }
    return places_in_rows(case, dtype, device, generator) | made | {CACHES.name: listed(made)}


APPEND_LIST = replace(
    APPEND,
    schema=replace(APPEND.schema, operation="kv.append.batched", params=(CACHES,)),
    summary="Write new keys and values into contiguous caches, one for each request",
    cases=APPEND.cases[:2],
    examples=_list_examples,
    check_values=check_list,
    sweep=None,
)
SLOTS = (
    slots_case("small", ("tokens", 5), 4, 2, 64),
    slots_case("llama3_8b_b64", ("tokens", 64), 1024, 8, 128),
    slots_case("llama3_8b_s2048", ("tokens", 2048), 1024, 8, 128),
)


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
    none, slots = (slot_mapping < 0).view(-1, 1, 1), slot_mapping.clamp(min=0)
    found = []
    for cache in nhd(layout, key_cache, value_cache):
        pages, size = max(cache.shape[0], 1), max(cache.shape[1], 1)
        held = cache if cache.shape[0] and cache.shape[1] else cache.new_zeros((pages, size, *cache.shape[2:]))
        found.append(held[slots // size, slots % size].masked_fill(none, 0.0))
    return found[0], found[1]


GATHER = writing(
    "kv.gather.paged",
    "Read the keys and values of slots of a paged cache",
    gather_paged_kv,
    inputs=(*caches("pages page_size"), slots(distinct=False)),
    outputs=("keys_out: tokens kv_heads head_dim", "values_out: tokens kv_heads value_dim"),
    axes=(_TOKENS, _PAGES, *_HEADS),
    cases=SLOTS,
    fake=None,
    work=functools.partial(moved, ("tokens",)),
    sweep=slots_sweep("tokens", STEPS),
    **EXACT,
)


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
    for cache in nhd(layout, key_cache, value_cache):
        cache[to_pages] = cache[from_pages]


def _page_numbers(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    """Pages that are read, and others that are written."""
    count, copies = case.sizes["pages"], case.sizes["copied_pages"]
    order = torch.randperm(count, generator=generator)
    return {"from_pages": order[:copies].to(device), "to_pages": order[-copies:].flip(0).to(device)}


COPY_BLOCKS = writing(
    "kv.copy_blocks",
    "Copy pages of a cache into other pages",
    copy_kv_blocks_,
    inputs=(
        *caches("pages page_size", mutated=True),
        tensor("from_pages: copied_pages", INT64, same_dtype=False, indexes=("pages",)),
        tensor("to_pages: copied_pages", INT64, same_dtype=False, indexes=("pages",), distinct=True),
    ),
    axes=(Axis("copied_pages", scales=True, live=True), Axis("page_size", scales=True), _PAGES, *_HEADS),
    cases=(
        slots_case("small", ("copied_pages", 3), 8, 2, 64),
        slots_case("llama3_8b_16", ("copied_pages", 16), 1024, 8, 128),
    ),
    examples=_page_numbers,
    work=functools.partial(moved, ("copied_pages", "page_size")),
    sweep=slots_sweep("copied_pages", (1, 64)),
    **EXACT,
)


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
    Dtype: keys and values the same floating dtype; caches both float8_e4m3fn, float8_e5m2 or int8; scales float32,
        of (P, N, K) also float16; slot_mapping int64, on the same device.
    Args:
        slot_mapping: as of ``lz.append_paged_kv_``.
        key_scale, value_scale: what the cache's numbers are multiples of, above 0. Quotients beyond the dtype's range
            become its largest number. In float8 infinities become NaN, or its largest number where vLLM's kernel runs.
            Those of int8 are rounded to even, from -127 to 127.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share elements; on a CPU and
        in debug mode for slots beyond the cache or named twice, and for scales of new tokens that are not above 0, too.
    Source: reshape_and_cache of vLLM, arXiv:2309.06180.
    """
    key_cache, value_cache = nhd(layout, key_cache, value_cache)
    quantized.write(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


_WRITES_CODES = writing(
    "kv.append.quantized",
    "Write new keys and values, divided by scales, into the slots of a cache of float8 or int8",
    append_quantized_kv_,
    inputs=(
        *new_tokens("tokens"),
        *caches("pages page_size", quantized.QUANTIZED, mutated=True, same_dtype=False),
        slots(distinct=True),
        *quantized.SCALES,
    ),
    axes=(_TOKENS, _PAGES, *_HEADS),
    cases=(*SLOTS, slots_case("one_head", ("tokens", 7), 5, 1, 128)),
    derive=quantized.derive,
    derived_from=dict.fromkeys(quantized.DERIVED, ()),
    judge=quantized.ONE_STEP,
    check_values=quantized.check_values,
    guard=quantized.guard,
    note=layout_record.note,
    examples=quantized.examples,
    work=functools.partial(moved, ("tokens",)),
    sweep=slots_sweep("tokens", STEPS),
)
APPEND_QUANTIZED = replace(_WRITES_CODES, schema=replace(_WRITES_CODES.schema, codes=quantized.CODES))

OPERATIONS = (APPEND, APPEND_LIST, GATHER, COPY_BLOCKS, APPEND_QUANTIZED)


def _route_append(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    operation = APPEND if arguments["cache_list"] is None else APPEND_LIST
    routed = check_moved("append_kv_", operation, 4, (), arguments, default_layout)
    refuse("append_kv_", place_problems(arguments, arguments["key"], arguments["layout"]))
    return replace(routed, varies=varying_in_rows(arguments, arguments["key"], arguments["layout"]))


_route_gather = functools.partial(check_moved, "gather_paged_kv", GATHER, 0, ("tokens", "pages"))
_route_copy = functools.partial(check_moved, "copy_kv_blocks_", COPY_BLOCKS, 0, ("copied_pages", "pages"))


def _route_quantized(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    name = "append_quantized_kv_"
    routed = check_moved(name, APPEND_QUANTIZED, 3, ("tokens",), arguments, default_layout)
    refuse(name, quantized.scale_problems(arguments, arguments["layout"]))
    return routed


_HEAD_DIMS = (1, 7, 16, 64, 128)


def _draw_caches(
    draw: Draw, lead: tuple[int, int], dtype: torch.dtype, *, transposed: bool = False
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """Both caches in a layout, and their heads and widths; kernels that read transposed keys know fewer."""
    kv_heads, dim = draw.of((1, 2, 3)), draw.of((32, 64, 128) if transposed else _HEAD_DIMS)
    value_dim = draw.of(_HEAD_DIMS) if not transposed and draw.chance(0.1) else dim
    layout = draw.of(CACHE_LAYOUTS)
    made = paged_draw.caches(draw, lead, kv_heads, (dim, value_dim), dtype, transposed=transposed)
    keys, values = paged_draw.in_layout(draw, made, layout, transposed=transposed)
    return {"key_cache": keys, "value_cache": values, "layout": layout}, (kv_heads, dim, value_dim)


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
    made["positions"] = draw.laid_out(positions, expand=False)
    return made | draw.maybe(0.1, cache_list=lambda: listed(arguments))


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
    transposed = draw.chance(0.3)
    pages, page_size = draw.of((1, 2, 9)), draw.of((32, 64) if transposed else (1, 3, 8, 16))
    arguments, heads = _draw_caches(draw, (pages, page_size), dtype, transposed=transposed)
    tokens = min(draw.of((0, 1, 2, 5, 17), (1, 6, 6, 6, 4)), pages * page_size)
    places = paged_draw.slots(draw, pages * page_size, tokens)
    made = {**_draw_new(draw, (tokens,), heads, dtype), **paged_draw.quantize(draw, arguments)}
    return made | {"slot_mapping": draw.laid_out(places, expand=False)}


FUNCTIONS = tuple(
    Function(
        name=each.__name__,
        signature=each,
        route=route,
        operations=operations,
        draw=draw,
        weight=1,
        renamed={each.__name__.removesuffix("_"): each.__name__} if each.__name__.endswith("_") else {},
        may_share_storage=SHARED if each.__name__.endswith("_") else frozenset(),
    )
    for each, route, operations, draw in (
        (append_kv_, _route_append, (APPEND, APPEND_LIST), _draw_append),
        (gather_paged_kv, _route_gather, (GATHER,), _draw_gather),
        (copy_kv_blocks_, _route_copy, (COPY_BLOCKS,), _draw_copy),
        (append_quantized_kv_, _route_quantized, (APPEND_QUANTIZED,), _draw_quantized),
    )
)
