"""Rotary positions of one tensor: posenc.rope.one, for keys that are rotated apart from queries or shared by heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.operation import Case, Function, Routed, Work
from layerzero.ops.attention.declare import HEAD_DIM
from layerzero.ops.attention.layout import both_fit
from layerzero.ops.declaration import check_dense, operation, tensor
from layerzero.ops.rope import draw, stock
from layerzero.ops.rope.declare import (
    CASES,
    COS_SIN,
    INTERLEAVED,
    LAYOUTS,
    OF_TABLE,
    POSITIONS,
    QUERY,
    TOLERANCE,
    TOLERANCE_REASON,
    of_table,
    rotated,
    sweep,
    wide_dtype,
)
from layerzero.ops.rope.declare import examples as pair_examples
from layerzero.ops.rope.route import named_layout, resolve, shape_problems, size_problems, varying


def rope_one_reference(
    input: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, interleaved: bool = False
) -> Tensor:
    """``posenc.rope`` of one tensor.

    Shapes: input (..., S, H, D), cos and sin (P, R/2), positions (..., S) or (S,), 0 to S-1 without → input's
    Dtype, units and source: as of ``posenc.rope``.
    """
    wide = wide_dtype(input, cos, sin)
    rows = [each.to(wide) for each in stock.rows_of(cos, sin, positions, input.shape[-3])]
    return rotated(input, *rows, interleaved=interleaved, wide=wide)


def _work(facts: Mapping[str, Any]) -> Work:
    """Six operations a pair; read and written once, two rows of the table for each token."""
    tokens = facts["batch"] * facts["seq"]
    moved = 2.0 * tokens * facts["heads"] * facts["head_dim"] * facts["dtype"].itemsize
    return Work(6.0 * tokens * facts["heads"] * facts["rotary_half"], moved + 4.0 * tokens * facts["rotary_dim"])


def _complete(sizes: Mapping[str, int]) -> Mapping[str, int]:
    """What follows where the tensor is all that is known: full rotation, a table as long as the sequence."""
    return {"batch": 1, "rotary_half": sizes["head_dim"] // 2, "table": max(sizes["seq"], 1)}


def _alone(of: Iterable[Case]) -> tuple[Case, ...]:
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


ROPE_ONE = operation(
    "posenc.rope.one",
    "Rotary positions of one tensor",
    rope_one_reference,
    inputs=(tensor(f"input: {' '.join(QUERY)}", has_layout=True), *COS_SIN, POSITIONS),
    outputs=(tensor(f"output: {' '.join(QUERY)}", has_layout=True),),
    params=(INTERLEAVED,),
    axes=(
        Axis("batch", scales=True, live=True, beside=True, apart=True, leading=True),
        Axis("seq", scales=True, live=True),
        Axis("heads", scales=True, apart=True),
        Axis("table", live=True, works=False),
        Axis("head_dim", codes=HEAD_DIM),
    ),
    layouts=LAYOUTS,
    cases=_alone(CASES),
    tolerance=TOLERANCE,
    tolerance_reason=TOLERANCE_REASON,
    derive=of_table,
    derived_from=OF_TABLE,
    examples=_examples,
    complete=_complete,
    work=_work,
    sweep=lambda device, narrow: _alone(sweep(device, narrow)),
    stock=stock.rope_one,
)


_NAME = "rope_one"


def rope_one(
    input: Tensor,  # torch's name
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    layout: str | None = None,
) -> Tensor:
    """Rotate one tensor by the angles of its positions, as ``lz.rope`` rotates queries and keys.

    For keys that are rotated apart from their queries, and for the part of latent attention's keys that heads share.

    Shapes: input (T, H, D), positions (T,); or input (B, S, H, D), positions (B, S), (1, S) or (S,), axes 1 and 2 of
        input swapped in BHSD; cos and sin (P, R/2), R at most D → input's. Entries of a head from R on pass through.
    Dtype: input floating, returned; the rest as of ``lz.rope``.
    Args:
        cos, sin, positions, interleaved: as of ``lz.rope``.
        layout: ``"BSHD"`` or ``"BHSD"``, for four axes; by default the configured one, else what strides and positions
            say, else BSHD with a warning. Of three axes the first are tokens.
    Raises: InvalidCallError as ``lz.rope``.
    Source: RoFormer, arXiv:2104.09864.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense(_NAME, arguments)
    views = {"query": arguments["input"], "key": arguments["input"], **arguments}
    problems = [each.replace("query:", "input:", 1) for each in shape_problems(views) if not each.startswith("key:")]
    refuse(_NAME, problems)
    tensor, layout = arguments["input"], "BSHD"
    named = arguments["layout"] if arguments["layout"] is not None else default_layout if tensor.ndim == 4 else None
    if named is not None:
        layout = named_layout(_NAME, named, tensor.ndim)
    elif tensor.ndim == 4:
        layout, _ = resolve(tensor, tensor, arguments["positions"])
        if not layout:
            raise InvalidCallError(_NAME, [both_fit("input", tensor.shape)])
    canonical = {name: value for name, value in arguments.items() if name != "layout"}
    problems = ROPE_ONE.schema.validate(layout=layout, **canonical)
    if not problems and not tensor.shape[-2 if layout == "BSHD" else -3]:
        problems = [f"input: wanted heads above 0, got {tuple(tensor.shape)} in {layout}"]
    problems = problems or size_problems(views, layout)
    refuse(_NAME, problems)
    fixed = named is not None or tensor.ndim == 3
    return Routed(ROPE_ONE, canonical, layout, varying(views, layout) if fixed else ())


FUNCTIONS = (Function(_NAME, rope_one, _route, (ROPE_ONE,), draw=draw.rope_one, weight=1),)
