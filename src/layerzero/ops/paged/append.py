"""Writing new tokens into the slots of a paged cache, and what all operations say that move tokens of caches.

kv.append.paged   tokens into slots
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from layerzero.core.arguments import Axis, TensorSchema, told
from layerzero.core.dtypes import FLOATING, dtype_name
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.operation import Case, Function, Operation, Routed, Tolerance, Work
from layerzero.ops import declaration
from layerzero.ops.attention.declare import HEAD_DIM, HEAD_DIMS, TOLERANCE
from layerzero.ops.declaration import check_dense, shape_problems
from layerzero.ops.paged import draw, layout_record, tiles
from layerzero.ops.paged.declare import CACHE_LAYOUTS, PAGES
from layerzero.ops.paged.pages import nhd
from layerzero.ops.paged.route import CACHES, cache_problems, check_written, list_problems, memory_problems

INT64 = frozenset({torch.int64})
KV_HEADS = Axis("kv_heads", scales=True, apart=True)
SHARED = frozenset({frozenset({"key_cache", "value_cache"})})
"""Both caches may be views of one tensor."""


def caches(lead: str, dtypes: frozenset[torch.dtype] = FLOATING, **more: Any) -> tuple[TensorSchema, ...]:
    """Key and value caches, by their axes before the heads."""
    kept = {"has_layout": True, "resident": True} | more
    return tuple(
        declaration.tensor(f"{name}_cache: {lead} kv_heads {width}", dtypes, **kept)
        for name, width in (("key", "head_dim"), ("value", "value_dim"))
    )


def new_tokens(lead: str) -> tuple[TensorSchema, ...]:
    """Keys and values of new tokens, by their axes before the heads."""
    return tuple(
        declaration.tensor(f"{name}: {lead} kv_heads {width}")
        for name, width in (("key", "head_dim"), ("value", "value_dim"))
    )


def slots(*, distinct: bool) -> TensorSchema:
    """Places of tokens in pages."""
    more: dict[str, Any] = {"indexes": ("pages", "page_size"), "holes": True, "distinct": distinct}
    return TensorSchema("slot_mapping", ("tokens",), INT64, same_dtype=False, **more)


def moved(counts: Sequence[str], facts: Mapping[str, Any]) -> Work:
    """The work of reading and writing each number once."""
    elements = facts["kv_heads"] * (facts["head_dim"] + facts["value_dim"]) * math.prod(facts[each] for each in counts)
    return Work(0.0, 2.0 * elements * facts["dtype"].itemsize)


writing = partial(
    declaration.operation,
    layouts=CACHE_LAYOUTS,
    fake=lambda *_, **__: None,
    check_values=layout_record.checks,
    guard=layout_record.guard,
    stock=None,
)
"""An operation that writes into caches; others say their ``fake``."""

EXACT: dict[str, Any] = {
    "tolerance": dict.fromkeys(TOLERANCE, Tolerance(0.0, 0.0)),
    "tolerance_reason": "it only moves numbers",
}


def slots_case(name: str, count: tuple[str, int], pages: int, kv_heads: int, head_dim: int) -> Case:
    """A case over a paged cache: so many tokens, or copied pages."""
    sizes = {count[0]: count[1], "pages": pages, "page_size": 16, "kv_heads": kv_heads}
    return Case(name, sizes | {"head_dim": head_dim, "value_dim": head_dim})


def slots_sweep(
    count: str, counts: Sequence[int], shapes: Sequence[tuple[int, int]] = ((8, 128), (2, 64))
) -> Callable[[str, Mapping[str, Sequence[int]]], Iterator[Case]]:
    """The sweep of so many tokens, or copied pages, for each count and width of heads; none where sizes are named."""
    what = count.removeprefix("copied_")

    def sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
        pages = 8192 if device == "cuda" else 256
        for kv_heads, head_dim in shapes if not narrow else ():
            for each in counts:
                yield slots_case(f"{each} {what} ({kv_heads}/{head_dim})", (count, each), pages, kv_heads, head_dim)

    return sweep


STEPS = (1, 64, 2048)
"""Tokens of a decode step, of a batch's, and of a prefill."""


def append_paged_kv_(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    layout: str = "NHD",
    cache_dtype: torch.dtype | None = None,  # the route's: it casts
) -> None:
    """Write the keys and values of new tokens into a paged cache, in place.

    Shapes: key (T, K, D), value (T, K, D_v); caches as in ``lz.paged_attention``, tiles too; slot_mapping (T,).
    Dtype: keys, values and caches the same floating dtype, or caches of one that holds their numbers; slot_mapping
        int64, on the same device.
    Args:
        cache_dtype: the caches' dtype, where new tokens are to be rounded to it. ``lz.PagedCache`` and the layers of
            ``lz.KVCache`` bring theirs.
        slot_mapping: ``page * page_size + offset`` of each token, -1 for padding; each slot at most once.
            ``StepMetadata.slot_mapping`` makes it from tables and lengths. On a GPU either of two tokens with one slot
            may be what is written; debug mode finds them.
        layout: ``"NHD"`` or ``"HND"``.
    Raises: InvalidCallError for shapes, devices or dtypes that do not fit, for caches that share memory with the new
        tokens or with each other; on a CPU and in debug mode for slots beyond the cache or named twice, too.
    Source: reshape_and_cache of vLLM, arXiv:2309.06180.
    """
    # No value is read on the host: a token without a slot repeats one that has a slot, or what slot 0 holds.
    key_cache, value_cache = nhd(layout, key_cache, value_cache)
    tokens = slot_mapping.shape[0]
    if tokens == 0 or key_cache.numel() == 0:
        return
    if _differentiated(key, value, key_cache, value_cache):
        _append_whole(key, key_cache, slot_mapping)
        _append_whole(value, value_cache, slot_mapping)
        return
    valid = slot_mapping >= 0
    stand_in = valid.long().argmax().expand(tokens)
    source = torch.where(valid, torch.arange(tokens, device=slot_mapping.device), stand_in)
    slots = torch.where(valid.any(), slot_mapping[source], 0)
    page, offset = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache[page, offset] = torch.where(valid.any(), new[source], cache[page, offset])


def _differentiated(*tensors: Tensor) -> bool:
    """Whether a place that is written twice would count twice; no tensor says that forward-mode AD is at work."""
    return forward_ad._current_level >= 0 or (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))


def _append_whole(new: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write tokens into their slots and all others anew, each once: what stands for another token has its gradient."""
    tokens, room = len(slot_mapping), cache.shape[0] * cache.shape[1]
    places = torch.where(slot_mapping >= 0, slot_mapping, room)
    numbers = torch.arange(tokens, device=places.device)
    token = places.new_full((room + 1,), tokens).scatter(0, places, numbers)[:room].view(cache.shape[:2])
    written = (token < tokens)[..., None, None]
    cache.copy_(torch.where(written, new[token.clamp(max=tokens - 1)], cache))


APPEND_PAGED = writing(
    "kv.append.paged",
    "Write new keys and values into the slots of a paged cache",
    append_paged_kv_,
    inputs=(*new_tokens("tokens"), *caches("pages page_size", mutated=True), slots(distinct=True)),
    axes=(Axis("tokens", scales=True, live=True, apart=True), KV_HEADS, *PAGES, *HEAD_DIMS),
    cases=(
        slots_case("small", ("tokens", 3), 8, 2, 64),
        slots_case("llama3_8b_b64", ("tokens", 64), 8192, 8, 128),
        slots_case("prefill", ("tokens", 2048), 1024, 8, 128),
    ),
    note=layout_record.note,
    work=partial(moved, ("tokens",)),
    sweep=slots_sweep("tokens", STEPS, ((8, 128), (16, 64))),
    **EXACT,
)


def _casts(arguments: dict[str, Any], problems: list[str]) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Cast new tokens to the caches' dtype where it holds their numbers, or where the caller names it.

    Returns: what was cast. What is wrong with ``cache_dtype``, or without it, goes to ``problems``.
    """
    held, named = arguments["key_cache"].dtype, arguments["cache_dtype"]
    if named is not None and named is not held:
        got = dtype_name(named) if isinstance(named, torch.dtype) else told(named)
        problems.append(f"cache_dtype: wanted {dtype_name(held)} as key_cache has, or None, got {got}")
    casts = {}
    for name in ("key", "value"):
        own = arguments[name].dtype
        if own is held or held is not arguments["value_cache"].dtype or not {own, held} <= FLOATING:
            continue  # as it should be, or the schema says what is wrong
        if named is None and torch.promote_types(own, held) is not held:
            hint = f"cache_dtype={held} rounds new tokens to it"
            problems.append(f"{name}: wanted {dtype_name(held)} like key_cache, got {dtype_name(own)}; {hint}")
        casts[name] = own, held
        arguments[name] = arguments[name].resolve_neg().to(held, memory_format=torch.contiguous_format)
    return casts


def _written(arguments: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """The caches that a call writes into: both, or those of a list. Raises: InvalidCallError for a list that shares."""
    given = arguments.get("cache_list")
    if given is None:
        return [{}]
    if given.kind != "apart":
        wanted = "cache_list: wanted each in memory of its own, got some that touch"
        raise InvalidCallError("append_kv_", [f"{wanted}; copy them, or write each by itself"])
    return [dict(zip(CACHES, pair, strict=True)) for pair in given.rows]


def check_moved(
    name: str,
    operation: Operation,
    new: int,
    varies: tuple[str, ...],
    arguments: dict[str, Any],
    default_layout: str | None,
) -> Routed:
    """What moves tokens of caches asks: tensors of the right ranks, one layout, sizes that fit, writable memory."""
    check_dense(name, arguments)
    problems = shape_problems(arguments, ("key", "value"), new) if new else []
    problems += cache_problems(arguments)
    refuse(name, problems)
    check_written(name, arguments)
    return _moved(name, operation, varies, arguments, arguments["layout"])


def _moved(
    name: str, operation: Operation, varies: tuple[str, ...], arguments: dict[str, Any], layout: str | None
) -> Routed:
    """Cast new tokens, and refuse what does not fit caches that are some."""
    problems: list[str] = []  # Dynamo traces this, and knows no call of `list[str]` (torch 2.13)
    casts = _casts(arguments, problems) if "cache_dtype" in arguments else {}
    refuse(name, problems)
    problems = list_problems(arguments) if "cache_list" in arguments else []
    refuse(name, problems)
    left = {"layout", "cache_dtype", *({"cache_list"} - operation.schema.known)}  # None of a call without a list
    canonical = {each: value for each, value in arguments.items() if each not in left}
    problems = operation.schema.validate(layout=layout, **canonical)
    if not problems and operation.schema.mutated:
        read = tuple(each for each in canonical if each not in CACHES)
        for row, written in enumerate(_written(arguments)):
            found = memory_problems({**arguments, **written}, read)
            problems += [f"cache {row}: {each}" for each in found] if written else found
    refuse(name, problems)
    return Routed(operation, canonical, layout, varies=varies, casts=casts)


def _tiled_case(name: str, tokens: int, pages: int, kv_heads: int, head_dim: int) -> Case:
    sizes = {"tokens": tokens, "pages": pages, "kv_heads": kv_heads, "head_dim": head_dim}
    return Case(name, sizes | tiles.of_page(head_dim))


def _tiled_work(facts: Mapping[str, Any]) -> Work:
    known = {name: facts[name] for name in ("tokens", "kv_heads", "head_dim", "dtype")}
    return moved(("tokens",), known | {"value_dim": facts["head_dim"]})


APPEND_TILED = writing(
    "kv.append.tiled",
    "Write new keys and values into the slots of a paged cache in tiles of AMX",
    tiles.append_tiles_,
    inputs=(
        "key: tokens kv_heads head_dim",
        "value: tokens kv_heads head_dim",
        *tiles.caches(mutated=True),
        replace(slots(distinct=True), indexes=tiles.PLACES),
    ),
    axes=(
        Axis("tokens", scales=True, live=True, apart=True),
        KV_HEADS,
        Axis("pages", live=True, works=False),
        Axis("head_dim", codes=HEAD_DIM),
        *tiles.AXES,
    ),
    layouts=(),
    check_values=None,
    guard=None,
    cases=(_tiled_case("small", 3, 8, 2, 64), _tiled_case("prefill", 2048, 512, 8, 128)),
    work=_tiled_work,
    **EXACT,
)


def _route_append(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    """To the operation over tiles where both caches are such, else to that of a layout."""
    name, varies = "append_paged_kv_", ("tokens", "pages")
    if not tiles.is_tiled(arguments["key_cache"]):
        return check_moved(name, APPEND_PAGED, 3, varies, arguments, default_layout)
    check_dense(name, arguments)
    problems = shape_problems(arguments, ("key", "value"), 3)
    refuse(name, problems or tiles.tile_problems(arguments, arguments["key"].shape[-1]))
    layout_record.check(name, {each: arguments[each] for each in CACHES}, tiles.NAME)
    return _moved(name, APPEND_TILED, varies, arguments, None)


APPEND_PAGED_KV = Function(
    name="append_paged_kv_",
    signature=append_paged_kv_,
    route=_route_append,
    operations=(APPEND_PAGED, APPEND_TILED),
    draw=draw.append_paged_kv_,
    weight=1,
    renamed={"append_paged_kv": "append_paged_kv_"},
    may_share_storage=SHARED,
)
OPERATIONS = (APPEND_PAGED, APPEND_TILED)
FUNCTIONS = (APPEND_PAGED_KV,)
