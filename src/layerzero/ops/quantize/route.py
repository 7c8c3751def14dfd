"""``lz.quantize`` and ``lz.dequantize``: their signatures, the checks of a call, the routes, and random calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.dtypes import FLOATING, dtype_name, names_of
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.operation import Function, Routed
from layerzero.ops.declaration import check_dense
from layerzero.ops.draw import Draw
from layerzero.ops.quantize.declare import DEQUANTIZE, GRANULARITIES, QUANTIZE
from layerzero.ops.quantize.formats import FORMATS, NV, SCALED, SPELLINGS, Format, format_named

_BLOCKS = (1, 2, 3, 5, 8)


def random_quantize(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.quantize``."""
    of: Format = FORMATS[draw.of(tuple(FORMATS))]
    lead = draw.leading((0, 1, 2), (2, 6, 2))
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
    return draw.poison(arguments, ("input",))


def _granularity(draw: Draw, shape: tuple[int, ...], size: int, spread: float) -> dict[str, Any]:
    *lead, width = shape
    if draw.chance(0.5):
        shapes = ((), (1,), (*lead, 1), (width,), (*lead, width // size))
        scale = (draw.uniform(draw.of(shapes), torch.float32) + 0.1) * 0.04 * spread
        return {"scale": draw.laid_out(scale)}
    per = draw.of(("tensor", "row", "block"))
    return {"per": per, **({"block_size": size} if per == "block" else {})}


def random_dequantize(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call of ``lz.dequantize``."""
    arguments = random_quantize(draw, torch.float32)
    name = arguments["dtype"]
    given = {each: value for each, value in arguments.items() if each not in ("input", "dtype")}
    quantized, scale = QUANTIZE[name].reference(arguments["input"].nan_to_num(1.0, 1.0, 1.0), **given)
    back: dict[str, Any] = {"quantized": quantized, "scale": scale, "dtype": name}
    back["quantized"] = draw.laid_out(quantized) if quantized.dtype in (torch.int8, torch.uint8) else quantized
    if "tensor_scale" in arguments:
        back["tensor_scale"] = arguments["tensor_scale"]
    back |= draw.maybe(0.7, out_dtype=lambda: draw.of((torch.float32, torch.bfloat16, torch.float16, torch.float64)))
    return back


def quantize(
    input: Tensor,
    dtype: str,
    scale: Tensor | None = None,
    *,
    per: str = "tensor",
    block_size: int | None = None,
    tensor_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Divide numbers by scales and round them to a narrow format, to even where two are as near.

    Shapes: input (*, W) → (*, W), or (*, W / 2) of four bits and (*, 3 W / 4) of six; scales as below
    Dtype: input floating; int8, float8 or, of four and six bits, uint8 with the first number in the lowest bits; scales
        float32, float8_e8m0fnu of the MX formats, float8_e4m3fn of nvfp4.
    Args:
        dtype: ``"int8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``. Formats with a power of two for each 32 numbers:
            ``"mxfp8_e4m3"``, ``"mxfp8_e5m2"``, ``"mxfp6_e2m3"``, ``"mxfp6_e3m2"`` and ``"mxfp4"``. ``"nvfp4"`` has an
            e4m3 scale for each 16.
        scale: what to divide by, for int8 and fp8, in float32 above 0. () or (1,) is for all numbers, (*, 1) for each
            row, (W,) for each column, (*, W / b) for each block of b. None computes it: the largest absolute value over
            the format's largest number. Zeros alone give 1 in int8; float8 has at least 1 / (512 * largest), as vLLM.
        per: what has a scale of its own that is computed: ``"tensor"``, ``"row"`` or ``"block"``.
        block_size: how many numbers of a row share a scale, with ``per="block"``.
        tensor_scale: of nvfp4, () or (1,) in float32: what the blocks' scales are multiples of, such as the largest
            absolute value / 2688; 1 if None.
    Returns: the numbers, and their scales: (), (*, 1) or (*, W / block_size); those given as a copy.
    What lies beyond the range of a given scale becomes the largest number (int8: -128 to 127). Infinity makes a
    computed scale infinite (NaN in the MX formats and nvfp4), so that what shares it reads as NaN. NaN stays NaN in
    float8; of a scale's numbers in int8 and fewer bits, where one is NaN, nothing is said. Debug mode refuses what is
    not finite in int8 and fewer bits. Nothing flows back: the results need no gradients.
    Raises: InvalidCallError for an unknown format, for scales whose shape, dtype or device does not fit, and for rows
        that blocks do not divide; in debug mode for scales that are not above 0.
    Source: OCP Microscaling Formats 1.0; arXiv:2209.05433 for float8.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def dequantize(
    quantized: Tensor,
    scale: Tensor,
    *,
    dtype: str,
    out_dtype: torch.dtype | None = None,
    tensor_scale: Tensor | None = None,
) -> Tensor:
    """Multiply narrow numbers with their scales: what :func:`layerzero.quantize` made, as floating numbers.

    Shapes: quantized (*, W), or (*, W / 2) of four bits and (*, 3 W / 4) of six; scale as :func:`layerzero.quantize`
        takes or returns it → (*, W)
    Dtype: quantized and scale those of the format; computes in float32, rounds once, to out_dtype.
    Args:
        dtype: the format, as of :func:`layerzero.quantize`.
        out_dtype: a floating dtype; float32 if None.
        tensor_scale: of nvfp4, that which it was quantized with.
    Raises: InvalidCallError for an unknown format, and for tensors that are not of it.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _format(function: str, arguments: dict[str, Any]) -> Format:
    check_dense(function, arguments)
    name = arguments.pop("dtype")
    if isinstance(name, str) and (name in FORMATS or name in SPELLINGS):
        return format_named(name)
    known = ", ".join((*FORMATS, *SPELLINGS))
    hint = "; pass the name as text" if isinstance(name, torch.dtype) else ""
    raise InvalidCallError(function, [f"dtype: wanted one of {known}; got {told(name)}{hint}"])


def _strangers(arguments: dict[str, Any], of: Format, names: dict[str, object]) -> list[str]:
    """Arguments that a format has no place for, which leave the call."""
    problems = []
    for name, neutral in names.items():
        value = arguments.pop(name)
        if value is not neutral and value != neutral:
            problems.append(f"{name}: wanted {neutral!r} with {of.name}, which takes no other, got one")
    return problems


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    of = _format("quantize", arguments)
    operation = QUANTIZE[of.name]
    problems = [] if of in NV else _strangers(arguments, of, {"tensor_scale": None})
    if of not in SCALED:
        problems += _strangers(arguments, of, {"scale": None, "per": "tensor", "block_size": None})
    problems += operation.schema.validate(**arguments)
    if not problems:
        problems += _size_problems(arguments, of)
    refuse("quantize", problems)
    whole = arguments.get("scale") is None or arguments["scale"].ndim < 2
    return Routed(operation, arguments, varies=("...",) if whole else ())


def _size_problems(arguments: dict[str, Any], of: Format) -> list[str]:
    shape = tuple(arguments["input"].shape)
    if shape[-1] == 0:
        return [f"input: wanted numbers in its rows, got {shape}"]
    if of in SCALED:
        problems = _granularity_problems(arguments, shape)
        return problems or _scale_problems("scale", arguments["scale"], shape)
    if shape[-1] % of.block:
        return [f"input: wanted rows of a multiple of {of.block} numbers, the block of {of.name}, got {shape}"]
    return _one_number("tensor_scale", arguments.get("tensor_scale"))


def _granularity_problems(arguments: dict[str, Any], shape: tuple[int, ...]) -> list[str]:
    per, size = arguments["per"], arguments["block_size"]
    if per not in GRANULARITIES:
        return [f"per: wanted {', '.join(GRANULARITIES)}, got {told(per)}"]
    if arguments["scale"] is not None and (per != "tensor" or size is not None):
        return ["per: wanted nothing with scale, whose shape says what it is for, got per or block_size"]
    if per != "block":
        return [] if size is None else [f"block_size: wanted None with per={per!r}, got {told(size)}"]
    if type(size) is not int or not 1 <= size <= shape[-1] or shape[-1] % size:
        return [f"block_size: wanted a divisor of the {shape[-1]} numbers of a row, got {told(size)}"]
    return []


def _scale_problems(name: str, scale: Tensor | None, shape: tuple[int, ...]) -> list[str]:
    if scale is None:
        return []
    *lead, width = shape
    got = tuple(scale.shape)
    blocks = len(got) == len(shape) and got[:-1] == tuple(lead) and got[-1] > 0 and width % got[-1] == 0
    if got in ((), (1,), (width,)) or blocks:
        return []
    rows = tuple(lead)
    wanted = f"(), (1,), {(*rows, 1)} for rows, ({width},) for columns or {(*rows, 'n')} for n blocks"
    return [f"{name}: wanted shape {wanted}, got {got}"]


def _one_number(name: str, tensor: Tensor | None) -> list[str]:
    if tensor is None or tuple(tensor.shape) in ((), (1,)):
        return []
    return [f"{name}: wanted shape () or (1,), got {tuple(tensor.shape)}"]


def _route_back(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    of = _format("dequantize", arguments)
    operation = DEQUANTIZE[of.name]
    problems = [] if of in NV else _strangers(arguments, of, {"tensor_scale": None})
    out_dtype = arguments["out_dtype"] = torch.float32 if arguments["out_dtype"] is None else arguments["out_dtype"]
    problems += operation.schema.validate(**arguments)
    if isinstance(out_dtype, torch.dtype) and out_dtype not in FLOATING:
        problems.append(f"out_dtype: wanted {names_of(FLOATING)}, got {dtype_name(out_dtype)}")
    if not problems:
        shape, scale = tuple(arguments["quantized"].shape), arguments["scale"]
        if of in SCALED:
            problems += _scale_problems("scale", scale, shape)
        else:
            width = shape[-1] * 8 // of.bits
            wanted = (*shape[:-1], width // of.block)
            if width % of.block or tuple(scale.shape) != wanted:
                told_shape = f"{wanted}, one for each {of.block} numbers"
                problems.append(f"scale: wanted shape {told_shape}, got {tuple(scale.shape)} for {width} a row")
            problems += _one_number("tensor_scale", arguments.get("tensor_scale"))
    refuse("dequantize", problems)
    return Routed(operation, arguments, varies=("...",) if of not in SCALED or arguments["scale"].ndim < 2 else ())


FUNCTIONS = (
    Function("quantize", quantize, _route, tuple(QUANTIZE.values()), random_quantize, 1),
    Function("dequantize", dequantize, _route_back, tuple(DEQUANTIZE.values()), random_dequantize, 1),
)
