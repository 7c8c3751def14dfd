"""Random calls of ``lz.quantize`` and ``lz.dequantize``: every format, scales of every shape, some beyond the range."""

from __future__ import annotations

from typing import Any

import torch

from layerzero.ops.draw import Draw
from layerzero.ops.quantize.declare import QUANTIZE
from layerzero.ops.quantize.formats import FORMATS, SCALED, Format

_BLOCKS = (1, 2, 3, 5, 8)


def quantize(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.quantize``."""
    of: Format = FORMATS[draw.of(tuple(FORMATS))]
    lead = _leading(draw)
    size = of.block or draw.of((1, 2, 4, 16, 33))
    width = size * draw.of(_BLOCKS)
    spread = draw.of((1e-6, 1e-2, 1.0, 30.0, 1e3))
    numbers = (draw.normal((*lead, width), torch.float32) * spread).to(dtype)
    if draw.chance(0.1) and numbers.numel():
        numbers[..., :size] = 0.0
    if draw.chance(0.05) and numbers.numel():
        numbers[..., -1] = draw.of((torch.inf, -torch.inf))
    arguments: dict[str, Any] = {"input": draw.laid_out(numbers), "dtype": of.name}
    if of in SCALED:
        arguments |= _granularity(draw, (*lead, width), size, spread)
    elif of.name == "nvfp4" and draw.chance(0.5):
        arguments["tensor_scale"] = draw.uniform(draw.of(((), (1,))), torch.float32) * 2e-3 * spread + 1e-3 * spread
    draw.poison(arguments, ("input",))
    return arguments


def _granularity(draw: Draw, shape: tuple[int, ...], size: int, spread: float) -> dict[str, Any]:
    *lead, width = shape
    if draw.chance(0.5):
        shapes = ((), (1,), (*lead, 1), (width,), (*lead, width // size))
        scale = (draw.uniform(draw.of(shapes), torch.float32) + 0.1) * 0.04 * spread
        return {"scale": draw.laid_out(scale)}
    per = draw.of(("tensor", "row", "block"))
    return {"per": per, **({"block_size": size} if per == "block" else {})}


def dequantize(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.dequantize``."""
    arguments = quantize(draw, torch.float32)
    name = arguments["dtype"]
    given = {each: value for each, value in arguments.items() if each not in ("input", "dtype")}
    quantized, scale = QUANTIZE[name].reference(arguments["input"].nan_to_num(1.0, 1.0, 1.0), **given)
    back: dict[str, Any] = {"quantized": quantized, "scale": scale, "dtype": name}
    back["quantized"] = draw.laid_out(quantized) if quantized.dtype in (torch.int8, torch.uint8) else quantized
    if "tensor_scale" in arguments:
        back["tensor_scale"] = arguments["tensor_scale"]
    if draw.chance(0.7):
        back["out_dtype"] = draw.of((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    return back


def _leading(draw: Draw) -> tuple[int, ...]:
    rows = tuple(draw.of((1, 2, 3, 5, 17)) for _ in range(draw.of((0, 1, 2), (2, 6, 2))))
    return (0, *rows) if draw.chance(0.02) else rows
