"""``lz.linear`` and ``lz.mlp``: signatures, checks of a call, routes, and random calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.dtypes import FLOATING, dtype_name
from layerzero.core.errors import refuse
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.activation.formulas import FORMULAS
from layerzero.ops.declaration import check_dense, function, wide
from layerzero.ops.draw import Draw
from layerzero.ops.linear.declare import ACTIVATIONS, LINEAR, deviation
from layerzero.ops.linear.fused import FEW, FUSED, FUSED_GATED, FUSED_JOINED, PACKED_OF, mlp
from layerzero.ops.linear.packed import PackedWeight, packed_problems

FEATURES = (1, 2, 3, 7, 8, 16, 31, 32, 48, 64, 96, 100, 128, 257)
_WIDE = (384, 1000, 1024, 2050)


def leading(draw: Draw) -> tuple[int, ...]:
    """Leading axes: none, one, two or three, now and then an empty one."""
    return draw.leading((0, 1, 2, 3), (1, 6, 3, 1), (1, 2, 3, 5, 17, 33))


def random_weight(draw: Draw, shape: tuple[int, int], dtype: torch.dtype, least: int = 1) -> Tensor:
    """A weight whose products are of order 1."""
    return draw.normal(shape, torch.float32).mul_(deviation(shape[1], least)).to(dtype)


def random_linear(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.linear``."""
    inputs, outputs = (draw.of(_WIDE if draw.chance(0.2) else FEATURES) for _ in range(2))
    arguments: dict[str, Any] = {
        "input": draw.laid_out(draw.normal((*leading(draw), inputs), dtype)),
        "weight": draw.laid_out(random_weight(draw, (outputs, inputs), dtype)),
    }
    arguments |= draw.maybe(0.6, bias=lambda: draw.laid_out(draw.normal((outputs,), dtype)))
    draw.poison(arguments, ("input",))
    arguments |= draw.maybe(0.25, activation=lambda: draw.of(tuple(FORMULAS)))
    arguments |= draw.maybe(0.1, out_dtype=lambda: torch.promote_types(dtype, torch.float32))
    arguments |= draw.maybe(0.4, packed=lambda: PackedWeight(arguments["weight"]))
    return arguments


def random_mlp(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.mlp``: plain, gated, or with gate and up in one weight."""
    inputs, inner, outputs = (draw.of(FEATURES) for _ in range(3))
    kind = draw.of(("plain", "gated", "joined"))
    shapes = {"up_weight": (2 * inner if kind == "joined" else inner, inputs), "down_weight": (outputs, inner)}
    if kind == "gated":
        shapes["gate_weight"] = (inner, inputs)
    arguments: dict[str, Any] = {"input": draw.laid_out(draw.normal((*leading(draw), inputs), dtype))}
    arguments |= {
        name: draw.laid_out(random_weight(draw, shape, dtype, FEW), expand=False) for name, shape in shapes.items()
    }
    biased, packs = draw.chance(0.4), draw.chance(0.4)
    for name, shape in shapes.items():
        part = name.removesuffix("_weight")
        if biased and draw.chance(0.8):
            arguments[f"{part}_bias"] = draw.laid_out(draw.normal(shape[:1], dtype))
        if packs:
            arguments[f"packed_{part}"] = PackedWeight(arguments[name])
    draw.poison(arguments, ("input",))
    arguments |= draw.maybe(0.6, activation=lambda: draw.of(tuple(FORMULAS)))
    return arguments


def _problems(arguments: dict[str, Any]) -> list[str]:
    of_packed = packed_problems(arguments)
    return activation_problems(arguments["activation"]) + of_packed + out_dtype_problems(arguments)


def as_default(arguments: dict[str, Any], name: str = "input") -> None:
    """The dtype of the result that is the default, spelled out: kernels without that argument stay legal."""
    if arguments["out_dtype"] == arguments[name].dtype:
        arguments["out_dtype"] = None


def activation_problems(activation: object) -> list[str]:
    """List what is wrong with the name of an activation; its type is the schema's business."""
    if not isinstance(activation, str) or activation in ACTIVATIONS:
        return []
    return [f"activation: wanted {', '.join(ACTIVATIONS)} or None, got {told(activation)}"]


def out_dtype_problems(arguments: dict[str, Any]) -> list[str]:
    """List what is wrong with the dtype of the result; its type is the schema's business."""
    input_, out_dtype = arguments["input"], arguments["out_dtype"]
    if not isinstance(out_dtype, torch.dtype) or not isinstance(input_, Tensor) or input_.dtype not in FLOATING:
        return []  # torch promotes no float8; the schema refuses it
    allowed = list(dict.fromkeys((input_.dtype, wide(input_.dtype))))
    if out_dtype in allowed:
        return []
    wanted = " or ".join(map(dtype_name, allowed))
    return [f"out_dtype: wanted {wanted} for an input of {dtype_name(input_.dtype)}, got {dtype_name(out_dtype)}"]


def _route_mlp(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    check_dense("mlp", arguments)
    operation = _mlp_of(arguments)
    gate = {"gate_weight", "gate_bias", "packed_gate"} if operation is not FUSED_GATED else set()
    problems = [
        f"{name}: wanted None without gate_weight, got one" for name in sorted(gate) if arguments[name] is not None
    ]
    given = {name: value for name, value in arguments.items() if name not in gate}
    problems += operation.schema.validate(**given) + activation_problems(given["activation"])
    problems += packed_problems(given, PACKED_OF)
    refuse("mlp", problems)
    return Routed(operation, given, varies=("...",))


def _mlp_of(arguments: dict[str, Any]) -> Operation:
    """Gated where there is a gate; joined where one weight has twice the rows that the other one reads."""
    up, down = arguments["up_weight"], arguments["down_weight"]
    if arguments["gate_weight"] is not None:
        return FUSED_GATED
    matrices = all(isinstance(each, Tensor) and each.ndim == 2 for each in (up, down))
    return FUSED_JOINED if matrices and up.shape[0] == 2 * down.shape[1] > 0 else FUSED


FUNCTIONS = (
    function("linear", LINEAR, values=_problems, canonical=as_default, draw=random_linear, state=frozenset({"matmul"})),
    Function("mlp", mlp, _route_mlp, (FUSED, FUSED_GATED, FUSED_JOINED), random_mlp, state=frozenset({"matmul"})),
)
