"""The functions of sampling: the checks of a call, and the routes; their signatures stand in ``signatures``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import InvalidCallError
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.checks import check_dense
from layerzero.ops.sampling import declare, draw, signatures
from layerzero.ops.sampling.formulas import TEMPERATURES

_PAIRS = (("k", "row_k"), ("p", "row_p"), ("temperature", "row_temperature"))


def _route(name: str, operation: Operation) -> Callable[..., Routed]:
    source = operation.schema.inputs[0].name

    def route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
        check_dense(name, arguments)
        told = _value_problems(arguments)
        problems = list(told.values())
        problems += [each for each in operation.schema.validate(**arguments) if each.partition(":")[0] not in told]
        if not problems:
            problems = _shape_problems(arguments, source)
        if problems:
            raise InvalidCallError(name, problems)
        return Routed(operation, arguments, varies=("...", "vocab"))

    return route


def _value_problems(arguments: dict[str, Any]) -> dict[str, str]:
    """What is wrong with numbers, by argument: said better than by bounds."""
    found = {}
    p: Any = arguments.get("p")
    temperature: Any = arguments.get("temperature")
    if _is_number(p) and not declare.LEAST <= p <= 1:
        found["p"] = f"p: wanted a share above 0 and up to 1, got {told(p)}"
    least, most = TEMPERATURES
    if _is_number(temperature) and not least <= temperature <= most:
        wanted = f"{least:g} to {most:g}; the likeliest place is what greedy picks"
        found["temperature"] = f"temperature: wanted {wanted}, got {told(temperature)}"
    for one, of_rows in _PAIRS:
        if isinstance(arguments.get(one), (Tensor, list, tuple)):
            hint = f"{of_rows}= takes one for each row"
            found[one] = f"{one}: wanted one number for all rows, got {told(arguments[one])}; {hint}"
            continue
        if one not in arguments or (arguments[one] is None) != (arguments[of_rows] is None):
            continue
        if arguments[one] is not None or one != "temperature":  # which divides by 1 where there is none
            got = "neither" if arguments[one] is None else "both"
            found[of_rows] = f"{one}: wanted {one} for all rows or {of_rows} for each, got {got}"
    if arguments.get("seed") is not None and arguments.get("generator") is not None:
        found["generator"] = "seed: wanted a seed or a generator, got both"
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shape_problems(arguments: dict[str, Any], source: str) -> list[str]:
    tensor: Tensor = arguments[source]
    shape = tuple(tensor.shape)
    problems = []
    if shape[-1] == 0:
        problems.append(f"{source}: wanted at least one place in the last axis, got {shape}")
    for _, name in _PAIRS:
        of_rows = arguments.get(name)
        if of_rows is not None and tuple(of_rows.shape) != shape[:-1]:
            problems.append(f"{name}: wanted shape {shape[:-1]}, a number for each row, got {tuple(of_rows.shape)}")
    generator = arguments.get("generator")
    if isinstance(generator, torch.Generator) and not declare.on_device(generator, tensor):
        problems.append(f"generator: wanted one on {tensor.device} like {source}, got one on {generator.device}")
    return problems


def _pair(kind: str, operations: list[Operation]) -> list[Function]:
    """The function that draws from logits, and the one that draws from probabilities."""
    found = []
    for source, operation in zip(("logits", "probs"), operations, strict=True):
        signature, drawing = signatures.drawing(kind, source), draw.drawing(kind, source)
        name = signature.__name__
        found.append(Function(name, signature, _route(name, operation), (operation,), draw=drawing, weight=1))
    return found


FUNCTIONS = (
    *_pair("categorical", declare.CATEGORICAL),
    *_pair("topk", declare.TOPK),
    *_pair("topp", declare.TOPP),
    *_pair("minp", declare.MINP),
    *_pair("topk_topp", declare.TOPK_TOPP),
    Function(
        "greedy", signatures.greedy, _route("greedy", declare.GREEDY), (declare.GREEDY,), draw=draw.greedy, weight=1
    ),
)
