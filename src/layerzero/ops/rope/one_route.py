"""``lz.rope_one``: its signature, the checks of a call, the route."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Routed
from layerzero.ops.attention.layout import both_fit
from layerzero.ops.checks import check_dense
from layerzero.ops.rope import draw
from layerzero.ops.rope.layout import resolve
from layerzero.ops.rope.one import ROPE_ONE
from layerzero.ops.rope.route import named_layout, shape_problems, size_problems, varying

_NAME = "rope_one"


def rope_one(
    input: Tensor,
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
    if problems:
        raise InvalidCallError(_NAME, problems)
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
    if problems:
        raise InvalidCallError(_NAME, problems)
    fixed = named is not None or tensor.ndim == 3
    return Routed(ROPE_ONE, canonical, layout, varying(views, layout) if fixed else ())


FUNCTIONS = (Function(_NAME, rope_one, _route, (ROPE_ONE,), draw=draw.rope_one, weight=1),)
