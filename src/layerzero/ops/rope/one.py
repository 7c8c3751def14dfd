"""Rotary positions of one tensor: posenc.rope.one, for keys that are rotated apart from queries or shared by heads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, TensorSchema
from layerzero.core.dtypes import FLOATING, dtype_name
from layerzero.core.operation import Case, Operation, Work
from layerzero.core.schema import OperationSchema
from layerzero.ops.attention.declare import HEAD_DIM
from layerzero.ops.rope import stock
from layerzero.ops.rope.cases import CASES, sweep
from layerzero.ops.rope.cases import examples as pair_examples
from layerzero.ops.rope.declare import (
    COS_SIN,
    DERIVED,
    DERIVED_FROM,
    INTERLEAVED,
    LAYOUTS,
    POSITIONS,
    QUERY,
    TOLERANCE,
    TOLERANCE_REASON,
)
from layerzero.ops.rope.reference import rotated, rows_of, wide_dtype


def rope_one_reference(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """``posenc.rope`` of one tensor.

    Shapes: input (..., S, H, D), cos and sin (P, R/2), positions (..., S) or (S,), 0 to S-1 without → input's
    Dtype, units and source: as of ``posenc.rope``.
    """
    wide = wide_dtype(input, cos, sin)
    rows = [each.to(wide) for each in rows_of(cos, sin, positions, input.shape[-3])]
    return rotated(input, *rows, interleaved=interleaved, wide=wide)


def _fake(input: Tensor, *_: object, **__: object) -> Tensor:
    return input.new_empty(input.shape)


def _derive(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    tensor, positions = arguments["input"], arguments.get("positions")
    return {
        "batch": math.prod(tensor.shape[:-3]),
        "rotary_dim": 2 * values["rotary_half"],
        "input_ndim": tensor.ndim,
        "table_dtype": dtype_name(arguments["cos"].dtype),
        "position_dtype": "none" if positions is None else dtype_name(positions.dtype),
    }


def _work(facts: Mapping[str, Any]) -> Work:
    """Six operations a pair; read and written once, two rows of the table for each token."""
    tokens = facts["batch"] * facts["seq"]
    moved = 2.0 * tokens * facts["heads"] * facts["head_dim"] * facts["dtype"].itemsize
    return Work(6.0 * tokens * facts["heads"] * facts["rotary_half"], moved + 4.0 * tokens * facts["rotary_dim"])


def _complete(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """What follows where the tensor is all that is known: full rotation, a table as long as the sequence."""
    return {"batch": 1, "rotary_half": sizes["head_dim"] // 2, "table": max(sizes["seq"], 1)}


def _alone(of: Iterable[Case]) -> tuple[Case, ...]:
    """The queries of calls with keys."""
    return tuple(
        Case(
            each.name, {name: size for name, size in each.sizes.items() if name != "kv_heads"}, each.params, each.given
        )
        for each in of
    )


def _examples(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> dict[str, Tensor]:
    pair = Case(case.name, {**case.sizes, "kv_heads": 1}, case.params, case.given)
    made = pair_examples(pair, dtype, device, generator)
    return {"input": made["query"], **{name: made[name] for name in ("cos", "sin", "positions")}}


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> tuple[Case, ...]:
    return _alone(sweep(device, narrow))


ROPE_ONE = Operation(
    schema=OperationSchema(
        operation="posenc.rope.one",
        inputs=(TensorSchema("input", QUERY, FLOATING, has_layout=True), *COS_SIN, POSITIONS),
        outputs=(TensorSchema("output", QUERY, FLOATING, has_layout=True),),
        params=(INTERLEAVED,),
        axes=(
            Axis("batch", scales=True, live=True, beside=True, apart=True, leading=True),
            Axis("seq", scales=True, live=True),
            Axis("heads", scales=True, apart=True),
            Axis("table", live=True, works=False),
            Axis("head_dim", codes=HEAD_DIM),
        ),
        layouts=LAYOUTS,
    ),
    summary="Rotary positions of one tensor",
    reference=rope_one_reference,
    fake=_fake,
    cases=_alone(CASES),
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    derive=_derive,
    derived=DERIVED,
    derived_from=DERIVED_FROM,
    examples=_examples,
    complete=_complete,
    work=_work,
    sweep=_sweep,
    stock=stock.rope_one,
)
