"""``lz.rope`` and ``lz.rope_``: their signatures, the checks of a call, and the routes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.dtypes import dtype_name
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.attention.layout import MAX_PLAUSIBLE_HEADS, both_fit
from layerzero.ops.declaration import check_dense, overlaps, write_problems
from layerzero.ops.rope import draw
from layerzero.ops.rope.declare import ROPE, ROPE_INPLACE, rope, rope_

HEADS_AXIS = {"BSHD": -2, "BHSD": -3}
"""Where heads are, counted from the last axis; three axes are read as BSHD without a batch."""


def resolve(query: Tensor, key: Tensor, positions: Tensor | None) -> tuple[str, bool]:
    """Decide the layout of a call of four axes, empty where both fit; and whether head counts alone proved it.

    In order: queries and keys have the same tokens and head counts that divide; positions have a size for each token;
    no model has more than 256 heads.
    """
    fitting = [each for each in HEADS_AXIS if _fits(each, query.shape, key.shape)]
    if len(fitting) == 1:
        return fitting[0], query.shape[HEADS_AXIS[fitting[0]]] != key.shape[HEADS_AXIS[fitting[0]]]
    named = [each for each in fitting if positions is not None and positions.shape[-1:] == (_tokens(each, query),)]
    readings = named if len(named) == 1 else fitting or list(HEADS_AXIS)
    plausible = [each for each in readings if query.shape[HEADS_AXIS[each]] <= MAX_PLAUSIBLE_HEADS]
    readings = plausible if len(plausible) == 1 else readings
    if len(readings) == 1:
        return readings[0], False
    same = query.shape[1:3] == (1, 1) and key.shape[1:3] == (1, 1)
    return "BSHD" if same or not fitting else "", False


def _tokens(layout: str, query: Tensor) -> int:
    return int(query.shape[-3 if layout == "BSHD" else -2])


def _fits(layout: str, query: Sequence[int], key: Sequence[int]) -> bool:
    heads, tokens = HEADS_AXIS[layout], -5 - HEADS_AXIS[layout]
    return query[tokens] == key[tokens] and key[heads] > 0 and query[heads] % key[heads] == 0


def _route_rope_(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    found = routed("rope_", ROPE_INPLACE, arguments, default_layout)
    problems = write_problems(arguments, ("query", "key"), ("cos", "sin", "positions"))
    query, key = arguments["query"], arguments["key"]
    if query is key or (not query.is_meta and overlaps(query, key) and not apart(query, key)):
        problems.append("key: wanted elements of its own, got memory that it shares with query")
    refuse("rope_", problems)
    return found


def routed(function: str, operation: Operation, arguments: dict[str, Any], default_layout: str | None) -> Routed:
    """Check a call and say its layout, for any operation on query, key, cos, sin and positions."""
    check_dense(function, arguments)
    problems = shape_problems(arguments)
    refuse(function, problems)
    layout, fixed = layout_of(function, arguments, default_layout)
    canonical = {name: value for name, value in arguments.items() if name != "layout"}
    problems = operation.schema.validate(layout=layout, **canonical)
    problems = problems or size_problems(arguments, layout)
    refuse(function, problems)
    return Routed(operation, canonical, layout, *(varying(arguments, layout) if fixed else ()))


def layout_of(function: str, arguments: dict[str, Any], default_layout: str | None) -> tuple[str, bool]:
    """The layout of a call, and whether it stays with other sizes: as the caller named it, of three axes, or proved.

    Raises: InvalidCallError for what is no layout, for one of three axes, and where both fit.
    """
    query, layout = arguments["query"], arguments["layout"]
    if layout is None and query.ndim == 4:
        layout = default_layout
    if layout is None and query.ndim == 4:
        found, proved = resolve(query, arguments["key"], arguments["positions"])
        if not found:
            raise InvalidCallError(function, [both_fit("input" if "input" in arguments else "query", query.shape)])
        return found, proved
    if layout is None:
        return "BSHD", True
    if not isinstance(layout, str) or layout not in HEADS_AXIS:
        raise InvalidCallError(function, [f"layout: wanted BSHD or BHSD, got {told(layout)}"])
    if query.ndim == 3 and layout != "BSHD":
        raise InvalidCallError(
            function, [f"layout: wanted none for three axes, which are tokens first; got {told(layout)}"]
        )
    return layout, True


def shape_problems(arguments: dict[str, Any]) -> list[str]:
    """What is wrong with the numbers of axes, which decide how everything else is read."""
    problems = []
    for name in ("query", "key", "cos", "sin"):
        tensor = arguments[name]
        if not isinstance(tensor, Tensor):
            problems.append(f"{name}: wanted a tensor, got {type(tensor).__name__}")
        elif name in ("query", "key") and tensor.ndim not in (3, 4):
            wanted = "(tokens, heads, head dim) or four axes with a batch first"
            problems.append(f"{name}: wanted {wanted}, got {tensor.ndim}D {tuple(tensor.shape)}")
        elif name in ("cos", "sin") and tensor.ndim == 3:
            hint = (
                f"of Transformers' tables, a row for each token, pass {name}[0] if all sequences have equal positions"
            )
            problems.append(f"{name}: wanted (positions, rotated entries / 2), got {tuple(tensor.shape)}; {hint}")
    if not problems and arguments["query"].ndim != arguments["key"].ndim:
        wanted, got = arguments["query"].ndim, arguments["key"].ndim
        problems.append(f"key: wanted {wanted} axes as query has, got {got}")
    positions = arguments["positions"]
    if positions is not None and not isinstance(positions, Tensor):
        problems.append(f"positions: wanted a tensor or None, got {type(positions).__name__}")
    return problems


def table_problems(cos: Tensor, sin: Tensor, head_dim: int, *, interleaved: bool) -> list[str]:
    """What is wrong with the width and the dtypes of a table."""
    problems, half = [], cos.shape[-1]
    if not 0 < 2 * half <= head_dim:
        hint = ""
        if 0 < half <= head_dim and not half % 2 and not interleaved:
            first = f"[:, :{half // 2}]"
            hint = f"; of Transformers' tables, which hold each angle twice, pass cos{first} and sin{first}"
        problems.append(f"cos: wanted a width of half of 2 to {head_dim} rotated entries of a head, got {half}{hint}")
    if cos.dtype != sin.dtype:
        problems.append(f"sin: wanted dtype {dtype_name(cos.dtype)} like cos, got {dtype_name(sin.dtype)}")
    return problems


def size_problems(arguments: dict[str, Any], layout: str) -> list[str]:
    """What the schema cannot say: the table's width and length, the batch, the shape of positions."""
    query, key, cos, sin, positions = (arguments[name] for name in ("query", "key", "cos", "sin", "positions"))
    problems = []
    if query.shape[:-3] != key.shape[:-3]:
        problems.append(f"key: wanted batch {query.shape[0]} as in query, got {key.shape[0]}")
    problems += table_problems(cos, sin, query.shape[-1], interleaved=bool(arguments.get("interleaved")))
    if 0 in (query.shape[-2 if layout == "BSHD" else -3], key.shape[-2 if layout == "BSHD" else -3]):
        problems.append(f"wanted heads above 0, got query {tuple(query.shape)} and key {tuple(key.shape)} in {layout}")
    seq = query.shape[-3 if layout == "BSHD" else -2]
    if positions is None:
        if seq > cos.shape[0]:
            problems.append(f"cos: wanted a row for each of {seq} tokens without positions, got {cos.shape[0]}")
    elif seq and not cos.shape[0]:
        problems.append(f"cos: wanted a row for each position, got shape {tuple(cos.shape)}")
    else:
        batches = ((),) if query.ndim == 3 else ((), (1,), tuple(query.shape[:1]))
        if tuple(positions.shape) not in [(*each, seq) for each in batches]:
            wanted = " or ".join(dict.fromkeys(str((*each, seq)) for each in reversed(batches)))
            problems.append(f"positions: wanted shape {wanted}, got {tuple(positions.shape)}")
    return problems


def varying(arguments: dict[str, Any], layout: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """``varies`` and ``equal`` of the route: without positions the table must be long enough for every sequence."""
    query, cos, positions = arguments["query"], arguments["cos"], arguments["positions"]
    if positions is not None:
        shared = positions.ndim == 2 and positions.shape[0] != query.shape[0]  # 1 for a whole batch: stays 1
        return ("seq", "table") if shared else ("...", "seq", "table"), ()
    tokens = _tokens(layout, query)
    if tokens == cos.shape[0]:  # as a model slices its table for each prompt
        return ("...", "seq", "table"), ("seq", "table")
    most = (1 << tokens.bit_length()) - 1
    return ("...", "seq") if most <= cos.shape[0] else ("...",), ()


def apart(left: Tensor, right: Tensor) -> bool:
    """Whether two views of one storage have no element in common, as the parts of a projection's output do not.

    Proved where both step alike over some outer axes, and what each holds within one step does not overlap the other's.
    """
    if left.ndim != right.ndim:
        return False
    gap = int(right.storage_offset()) - int(left.storage_offset())
    first, second = (left, right) if gap >= 0 else (right, left)
    inner = sorted(range(left.ndim), key=lambda axis: max(left.stride(axis), right.stride(axis)))
    step = 0  # of the innermost outer axis; none yet
    while True:
        spans = [1 + sum((each.shape[axis] - 1) * each.stride(axis) for axis in inner) for each in (first, second)]
        if spans[0] <= abs(gap) and (step == 0 or abs(gap) + spans[1] <= step):
            return True
        axis = inner.pop()
        if left.shape[axis] != right.shape[axis] or (left.stride(axis) != right.stride(axis) and left.shape[axis] > 1):
            return False
        step = left.stride(axis) if left.shape[axis] > 1 else step
        if not inner:
            return False


ROPE_FUNCTION = Function(
    name="rope",
    signature=rope,
    route=functools.partial(routed, "rope", ROPE),
    operations=(ROPE,),
    draw=draw.rope,
    lacking="lz.rope_one(input, cos, sin) rotates one tensor",
)
ROPE_IN_PLACE = Function(
    name="rope_",
    signature=rope_,
    route=_route_rope_,
    operations=(ROPE_INPLACE,),
    draw=draw.rope_,
    weight=1,
    may_share_storage=frozenset({frozenset({"query", "key"})}),
)
FUNCTIONS = (ROPE_FUNCTION, ROPE_IN_PLACE)
