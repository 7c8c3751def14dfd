"""kv.rope_append.quantized: rotation and append into the slots of a cache of float8 or int8, whose codes have scales.

No library has one launch for it. FlashInfer's ``rope_quantize_fp8_append_paged_kv_cache`` (0.7.2.post1) gives queries
back in float8 alone, and takes one number of the host as the scale of keys and values; vLLM's
``concat_and_cache_mla_rope_fused`` (0.20) is for caches of latent attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core.operation import Case, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.paged import quantized as codes
from layerzero.ops.paged.quantized import QUANTIZED, SCALES
from layerzero.ops.rope.declare import rope_reference
from layerzero.ops.rope_append import declare
from layerzero.ops.rope_append.declare import ROPE_APPEND_PAGED

_OF_FLOATS = ROPE_APPEND_PAGED.schema
_CACHES = ("key_cache", "value_cache")


def rope_append_quantized_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    key_scale: Tensor,
    value_scale: Tensor,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Rotate queries and keys; divide each token's key and value by the scales of its slot and write them there.

    Shapes: query (T, H, D), key (T, K, D), value (T, K, D_v), cos and sin (P, R/2), caches and scales as of
    ``kv.append.quantized``, positions and slot_mapping (T,) → (T, H, D). Mutates both caches.
    Dtype, units and source: as of ``posenc.rope`` and ``kv.append.quantized``. Rotated keys are rounded to their dtype
    before they are divided, as two calls would.
    """
    turned, key = rope_reference(query, key, cos, sin, positions=positions, interleaved=interleaved)
    codes.write(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    return turned


def _fake(query: Tensor, *_: object, **__: object) -> Tensor:
    """The reference asks where slots are none, which tensors without memory cannot tell."""
    return query.new_empty(query.shape)


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    assert ROPE_APPEND_PAGED.derive is not None
    return {**ROPE_APPEND_PAGED.derive(arguments, values), **codes.derive(arguments, values)}


def _work(facts: Mapping[str, Any]) -> Work:
    """Queries read and written, keys and values read, a byte written for each number of them, two rows of the table."""
    tokens, heads, kv_heads = facts["tokens"], facts["heads"], facts["kv_heads"]
    new = kv_heads * (facts["head_dim"] + facts["value_dim"])
    moved = (2 * heads * facts["head_dim"] + new) * facts["dtype"].itemsize + new + 4.0 * facts["rotary_dim"]
    return Work(6.0 * tokens * (heads + kv_heads) * facts["rotary_half"] + 2.0 * tokens * new, tokens * moved)


def _examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Any]:
    return {
        **declare.paged_examples(case, dtype, device, generator),
        **codes.examples(case, dtype, device, generator),
    }


ROPE_APPEND_QUANTIZED = replace(
    ROPE_APPEND_PAGED,
    schema=OperationSchema(
        operation="kv.rope_append.quantized",
        inputs=(
            *(
                replace(each, dtype_constraint=QUANTIZED, same_dtype=False) if each.name in _CACHES else each
                for each in _OF_FLOATS.inputs
            ),
            *SCALES,
        ),
        outputs=_OF_FLOATS.outputs,
        params=_OF_FLOATS.params,
        axes=_OF_FLOATS.axes,
        layouts=_OF_FLOATS.layouts,
    ),
    summary="Rotary positions of queries and keys, keys and values written into a cache of float8 or int8",
    reference=rope_append_quantized_reference,
    fake=_fake,
    judge=dict.fromkeys(_CACHES, codes.ONE_STEP),
    derive=_derive,
    derived=(*ROPE_APPEND_PAGED.derived, *codes.DERIVED),
    derived_from={**ROPE_APPEND_PAGED.derived_from, **dict.fromkeys(codes.DERIVED, ())},
    check_values=codes.check_values,
    guard=codes.guard,
    examples=_examples,
    work=_work,
    stock=None,
)
