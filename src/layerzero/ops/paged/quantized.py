"""Attention over a paged cache of float8 or int8, whose numbers are multiples of scales.

    attention.quantized.decode.paged    one query a sequence
    attention.quantized.prefill.paged   any number of queries a sequence

Operations of their own, so that no kernel for caches of the queries' dtype is ever offered one. A scale is one number,
one a head, or one a token and head. Kernels that multiply float8 by float8 round queries and probabilities, too, which
nobody gets who did not allow it (``narrow_query``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Param, TensorSchema
from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.core.schema import OperationSchema
from layerzero.ops.paged import mixed
from layerzero.ops.paged.declare import GQA_DECODE_PAGED, table_examples

QUANTIZED = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.int8})
"""What a cache may hold in place of floating numbers."""

SCALES = tuple(
    TensorSchema(
        name,
        dtype_constraint=frozenset({torch.float32}),
        same_dtype=False,
        broadcast=("pages", "page_size", "kv_heads"),
    )
    for name in ("key_scale", "value_scale")
)
"""(), (K,) or (P, N, K), whatever the layout of the cache."""

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
    """Tokens (T, H, D) as a view (T, K, H / K, D): heads beside the others that read the same keys."""
    return tokens.view(len(tokens), kv_heads, tokens.shape[1] // kv_heads, tokens.shape[2])


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
    if arguments["key_cache"].dtype != arguments["value_cache"].dtype:
        wanted, got = dtype_name(arguments["key_cache"].dtype), dtype_name(arguments["value_cache"].dtype)
        problems.append(f"value_cache: wanted dtype {wanted} like key_cache, got {got}")
    return problems


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
        found = attend(query.to(wide), keys, values, *tables, **arguments)
        if isinstance(found, tuple):
            return found[0].to(query.dtype), found[1]
        return found.to(query.dtype)

    return reference


def _derive(derive: Callable[..., Mapping[str, object]]) -> Callable[..., dict[str, object]]:
    def derived(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
        cache_dtype = dtype_name(arguments["key_cache"].dtype)
        return {**derive(arguments, values), "cache_dtype": cache_dtype, "scale_axes": arguments["key_scale"].ndim}

    return derived


def _work(work: Callable[[Mapping[str, Any]], Work]) -> Callable[[Mapping[str, Any]], Work]:
    """The same products; what is read of the cache is one byte a number."""

    def halved(facts: Mapping[str, Any]) -> Work:
        whole = work(facts)
        return Work(whole.flops, whole.bytes / facts["dtype"].itemsize)

    return halved


def _examples(examples: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Numbers of a unit normal as multiples of a scale a head, in float8."""

    def made(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> dict[str, Any]:
        found = examples(case, dtype, device, generator)
        lead = tuple(case.sizes[name] for name in ("pages", "page_size", "kv_heads"))
        for name, width in (("key", "head_dim"), ("value", "value_dim")):
            found[f"{name}_scale"] = (0.01 + 0.03 * torch.rand(lead[2], generator=generator)).to(device)
            numbers = torch.randn(*lead, case.sizes[width], generator=generator) / 0.04
            found[f"{name}_cache"] = numbers.to(torch.float8_e4m3fn).to(device)
        return found

    return made


def _with(tensor: TensorSchema, **changes: Any) -> TensorSchema:
    return replace(tensor, **changes)


def _operation(
    name: str, summary: str, like: Operation, attend: Callable[..., Any], examples: Any, sizes: Mapping[str, int]
) -> Operation:
    schema = like.schema
    narrow, caches = {"dtype_constraint": QUANTIZED, "same_dtype": False}, ("key_cache", "value_cache")
    inputs = [_with(each, **narrow) if each.name in caches else each for each in schema.inputs if each.required]
    assert like.derive is not None
    assert like.work is not None
    small = like.cases[0]
    allowed = Case("narrow_query", {**small.sizes, **sizes}, {**small.params, NARROW_QUERY.name: True})
    return replace(
        like,
        schema=OperationSchema(
            operation=name,
            inputs=(*inputs, *SCALES),
            outputs=schema.outputs,
            params=(*schema.params, NARROW_QUERY),
            axes=schema.axes,
            layouts=schema.layouts,
        ),
        summary=summary,
        reference=_reference(attend, len(inputs) - 3),
        cases=(small, allowed),
        sibling="",
        unlike_sibling=None,
        aliases={**like.aliases, "kv_cache_dtype": "cache_dtype"},
        derive=_derive(like.derive),
        derived=(*like.derived, "cache_dtype", "scale_axes"),
        derived_from={**like.derived_from, "cache_dtype": (), "scale_axes": ()},
        work=_work(like.work),
        examples=_examples(examples),
        parts=None,
        sweep=None,
    )


DECODE = _operation(
    "attention.quantized.decode.paged",
    "Attention of one query per sequence over a paged cache of float8 or int8",
    GQA_DECODE_PAGED,
    GQA_DECODE_PAGED.reference,
    table_examples,
    {"batch": 3, "heads": 4, "head_dim": 128, "value_dim": 128, "max_blocks": 5, "pages": 15},
)
PREFILL = _operation(
    "attention.quantized.prefill.paged",
    "Attention of several queries per sequence over a paged cache of float8 or int8",
    mixed.GQA_PREFILL_PAGED,
    mixed.GQA_PREFILL_PAGED.reference,
    mixed.GQA_PREFILL_PAGED.examples,
    {"tokens": 26, "batch": 4, "starts": 5, "heads": 4, "head_dim": 128, "value_dim": 128}
    | {"max_blocks": 3, "pages": 12},
)
OPERATIONS = (DECODE, PREFILL)
