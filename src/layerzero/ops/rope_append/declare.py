"""Rotation and append in one: kv.rope_append into a contiguous cache, kv.rope_append.paged into the slots of pages.

The keys that are rotated go nowhere but into the cache, so only queries come back. A contiguous cache is
(batch, length, kv_heads, head_dim) in NHD, (batch, kv_heads, length, head_dim) in HND, as the pages of a paged one are.

No library has one launch for it. FlashInfer's ``rope_quantize_fp8_append_paged_kv_cache`` (0.7.2.post1) gives queries
back in float8 alone, and takes one number of the host as the scale of keys and values; vLLM's
``concat_and_cache_mla_rope_fused`` (0.20) is for caches of latent attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, TensorSchema
from layerzero.core.dtypes import INDEX, dtype_name
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Case, Random, Tolerance, Work
from layerzero.core.values import Check
from layerzero.ops.attention.declare import HEAD_DIMS
from layerzero.ops.declaration import operation, tensor
from layerzero.ops.paged import layout_record
from layerzero.ops.paged import quantized as codes
from layerzero.ops.paged.append import append_paged_kv_, caches, new_tokens, slots
from layerzero.ops.paged.declare import CACHE_LAYOUTS
from layerzero.ops.paged.pages import CacheList
from layerzero.ops.paged.quantized import QUANTIZED, SCALES
from layerzero.ops.paged.route import CACHES
from layerzero.ops.rope.declare import COS_SIN, INTERLEAVED, TOLERANCE, TOLERANCE_REASON, cos_sin, rope
from layerzero.ops.rope_append import packed_steps


def rope_append_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Rotate queries and keys; write each token's key and value into its sequence's cache, at its position.

    With slots into these, -1 into none; with scales of both caches divided by those of its slot. Rotated keys are
    rounded to their dtype before that, as two calls would.

    Shapes: query (B, S, H, D), key (B, S, K, D), value (B, S, K, D_v), cos and sin (P, R/2), key_cache (B, L, K, D),
    value_cache (B, L, K, D_v), positions (B, S), (1, S) or (S,) → (B, S, H, D). Mutates both caches. With slots query
    (T, H, D), key (T, K, D), value (T, K, D_v), caches as of ``kv.append.paged``, positions and slot_mapping (T,) →
    (T, H, D). With scales caches and scales as of ``kv.append.quantized``.
    Dtype, units and source: as of ``posenc.rope`` and ``kv.append.paged``, or ``kv.append.quantized``.
    """
    turned, key = rope(query, key, cos, sin, positions=positions, interleaved=interleaved)
    write(key, value, key_cache, value_cache, positions, slot_mapping, key_scale, value_scale)
    return turned


def write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slots: Tensor | None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Write tokens into the slots of a paged cache, divided by scales of both, or into rows where there are none."""
    if slots is None:
        write_rows(key, value, key_cache, value_cache, positions)
    elif key_scale is not None and value_scale is not None:
        codes.write(key, value, key_cache, value_cache, slots, key_scale, value_scale)
    else:
        append_paged_kv_(key, value, key_cache, value_cache, slots)


def write_rows(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    *,
    cache_list: CacheList | None = None,
) -> None:
    """Write tokens (B, S, K, D) into the rows of caches (B, L, K, D) that their positions name, or into a list's."""
    batch, seq = key.shape[:2]
    places = positions.long().expand(batch, seq)
    if cache_list is not None:
        if seq:
            cache_list.refuse_beyond("append_kv_", "positions", places.amax(1) + 1)
        for row, (keys, values) in enumerate(cache_list.rows):
            if key.dtype != keys.dtype:  # compiled code has no plan, so an operator casts when it runs, or refuses
                new = key[row][None], value[row][None]
                torch.ops.layerzero.append_kv_(*new, keys[None], values[None], places[row], cache_dtype=keys.dtype)
                continue
            keys[places[row]], values[places[row]] = key[row], value[row]
        return
    sequences = torch.arange(batch, device=key.device).unsqueeze(1)
    key_cache[sequences, places] = key
    value_cache[sequences, places] = value


def check_list(key: Tensor, key_cache: Tensor, positions: Tensor, cache_list: CacheList, **_: object) -> list[Check]:
    """Places in the request's own cache: one beyond it ends a GPU's context; and those that have memory."""
    found = layout_record.checks(key_cache, positions=positions)
    ends = positions.expand(key.shape[:2]) + 1
    return [*found, *cache_list.checks("positions", ends.amax(1))] if ends.numel() else found


_PAGE = 16


def _sizes(heads: int, kv_heads: int, head_dim: int, half: int, table: int) -> dict[str, int]:
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": head_dim}
    return sizes | {"rotary_half": half or head_dim // 2, "table": table}


def _contiguous(
    name: str, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int, half: int = 0, **params: object
) -> Case:
    length = 64 if name.startswith("small") else 4096
    sizes = {"batch": batch, "seq": seq, "length": length}
    return Case(name, sizes | _sizes(heads, kv_heads, head_dim, half, length), params)


def _paged(
    name: str, tokens: int, heads: int, kv_heads: int, head_dim: int, half: int = 0, pages: int = 0, **params: object
) -> Case:
    small = name.startswith("small")
    sizes = {"tokens": tokens, "pages": pages or (8 if small else 1024), "page_size": _PAGE}
    return Case(name, sizes | _sizes(heads, kv_heads, head_dim, half, 64 if small else 4096), params)


CONTIGUOUS = (
    _contiguous("small", 2, 7, 4, 2, 64),
    _contiguous("small_interleaved", 1, 9, 4, 4, 64, interleaved=True),
    _contiguous("small_partial", 2, 5, 4, 2, 80, 16),
    _contiguous("llama3_8b_decode_b1", 1, 1, 32, 8, 128),
    _contiguous("llama3_8b_decode_b8", 8, 1, 32, 8, 128),
    _contiguous("llama3_8b_s512", 1, 512, 32, 8, 128),
)
PAGED = (
    _paged("small", 7, 4, 2, 64),
    _paged("small_interleaved", 9, 4, 4, 64, interleaved=True),
    _paged("small_partial", 5, 4, 2, 80, 16),
    _paged("llama3_8b_decode_b1", 1, 32, 8, 128),
    _paged("llama3_8b_decode_b64", 64, 32, 8, 128),
    _paged("llama3_8b_s512", 512, 32, 8, 128),
)


def _table(case: Case, device: torch.device) -> dict[str, Tensor]:
    return dict(zip(("cos", "sin"), cos_sin(case.sizes["table"], case.sizes["rotary_half"], device), strict=True))


def places_in_rows(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    """The tokens of a sequence one after the other, from anywhere."""
    batch, seq, length = (case.sizes[name] for name in ("batch", "seq", "length"))
    first = torch.randint(0, max(length - seq, 0) + 1, (batch, 1), generator=generator)
    return {"positions": (first + torch.arange(seq)).clamp(max=max(length - 1, 0)).to(device)}


def contiguous_examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    """Real angles, and places in rows."""
    return {**_table(case, device), **places_in_rows(case, dtype, device, generator)}


def paged_examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
    """Real angles, at positions in any order."""
    positions = torch.randint(0, max(case.sizes["table"], 1), (case.sizes["tokens"],), generator=generator)
    return {**_table(case, device), "positions": positions.to(device)}


_SHAPES = ((32, 8, 128), (16, 2, 128), (16, 16, 64))


def contiguous_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """A decode step of one sequence and of several, a prefill; none where sizes are named."""
    batches = ((1, 1), (8, 1), (64, 1), (1, 512), (1, 4096)) if device == "cuda" else ((1, 1), (4, 1), (1, 512))
    for heads, kv_heads, head_dim in _SHAPES if not narrow else ():
        for batch, seq in batches:
            yield _contiguous(f"B{batch} S{seq} ({heads}/{kv_heads}/{head_dim})", batch, seq, heads, kv_heads, head_dim)


def paged_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """The same in tokens."""
    tokens, pages = ((1, 8, 64, 512, 4096), 8192) if device == "cuda" else ((1, 8, 64, 512), 256)
    for heads, kv_heads, head_dim in _SHAPES if not narrow else ():
        for each in tokens:
            name = f"{each} tokens ({heads}/{kv_heads}/{head_dim})"
            yield _paged(name, each, heads, kv_heads, head_dim, pages=pages)


EXACT = Elementwise(dict.fromkeys(TOLERANCE, Tolerance(0.0, 0.0)), "values are only moved")
PAGED_PLACES = (tensor("positions: tokens", INDEX, same_dtype=False, indexes=("table",)), slots(distinct=True))
"""Of a paged cache: the row of the table for each token, and its slot."""

_HEADS = (
    Axis("heads", scales=True, beside=True),
    Axis("kv_heads", scales=True, beside=True, apart=True, carries=("heads",)),
    Axis("table", live=True, works=False),
    *HEAD_DIMS,
)


def of_table(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    """Facts of the rotation."""
    return {
        "rotary_dim": 2 * values["rotary_half"],
        "table_dtype": dtype_name(arguments["cos"].dtype),
        "position_dtype": dtype_name(arguments["positions"].dtype),
    }


OF_TABLE: Mapping[str, tuple[str, ...]] = {"rotary_dim": ("rotary_half",), "table_dtype": (), "position_dtype": ()}


def _work(tokens: Sequence[str], facts: Mapping[str, Any]) -> Work:
    """What a rotation does; queries read and written, keys and values too, two rows of the table for each token."""
    count, heads, kv_heads = math.prod(facts[name] for name in tokens), facts["heads"], facts["kv_heads"]
    elements = (heads + kv_heads) * facts["head_dim"] + kv_heads * facts["value_dim"]
    moved = 2.0 * count * elements * facts["dtype"].itemsize
    return Work(6.0 * count * (heads + kv_heads) * facts["rotary_half"], moved + 4.0 * count * facts["rotary_dim"])


def _inputs(token: str, cache: str, *places: TensorSchema) -> tuple[TensorSchema | str, ...]:
    return (f"query: {token} heads head_dim", *new_tokens(token), *COS_SIN, *caches(cache, mutated=True), *places)


_COMMON: dict[str, Any] = {
    "params": (INTERLEAVED,),
    "layouts": CACHE_LAYOUTS,
    "tolerance": TOLERANCE,
    "tolerance_reason": TOLERANCE_REASON,
    "judge": {"value_cache": EXACT},
    "derive": of_table,
    "derived_from": OF_TABLE,
    "check_values": layout_record.checks,
    "guard": layout_record.guard,
    "note": layout_record.note,
    "stock": packed_steps.rope_append,
}
PLACES_IN_ROWS = tensor("positions: ... seq", INDEX, same_dtype=False, indexes=("length",), distinct=True)
"""Of a contiguous cache: the row of each token, and its place."""

ROPE_APPEND = operation(
    "kv.rope_append",
    "Rotary positions of queries and keys, keys and values written into a contiguous cache",
    rope_append_reference,
    inputs=_inputs("batch seq", "batch length", PLACES_IN_ROWS),
    outputs=("query_out: batch seq heads head_dim",),
    axes=(
        Axis("batch", scales=True, live=True, beside=True, apart=True),
        Axis("seq", scales=True, live=True),
        Axis("length", works=False),
        *_HEADS,
    ),
    cases=CONTIGUOUS,
    examples=contiguous_examples,
    work=functools.partial(_work, ("batch", "seq")),
    sweep=contiguous_sweep,
    **_COMMON,
)
ROPE_APPEND_PAGED = operation(
    "kv.rope_append.paged",
    "Rotary positions of queries and keys, keys and values written into the slots of a paged cache",
    rope_append_reference,
    inputs=_inputs("tokens", "pages page_size", *PAGED_PLACES),
    outputs=("query_out: tokens heads head_dim",),
    axes=(Axis("tokens", scales=True, live=True, apart=True), Axis("pages", live=True, works=False), *_HEADS),
    cases=PAGED,
    examples=paged_examples,
    work=functools.partial(_work, ("tokens",)),
    sweep=paged_sweep,
    **_COMMON,
)


def _fake(query: Tensor, *_: object, **__: object) -> Tensor:
    """The reference asks where slots are none, which tensors without memory cannot tell."""
    return query.new_empty(query.shape)


def _quantized_work(facts: Mapping[str, Any]) -> Work:
    """Queries read and written, keys and values read, a byte written for each number of them, two rows of the table."""
    tokens, heads, kv_heads = facts["tokens"], facts["heads"], facts["kv_heads"]
    new = kv_heads * (facts["head_dim"] + facts["value_dim"])
    moved = (2 * heads * facts["head_dim"] + new) * facts["dtype"].itemsize + new + 4.0 * facts["rotary_dim"]
    return Work(6.0 * tokens * (heads + kv_heads) * facts["rotary_half"] + 2.0 * tokens * new, tokens * moved)


ROPE_APPEND_QUANTIZED = replace(
    ROPE_APPEND_PAGED,
    schema=replace(
        ROPE_APPEND_PAGED.schema,
        operation="kv.rope_append.quantized",
        inputs=(
            *(
                replace(each, dtype_constraint=QUANTIZED, same_dtype=False) if each.name in CACHES else each
                for each in ROPE_APPEND_PAGED.schema.inputs
            ),
            *SCALES,
        ),
        codes=codes.CODES,
    ),
    summary="Rotary positions of queries and keys, keys and values written into a cache of float8 or int8",
    fake=_fake,
    judge=dict.fromkeys(CACHES, codes.ONE_STEP),
    derive=lambda arguments, values: {**of_table(arguments, values), **codes.derive(arguments, values)},
    derived=(*ROPE_APPEND_PAGED.derived, *codes.DERIVED),
    derived_from={**ROPE_APPEND_PAGED.derived_from, **dict.fromkeys(codes.DERIVED, ())},
    check_values=codes.check_values,
    guard=codes.guard,
    examples=lambda case, dtype, device, generator: {
        **paged_examples(case, dtype, device, generator),
        **codes.examples(case, dtype, device, generator),
    },
    work=_quantized_work,
    stock=None,
)
