"""The route of a product with a weight that has a format, and random calls of it."""

from __future__ import annotations

from typing import Any

import torch

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError, refuse
from layerzero.core.operation import Operation
from layerzero.core.reasons import ReasonCode
from layerzero.ops.draw import Draw
from layerzero.ops.linear.route import leading
from layerzero.ops.linear.weight_formats import FORMATTED, packed_of, random_weight
from layerzero.ops.quantize.nearest import instead
from layerzero.ops.quantize.schemes import SCHEMES, format_problems, scheme_of
from layerzero.ops.quantize.weight_format import ARGUMENTS, WeightFormat, fields_of


def routed_operation(arguments: dict[str, Any]) -> Operation:
    """The operation of a call with a format, whose arguments fit it. Raises: InvalidCallError for any other call."""
    try:
        of = WeightFormat.of(arguments["weight_format"])
    except InvalidCallError as error:
        raise InvalidCallError("quantized_linear", error.problems) from None
    if problems := format_problems(of):
        problems[-1] += f"; {instead(of)}"
        raise InvalidCallError("quantized_linear", problems, ReasonCode.QUANT_FORMAT_UNSUPPORTED)
    activations, name = arguments.pop("activations"), scheme_of(of).operation
    if activations is not None and (activations != "int8" or f"{name}.int8" not in FORMATTED):
        wanted = "None or 'int8'" if f"{name}.int8" in FORMATTED else "None"
        problems.append(f"activations: wanted {wanted} with weight_format={str(of)!r}, got {told(activations)}")
    refuse("quantized_linear", problems)
    found = FORMATTED[name if activations is None else f"{name}.int8"]
    problems = found.schema.validate(**arguments)
    if not problems:
        given, inputs = fields_of(arguments), arguments["input"].shape[-1]
        wrong = scheme_of(of).field_problems(of, given, inputs)
        problems = [_as_argument(each) for each in wrong]
        outputs, bias = scheme_of(of).outputs(of, tuple(given.data.shape), inputs), arguments["bias"]
        if not wrong and bias is not None and bias.shape != (outputs,):
            problems.append(f"bias: wanted shape {(outputs,)}, got {tuple(bias.shape)}")
    refuse("quantized_linear", problems)
    arguments["weight_format"] = str(of)
    return found


def _as_argument(problem: str) -> str:
    """A field's problem by the name of its argument."""
    name, colon, rest = problem.partition(":")
    return f"{ARGUMENTS.get(name, name)}{colon}{rest}"


def draw_formatted(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
    """Draw a call with a format of every scheme."""
    of, outputs, inputs = SCHEMES[draw.of(tuple(SCHEMES))].drawn(draw)
    arguments: dict[str, Any] = {
        "input": draw.laid_out(draw.normal((*leading(draw), inputs), dtype)),
        "weight_format": str(of),
        **random_weight(of, outputs, inputs, draw.device, draw.data),
    }
    for name in ("weight", "weight_scale", "weight_zero"):
        given = arguments.get(name)
        if given is not None and not (given.is_floating_point() and given.itemsize == 1):  # torch flips no float8
            arguments[name] = draw.laid_out(given, expand=False)
    if f"{scheme_of(of).operation}.int8" in FORMATTED and draw.chance(0.3):
        arguments["activations"] = "int8"
    if draw.chance(0.4):
        arguments["bias"] = draw.laid_out(draw.normal((outputs,), dtype))
    draw.poison(arguments, ("input",))
    if draw.chance(0.1):
        arguments["out_dtype"] = torch.promote_types(dtype, torch.float32)
    if draw.chance(0.3):
        arguments["packed"] = packed_of(arguments)
    return arguments
