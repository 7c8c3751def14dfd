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

_TEMPERATURE = {"row_temperature": "temperature"}
_TOP_K, _TOP_P = {"k": "top_k", "row_k": "top_k"}, {"p": "top_p", "row_p": "top_p"}
_RENAMED = {
    "categorical": _TEMPERATURE,
    "topk": _TEMPERATURE | _TOP_K,
    "topp": _TEMPERATURE | _TOP_P,
    "minp": _TEMPERATURE | {"p": "min_p", "row_p": "min_p"},
    "topk_topp": _TEMPERATURE | _TOP_K | _TOP_P,
}
_NUMBERS = ("top_k", "top_p", "min_p", "temperature")


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
    temperature: Any = arguments.get("temperature")
    for name in ("top_p", "min_p"):
        share: Any = arguments.get(name)
        if _is_number(share) and not declare.LEAST <= share <= 1:
            found[name] = f"{name}: wanted a share above 0 and up to 1, got {told(share)}"
    least, most = TEMPERATURES
    if _is_number(temperature) and not least <= temperature <= most:
        wanted = f"{least:g} to {most:g}; the likeliest place is what greedy picks"
        found["temperature"] = f"temperature: wanted {wanted}, got {told(temperature)}"
    for name in _NUMBERS:
        if name not in arguments:
            continue
        value, by_row = arguments[name], arguments[f"{name}_by_row"]
        if value is None and by_row is None and name == "temperature":  # which divides by 1 where there is none
            continue
        if by_row is None and not _is_number(value):
            found[name] = f"{name}: wanted a number or a tensor with one for each row, got {told(value)}"
        elif by_row is not None and value is not None:
            found[name] = f"{name}: wanted a number or a tensor with one for each row, got both"
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
    for name in _NUMBERS:
        by_row = arguments.get(f"{name}_by_row")
        if by_row is not None and tuple(by_row.shape) != shape[:-1]:
            problems.append(f"{name}: wanted shape {shape[:-1]}, a number for each row, got {tuple(by_row.shape)}")
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
        route = _route(name, operation)
        renamed = {old: new for old, new in _RENAMED[kind].items() if source == "logits" or new != "temperature"}
        found.append(Function(name, signature, route, (operation,), draw=drawing, weight=1, renamed=renamed))
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
