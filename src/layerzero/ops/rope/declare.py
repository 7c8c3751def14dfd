"""Rotary positions: posenc.rope, and posenc.rope.inplace, which writes over what it is given.

Tokens come first: (tokens, heads, head dim) is what serving engines have, and (batch, sequence, heads, head dim) is the
same memory: BSHD with a batch or without. BHSD is what lies heads first, as Transformers' tensors do, and has a batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from layerzero.core.arguments import Axis, Param, TensorSchema
from layerzero.core.dtypes import FLOATING, INDEX, dtype_name
from layerzero.core.operation import Operation, Tolerance, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.attention.declare import HEAD_DIM
from layerzero.ops.rope import stock
from layerzero.ops.rope.cases import CASES, examples, sweep
from layerzero.ops.rope.reference import rope_fake, rope_inplace_fake, rope_inplace_reference, rope_reference

LAYOUTS = ("BSHD", "BHSD")
"""Attention's; the batch is any number of leading axes, and only tokens first may do without it."""

TOLERANCE = {
    torch.float64: Tolerance(1e-5, 1e-5),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-2, 1e-2),
}
TOLERANCE_REASON = "twice the rounding of the output; both products and their sum are in float32"

INTERLEAVED = Param("interleaved", bool, False, example=True)

AXES = (
    Axis("batch", scales=True, live=True, beside=True, apart=True, leading=True),
    Axis("seq", scales=True, live=True),
    Axis("heads", scales=True, beside=True),
    Axis("kv_heads", scales=True, beside=True, apart=True, carries=("heads",)),
    Axis("table", live=True, works=False),
    Axis("head_dim", codes=HEAD_DIM),
)
QUERY, KEY = ("...", "seq", "heads", "head_dim"), ("...", "seq", "kv_heads", "head_dim")
COS_SIN = (
    TensorSchema("cos", ("table", "rotary_half"), FLOATING, same_dtype=False),
    TensorSchema("sin", ("table", "rotary_half"), FLOATING, same_dtype=False),
)
POSITIONS = TensorSchema("positions", ("...", "seq"), INDEX, required=False, same_dtype=False, indexes=("table",))


# posenc.rope


def derive_call(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    """Facts that all operations on positions have."""
    query, positions = arguments["query"], arguments.get("positions")
    return {
        "batch": math.prod(query.shape[:-3]),
        "rotary_dim": 2 * values["rotary_half"],
        "input_ndim": query.ndim,
        "table_dtype": dtype_name(arguments["cos"].dtype),
        "position_dtype": "none" if positions is None else dtype_name(positions.dtype),
    }


DERIVED = ("batch", "rotary_dim", "input_ndim", "table_dtype", "position_dtype")
DERIVED_FROM: Mapping[str, tuple[str, ...]] = {
    "batch": ("...",),
    "rotary_dim": ("rotary_half",),
    "input_ndim": (),
    "table_dtype": (),
    "position_dtype": (),
}


def work(facts: Mapping[str, Any]) -> Work:
    """Six operations a pair; queries and keys read and written, two rows of the table for each token."""
    tokens, heads = facts["batch"] * facts["seq"], facts["heads"] + facts["kv_heads"]
    moved = 2.0 * tokens * heads * facts["head_dim"] * facts["dtype"].itemsize
    return Work(6.0 * tokens * heads * facts["rotary_half"], moved + 4.0 * tokens * facts["rotary_dim"])


def complete(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """What follows where queries and keys are all that is known: full rotation, a table as long as the sequence."""
    found = {"batch": 1, "kv_heads": sizes["heads"], "rotary_half": sizes["head_dim"] // 2}
    return found | {"table": max(sizes["seq"], 1)}


_COMMON: dict[str, Any] = {
    "cases": CASES,
    "tolerance": TOLERANCE,
    "tolerance_reason": TOLERANCE_REASON,
    "derive": derive_call,
    "derived": DERIVED,
    "derived_from": DERIVED_FROM,
    "examples": examples,
    "complete": complete,
    "work": work,
    "sweep": sweep,
}

ROPE = Operation(
    schema=OperationSchema(
        operation="posenc.rope",
        inputs=(
            TensorSchema("query", QUERY, FLOATING, has_layout=True),
            TensorSchema("key", KEY, FLOATING, has_layout=True),
            *COS_SIN,
            POSITIONS,
        ),
        outputs=(
            TensorSchema("query_out", QUERY, FLOATING, has_layout=True),
            TensorSchema("key_out", KEY, FLOATING, has_layout=True, dtype_from="key"),
        ),
        params=(INTERLEAVED,),
        axes=AXES,
        layouts=LAYOUTS,
    ),
    summary="Rotary positions of queries and keys",
    reference=rope_reference,
    fake=rope_fake,
    stock=stock.rope,
    **_COMMON,
)

# posenc.rope.inplace


ROPE_INPLACE = Operation(
    schema=OperationSchema(
        operation="posenc.rope.inplace",
        inputs=(
            TensorSchema("query", QUERY, FLOATING, has_layout=True, mutated=True),
            TensorSchema("key", KEY, FLOATING, has_layout=True, mutated=True),
            *COS_SIN,
            POSITIONS,
        ),
        outputs=(),
        params=(INTERLEAVED,),
        axes=AXES,
        layouts=LAYOUTS,
    ),
    summary="Rotary positions written over queries and keys",
    reference=rope_inplace_reference,
    fake=rope_inplace_fake,
    stock=stock.rope_,
    **_COMMON,
)

OPERATIONS = (ROPE, ROPE_INPLACE)
