"""Attention over a paged cache of another dtype than the queries', and writing codes into one.

    attention.quantized.decode.paged    one query a sequence over float8 or int8, whose numbers are multiples of scales
    attention.quantized.prefill.paged   the same with any number of queries a sequence
    attention.converted.decode.paged    one query a sequence over another floating dtype
    attention.converted.prefill.paged   the same with any number of queries a sequence

Operations of their own, so that no kernel for caches of the queries' dtype is ever offered one. A scale is one number,
one a head, or one a token and head. Kernels that multiply float8 by float8 round queries and probabilities, too, which
a caller has to allow (``narrow_query``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Param, TensorSchema
from layerzero.core.dtypes import FLOATING, dtype_name, dtype_named
from layerzero.core.errors import refuse
from layerzero.core.facts import Facts
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Case, Operation, Random, Tolerance, Work
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.values import Check, Say, problems_on_host
from layerzero.ops.attention.declare import TOLERANCE
from layerzero.ops.paged import layout_record, mixed
from layerzero.ops.paged.declare import GQA_DECODE_PAGED
from layerzero.ops.paged.pages import converted_dtype

QUANTIZED = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.int8})
"""What a cache may hold in place of floating numbers."""

SCALES = tuple(
    TensorSchema(
        name,
        dtype_constraint=frozenset({torch.float32, torch.float16}),
        same_dtype=False,
        broadcast=("pages", "page_size", "kv_heads"),
    )
    for name in ("key_scale", "value_scale")
)
"""(), (K,) or (P, N, K), whatever the layout of the cache; float16 of a token's alone, which no library reads."""

NARROW_QUERY = Param("narrow_query", bool, False, works=False)
"""Whether a kernel may round queries and probabilities to the dtype of the cache."""

SCALES_OF_HEADS = "scales: one number, or one a head"


def scales_of_heads(facts: Facts) -> Reason | None:
    """Scales that no token has of its own."""
    for name in ("key_scale", "value_scale"):
        if len(facts.tensors[name].shape) > 1:
            return Reason(ReasonCode.CONSTRAINT_FAILED, name, "one number, or one a head", "one a token and head")
    return None


def of_heads(scale: Tensor, kv_heads: int) -> Tensor:
    """A scale for each head (K,), of which one number is seen several times."""
    return scale.expand(kv_heads)


def by_key_head(tokens: Tensor, kv_heads: int) -> Tensor:
    """Tokens (T, H, D) as a view (T, K, H / K, D): heads next to the others that read the same keys."""
    return tokens.view(len(tokens), kv_heads, tokens.shape[1] // kv_heads, tokens.shape[2])


def has_codes(arguments: Mapping[str, Any]) -> bool:
    """Whether a call is one over codes: its cache holds some, or it brings scales."""
    cache = arguments["key_cache"]
    of_codes = isinstance(cache, Tensor) and cache.dtype in QUANTIZED
    return of_codes or arguments["key_scale"] is not None or arguments["value_scale"] is not None


def scale_problems(arguments: Mapping[str, Any], layout: str) -> list[str]:
    """What is wrong with scales as tensors, given caches of four axes."""
    pages, *inner = arguments["key_cache"].shape[:3]
    tokens, heads = inner if layout == "NHD" else reversed(inner)
    shapes, problems = ((), (1,), (heads,), (pages, tokens, heads)), []
    for name in ("key_scale", "value_scale"):
        scale = arguments[name]
        if not isinstance(scale, Tensor):
            problems.append(f"{name}: wanted a float32 tensor with a quantized cache, got {type(scale).__name__}")
        elif tuple(scale.shape) not in shapes:
            wanted = f"(), ({heads},) or ({pages}, {tokens}, {heads})"
            problems.append(f"{name}: wanted shape {wanted}, got {tuple(scale.shape)}")
        elif scale.dtype is torch.float16 and scale.ndim < 3:
            problems.append(f"{name}: wanted dtype float32 unless each token has a scale of its own, got float16")
    return problems + dtype_problems(arguments)


def dtype_problems(arguments: Mapping[str, Any]) -> list[str]:
    """Caches of two dtypes."""
    wanted, got = (dtype_name(arguments[name].dtype) for name in ("key_cache", "value_cache"))
    return [] if wanted == got else [f"value_cache: wanted dtype {wanted} like key_cache, got {got}"]


def dequantized(cache: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that a cache in NHD stands for, in a wider dtype."""
    factor = scale.unsqueeze(-1) if scale.ndim else scale  # behind the heads comes their width
    wide = torch.promote_types(dtype, torch.float32)
    return (cache.to(wide) * factor.to(wide)).to(dtype)


def _reference(attend: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """Attend as over a cache of the queries' dtype, after every number was multiplied by its scale."""

    def reference(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *rest: Tensor,
        narrow_query: bool = False,
        **arguments: Any,
    ) -> Any:
        tables, (key_scale, value_scale) = rest[:tensors], rest[tensors:]
        wide = torch.promote_types(query.dtype, torch.float32)
        keys, values = dequantized(key_cache, key_scale, wide), dequantized(value_cache, value_scale, wide)
        return _attended(attend, query, keys, values, *tables, **arguments)

    return reference


def _attended(attend: Callable[..., Any], query: Tensor, keys: Tensor, *others: Tensor, **arguments: Any) -> Any:
    """Attend in the dtype of the keys; the output in that of the queries."""
    found = attend(query.to(keys.dtype), keys, *others, **arguments)
    if isinstance(found, tuple):
        return found[0].to(query.dtype), found[1]
    return found.to(query.dtype)


DERIVED = ("cache_dtype", "scale_axes")
"""Facts of any call over such a cache, which :func:`derive` tells."""

CODES = (("cache_dtype", ReasonCode.KV_CACHE_DTYPE_MISMATCH),)
"""What a kernel that does not read such a cache is refused with."""


def derive(arguments: Mapping[str, Any], _: Mapping[str, Any]) -> dict[str, object]:
    """What the cache holds, and whether both scales are one number, or one is by head, or by token and head."""
    axes = max(arguments[name].ndim for name in ("key_scale", "value_scale"))
    return {**_cache_dtype(arguments), "scale_axes": axes}


def _cache_dtype(arguments: Mapping[str, Any]) -> dict[str, object]:
    return {DERIVED[0]: dtype_name(arguments["key_cache"].dtype)}


def converts(arguments: Mapping[str, Any]) -> bool:
    """Whether a call is one over a cache of another floating dtype than the queries'."""
    dtypes = {arguments[name].dtype for name in ("query", "key_cache")}
    return len(dtypes) == 2 and dtypes <= FLOATING


def _converting(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Attend as over caches of the queries' dtype, after both were converted to one that holds their numbers."""

    def reference(query: Tensor, key_cache: Tensor, value_cache: Tensor, *tables: Tensor, **arguments: Any) -> Any:
        wide = converted_dtype(query, key_cache)
        return _attended(attend, query, key_cache.to(wide), value_cache.to(wide), *tables, **arguments)

    return reference


def _converted_examples(
    examples: Any, case: Case, dtype: torch.dtype, device: torch.device, generator: Random
) -> dict[str, Any]:
    """Unit normal numbers in bfloat16 for wide queries, in float32 for narrow ones."""
    found: dict[str, Any] = examples(case, dtype, device, generator)
    other = torch.bfloat16 if dtype.itemsize > 2 else torch.float32
    for name, width in (("key", "head_dim"), ("value", "value_dim")):
        shape = [case.sizes[each] for each in ("pages", "page_size", "kv_heads", width)]
        found[f"{name}_cache"] = torch.randn(shape, generator=generator).to(device, other)
    return found


def _work(work: Callable[[Mapping[str, Any]], Work], facts: Mapping[str, Any]) -> Work:
    """The same products; what is read of the cache has its own dtype."""
    whole = work(facts)
    return Work(whole.flops, whole.bytes * dtype_named(facts["cache_dtype"]).itemsize / facts["dtype"].itemsize)


def quantized(new: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers divided by their scales, within the range of a narrower dtype; whole ones are rounded to even.

    An infinity becomes NaN in float8: not every one of its forms has infinities.
    """
    wide = new.to(torch.promote_types(new.dtype, torch.float32)) / scale
    if not dtype.is_floating_point:
        return wide.round().clamp(-127, 127).to(dtype)
    most = torch.finfo(dtype).max
    return wide.masked_fill(wide.isinf(), float("nan")).clamp(-most, most).to(dtype)


def write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
) -> None:
    """Divide each token's key and value by the scales of its slot, and write them there; -1 writes nothing.

    Shapes: key (T, K, D), value (T, K, D_v), caches (P, N, K, D) and (P, N, K, D_v), slot_mapping (T,), scales that
    broadcast to (P, N, K). Mutates both caches. Dtype: float8_e4m3fn, float8_e5m2 (clamped to its range) or int8
    (rounded to even, -127 to 127). Source: reshape_and_cache of vLLM 0.20 for float8.
    """
    there = slot_mapping >= 0
    slots, size = slot_mapping[there], key_cache.shape[1]
    page, offset = slots // max(size, 1), slots % max(size, 1)
    shape = key_cache.shape[:3]
    for cache, new, scale in ((key_cache, key, key_scale), (value_cache, value, value_scale)):
        factor = scale.expand(shape)[page, offset].unsqueeze(-1)
        cache[page, offset] = quantized(new[there], factor, cache.dtype)


def divides(scale: Tensor, slot_mapping: Tensor) -> Tensor:
    """Whether new tokens can be divided by their scales: one bool, on the scales' device; -1 has none.

    Of scales a token those of the slots alone count, for others may not have been set yet; NaN is that of a NaN token.
    """
    if scale.ndim < 3 or not scale.numel():
        return (scale > 0).all()
    page_size = scale.shape[1]
    slots = slot_mapping.clamp(0, scale.shape[0] * page_size - 1)
    unset = (scale[slots // page_size, slots % page_size] <= 0) & (slot_mapping >= 0).unsqueeze(1)
    return ~unset.any()


def check_values(key_cache: Tensor, slot_mapping: Tensor, **named: Any) -> list[Check]:
    """Values on the device, besides places: slots that have memory, scales that new tokens can be divided by."""
    return layout_record.checks(key_cache, slot_mapping) + check_scales(slot_mapping, **named)


def check_scales(slot_mapping: Tensor, key_scale: Tensor, value_scale: Tensor, **_: object) -> list[Check]:
    """Scales that new tokens can be divided by."""
    hint = "layer.fit_scales(key, value, slots) sets those of a cache with scales='token'"

    def say(name: str) -> Say:
        return lambda _, __: f"{name}: wanted numbers above 0 for all new tokens, got one that is not; {hint}"

    named = ("key_scale", key_scale), ("value_scale", value_scale)
    return [Check(~divides(scale, slot_mapping), None, say(name)) for name, scale in named]


def guard(function: str, layout: str | None) -> Callable[..., None]:
    """Checks of every call: caches without a record of another layout, on a CPU scales as well."""
    caches = layout_record.guard(function, layout)

    def look(slot_mapping: Tensor, key_scale: Tensor, value_scale: Tensor, **tensors: Tensor) -> None:
        if caches is not None:
            caches(slot_mapping=slot_mapping, **tensors)
        if key_scale.is_cpu and type(key_scale) is Tensor:
            refuse(function, problems_on_host(check_scales(slot_mapping, key_scale, value_scale)))

    return look


ONE_STEP = Elementwise(
    dict.fromkeys(TOLERANCE, Tolerance(0.26, 1.0)), "one step of the cache's dtype, where a quotient lies between two"
)


def examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: Random, *, filled: bool = False
) -> dict[str, Any]:
    """One scale a head, so that numbers of a unit normal fill the range of int8, and caches of float8, with some."""
    lead = tuple(case.sizes[name] for name in ("pages", "page_size", "kv_heads"))
    made: dict[str, Any] = {}
    for name, width in (("key", "head_dim"), ("value", "value_dim")):
        made[f"{name}_scale"] = (0.01 + 0.03 * torch.rand(lead[2], generator=generator)).to(device)
        shape = *lead, case.sizes[width]
        numbers = torch.randn(shape, generator=generator) / 0.04 if filled else torch.zeros(shape, device=device)
        made[f"{name}_cache"] = numbers.to(torch.float8_e4m3fn).to(device)
    return made


def _over(
    like: Operation, name: str, summary: str, inputs: tuple[TensorSchema, ...], derived: tuple[str, ...], **more: Any
) -> Operation:
    """An operation over caches of another dtype; ``more`` are fields that it has not of the one that it is like."""
    derives, work = like.derive, like.work
    assert derives is not None
    assert work is not None

    def facts(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
        own = derive(arguments, values) if "scale_axes" in derived else _cache_dtype(arguments)
        return {**derives(arguments, values), **own}

    return replace(
        like,
        schema=replace(
            like.schema,
            operation=name,
            inputs=inputs,
            params=(*like.schema.params, *more.pop("params", ())),
            codes=CODES,
        ),
        summary=summary,
        sibling="",
        unlike_sibling=None,
        aliases={**like.aliases, "kv_cache_dtype": "cache_dtype"},
        derive=facts,
        derived=(*like.derived, *derived),
        derived_from={**like.derived_from, **dict.fromkeys(derived, ())},
        work=functools.partial(_work, work),
        parts=None,
        sweep=None,
        **more,
    )


def _held(like: Operation, dtypes: frozenset[torch.dtype]) -> list[TensorSchema]:
    """Its tensors, with caches of other dtypes."""
    inputs = like.schema.inputs
    return [replace(each, dtype_constraint=dtypes, same_dtype=False) if each.resident else each for each in inputs]


def _operation(name: str, summary: str, like: Operation, sizes: Mapping[str, int]) -> Operation:
    inputs, made = _held(like, QUANTIZED), like.examples
    required = [each for each in inputs if each.required]
    assert made is not None
    small = like.cases[0]
    allowed = Case("narrow_query", {**small.sizes, **sizes}, {**small.params, NARROW_QUERY.name: True})
    return _over(
        like,
        name,
        summary,
        (*required, *SCALES, *(each for each in inputs if not each.required)),
        DERIVED,
        params=(NARROW_QUERY,),
        reference=_reference(like.reference, len(required) - 3),
        cases=(small, allowed),
        examples=lambda *about: {**made(*about), **examples(*about, filled=True)},
    )


def _converted(name: str, summary: str, like: Operation) -> Operation:
    return _over(
        like,
        name,
        summary,
        tuple(_held(like, FLOATING)),
        DERIVED[:1],
        reference=_converting(like.reference),
        cases=like.cases[:1],
        examples=functools.partial(_converted_examples, like.examples),
    )


DECODE = _operation(
    "attention.quantized.decode.paged",
    "Attention of one query per sequence over a paged cache of float8 or int8",
    GQA_DECODE_PAGED,
    {"batch": 3, "heads": 4, "head_dim": 128, "value_dim": 128, "max_blocks": 5, "pages": 15},
)
PREFILL = _operation(
    "attention.quantized.prefill.paged",
    "Attention of several queries per sequence over a paged cache of float8 or int8",
    mixed.GQA_PREFILL_PAGED,
    {"tokens": 26, "batch": 4, "starts": 5, "heads": 4, "head_dim": 128, "value_dim": 128}
    | {"max_blocks": 3, "pages": 12},
)
CONVERTED_DECODE = _converted(
    "attention.converted.decode.paged",
    "Attention of one query per sequence over a paged cache of another floating dtype",
    GQA_DECODE_PAGED,
)
CONVERTED_PREFILL = _converted(
    "attention.converted.prefill.paged",
    "Attention of several queries per sequence over a paged cache of another floating dtype",
    mixed.GQA_PREFILL_PAGED,
)
OPERATIONS = (DECODE, PREFILL, CONVERTED_DECODE, CONVERTED_PREFILL)
