"""Rotation and append in one: kv.rope_append into a contiguous cache, kv.rope_append.paged into the slots of pages.

The keys that are rotated go nowhere but into the cache, so only queries come back. A contiguous cache is
(batch, length, kv_heads, head_dim) in NHD, (batch, kv_heads, length, head_dim) in HND, as the pages of a paged one are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from layerzero.core.arguments import Axis, TensorSchema
from layerzero.core.dtypes import FLOATING, INDEX, dtype_name
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Operation, Tolerance, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.attention.declare import HEAD_DIMS
from layerzero.ops.paged import on_demand, written
from layerzero.ops.paged.declare import CACHE_LAYOUTS
from layerzero.ops.rope.declare import COS_SIN, INTERLEAVED, TOLERANCE, TOLERANCE_REASON
from layerzero.ops.rope_append import cases, stock
from layerzero.ops.rope_append.reference import fake, rope_append_paged_reference, rope_append_reference

EXACT = Elementwise(dict.fromkeys(TOLERANCE, Tolerance(0.0, 0.0)), "values are only moved")
PAGED_PLACES = (
    TensorSchema("positions", ("tokens",), INDEX, same_dtype=False, indexes=("table",)),
    TensorSchema(
        "slot_mapping",
        ("tokens",),
        frozenset({torch.int64}),
        same_dtype=False,
        indexes=("pages", "page_size"),
        holes=True,
        distinct=True,
    ),
)
"""Of a paged cache: the row of the table for each token, and its slot."""

_HEADS = (
    Axis("heads", scales=True, beside=True),
    Axis("kv_heads", scales=True, beside=True, apart=True, carries=("heads",)),
    Axis("table", live=True, works=False),
    *HEAD_DIMS,
)


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    return {
        "rotary_dim": 2 * values["rotary_half"],
        "table_dtype": dtype_name(arguments["cos"].dtype),
        "position_dtype": dtype_name(arguments["positions"].dtype),
    }


def _work(*tokens: str) -> Any:
    """What a rotation does; queries read and written, keys and values too, two rows of the table for each token."""

    def work(facts: Mapping[str, Any]) -> Work:
        count = 1
        for name in tokens:
            count *= facts[name]
        heads, kv_heads = facts["heads"], facts["kv_heads"]
        elements = (heads + kv_heads) * facts["head_dim"] + kv_heads * facts["value_dim"]
        moved = 2.0 * count * elements * facts["dtype"].itemsize
        return Work(6.0 * count * (heads + kv_heads) * facts["rotary_half"], moved + 4.0 * count * facts["rotary_dim"])

    return work


def _inputs(token: tuple[str, ...], cache: tuple[str, ...], *places: TensorSchema) -> tuple[TensorSchema, ...]:
    kept: dict[str, Any] = {"mutated": True, "has_layout": True, "resident": True}
    return (
        TensorSchema("query", (*token, "heads", "head_dim"), FLOATING),
        TensorSchema("key", (*token, "kv_heads", "head_dim"), FLOATING),
        TensorSchema("value", (*token, "kv_heads", "value_dim"), FLOATING),
        *COS_SIN,
        TensorSchema("key_cache", (*cache, "kv_heads", "head_dim"), FLOATING, **kept),
        TensorSchema("value_cache", (*cache, "kv_heads", "value_dim"), FLOATING, **kept),
        *places,
    )


_COMMON: dict[str, Any] = {
    "fake": fake,
    "tolerance": TOLERANCE,
    "tolerance_reason": TOLERANCE_REASON,
    "judge": {"value_cache": EXACT},
    "derive": _derive,
    "derived": ("rotary_dim", "table_dtype", "position_dtype"),
    "derived_from": {"rotary_dim": ("rotary_half",), "table_dtype": (), "position_dtype": ()},
}

ROPE_APPEND = Operation(
    schema=OperationSchema(
        operation="kv.rope_append",
        inputs=_inputs(
            ("batch", "seq"),
            ("batch", "length"),
            TensorSchema("positions", ("...", "seq"), INDEX, same_dtype=False, indexes=("length",), distinct=True),
        ),
        outputs=(TensorSchema("query_out", ("batch", "seq", "heads", "head_dim"), FLOATING),),
        params=(INTERLEAVED,),
        axes=(
            Axis("batch", scales=True, live=True, beside=True, apart=True),
            Axis("seq", scales=True, live=True),
            Axis("length", works=False),
            *_HEADS,
        ),
        layouts=CACHE_LAYOUTS,
    ),
    summary="Rotary positions of queries and keys, keys and values written into a contiguous cache",
    reference=rope_append_reference,
    cases=cases.CONTIGUOUS,
    check_values=on_demand.checks,
    guard=written.guard,
    note=written.note,
    examples=cases.contiguous_examples,
    work=_work("batch", "seq"),
    sweep=cases.contiguous_sweep,
    stock=stock.rope_append,
    **_COMMON,
)

ROPE_APPEND_PAGED = Operation(
    schema=OperationSchema(
        operation="kv.rope_append.paged",
        inputs=_inputs(
            ("tokens",),
            ("pages", "page_size"),
            *PAGED_PLACES,
        ),
        outputs=(TensorSchema("query_out", ("tokens", "heads", "head_dim"), FLOATING),),
        params=(INTERLEAVED,),
        axes=(
            Axis("tokens", scales=True, live=True, apart=True),
            Axis("pages", live=True, works=False),
            *_HEADS,
        ),
        layouts=CACHE_LAYOUTS,
    ),
    summary="Rotary positions of queries and keys, keys and values written into the slots of a paged cache",
    reference=rope_append_paged_reference,
    cases=cases.PAGED,
    check_values=on_demand.checks,
    guard=written.guard,
    note=written.note,
    examples=cases.paged_examples,
    work=_work("tokens"),
    sweep=cases.paged_sweep,
    stock=stock.rope_append,
    **_COMMON,
)
