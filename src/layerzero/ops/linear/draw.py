"""Random arguments of matrix products with a weight: shapes, memory, biases, activations, packed weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.ops.activation.formulas import FORMULAS
from layerzero.ops.draw import Draw
from layerzero.ops.linear.examples import deviation
from layerzero.ops.linear.fused import FEW
from layerzero.ops.linear.packed import PackedWeight

FEATURES = (1, 2, 3, 7, 8, 16, 31, 32, 48, 64, 96, 100, 128, 257)
_WIDE = (384, 1000, 1024, 2050)


def leading(draw: Draw) -> tuple[int, ...]:
    """Leading axes: none, one, two or three, now and then an empty one."""
    rows = tuple(draw.of((1, 2, 3, 5, 17, 33)) for _ in range(draw.of((0, 1, 2, 3), (1, 6, 3, 1))))
    return (0, *rows) if draw.chance(0.02) else rows


def weight(draw: Draw, shape: tuple[int, int], dtype: torch.dtype, least: int = 1) -> Tensor:
    """A weight whose products are of order 1."""
    return draw.normal(shape, torch.float32).mul_(deviation(shape[1], least)).to(dtype)


def linear(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.linear``."""
    inputs, outputs = (draw.of(_WIDE if draw.chance(0.2) else FEATURES) for _ in range(2))
    arguments: dict[str, Any] = {
        "input": draw.laid_out(draw.normal((*leading(draw), inputs), dtype)),
        "weight": draw.laid_out(weight(draw, (outputs, inputs), dtype)),
    }
    if draw.chance(0.6):
        arguments["bias"] = draw.laid_out(draw.normal((outputs,), dtype))
    draw.poison(arguments, ("input",))
    if draw.chance(0.25):
        arguments["activation"] = draw.of(tuple(FORMULAS))
    if draw.chance(0.1):
        arguments["out_dtype"] = torch.promote_types(dtype, torch.float32)
    if draw.chance(0.4):
        arguments["packed"] = PackedWeight(arguments["weight"])
    return arguments


def mlp(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.mlp``: plain, gated, or with gate and up in one weight."""
    inputs, inner, outputs = (draw.of(FEATURES) for _ in range(3))
    kind = draw.of(("plain", "gated", "joined"))
    shapes = {"up_weight": (2 * inner if kind == "joined" else inner, inputs), "down_weight": (outputs, inner)}
    if kind == "gated":
        shapes["gate_weight"] = (inner, inputs)
    arguments: dict[str, Any] = {"input": draw.laid_out(draw.normal((*leading(draw), inputs), dtype))}
    arguments |= {name: draw.laid_out(weight(draw, shape, dtype, FEW), expand=False) for name, shape in shapes.items()}
    biased, packs = draw.chance(0.4), draw.chance(0.4)
    for name, shape in shapes.items():
        part = name.removesuffix("_weight")
        if biased and draw.chance(0.8):
            arguments[f"{part}_bias"] = draw.laid_out(draw.normal(shape[:1], dtype))
        if packs:
            arguments[f"packed_{part}"] = PackedWeight(arguments[name])
    draw.poison(arguments, ("input",))
    if draw.chance(0.6):
        arguments["activation"] = draw.of(tuple(FORMULAS))
    return arguments
