"""The functions that draw: the checks of a call, and the routes. Each draws from logits and from probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import refuse
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.declaration import check_dense, given_twice
from layerzero.ops.sampling import declare, draw, signatures
from layerzero.ops.sampling.formulas import TEMPERATURES

_OF_TEMPERATURE = {"row_temperature": "temperature"}
_OF_TOP_K, _OF_TOP_P = {"k": "top_k", "row_k": "top_k"}, {"p": "top_p", "row_p": "top_p"}
_RENAMED = {
    "categorical": _OF_TEMPERATURE,
    "topk": _OF_TEMPERATURE | _OF_TOP_K,
    "topp": _OF_TEMPERATURE | _OF_TOP_P,
    "minp": _OF_TEMPERATURE | {"p": "min_p", "row_p": "min_p"},
    "topk_topp": _OF_TEMPERATURE | _OF_TOP_K | _OF_TOP_P,
}
_NUMBERS = ("top_k", "top_p", "min_p", "temperature")


_BY_KEPT = {
    (): declare.CATEGORICAL,
    ("top_k",): declare.TOPK,
    ("top_p",): declare.TOPP,
    ("min_p",): declare.MINP,
    ("top_k", "top_p"): declare.TOPK_TOPP,
}
"""What draws by a few of the three; all else is one operation, which has a seed for each row as well."""


def _route_any(name: str, place: int, arguments: dict[str, Any], default_layout: str | None) -> Routed:
    """The route of ``lz.sample`` and of ``lz.sample_probs``, which are the numbers 0 and 1 of each pair."""
    kept = [each for each in _NUMBERS[:3] if (arguments[each] is not None or arguments[f"{each}_by_row"] is not None)]
    pair = declare.FILTERED if arguments["seed_by_row"] is not None else _BY_KEPT.get(tuple(kept), declare.FILTERED)
    operation = pair[place]
    problems = given_twice(arguments, *_NUMBERS[:3])
    if arguments["seed_by_row"] is not None and arguments["generator"] is not None:
        problems.append("seed: wanted a seed or a generator, got both")
    else:
        problems += given_twice(arguments, "seed")
    refuse(name, problems)
    return _route(name, operation)({each: arguments[each] for each in operation.schema.arguments}, default_layout)


def _route(name: str, operation: Operation) -> Callable[..., Routed]:
    source = operation.schema.inputs[0].name
    optional = ("temperature",) if operation not in declare.FILTERED else _NUMBERS

    def route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
        check_dense(name, arguments)
        told = _value_problems(arguments, optional)
        problems = list(told.values())
        problems += [each for each in operation.schema.validate(**arguments) if each.partition(":")[0] not in told]
        if not problems:
            problems = _shape_problems(arguments, source)
        refuse(name, problems)
        return Routed(operation, arguments, varies=("...", "vocab"))

    return route


def _value_problems(arguments: dict[str, Any], optional: tuple[str, ...]) -> dict[str, str]:
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
        if value is None and by_row is None and name in optional:
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
    shape, problems = tuple(arguments[source].shape), []
    if shape[-1] == 0:
        problems.append(f"{source}: wanted at least one place in the last axis, got {shape}")
    for name in (*_NUMBERS, "seed"):
        by_row = arguments.get(f"{name}_by_row")
        if by_row is not None and tuple(by_row.shape) != shape[:-1]:
            problems.append(f"{name}: wanted shape {shape[:-1]}, a number for each row, got {tuple(by_row.shape)}")
    return problems + declare.generator_problems(arguments, source)


def _pair(kind: str, of: tuple[Callable[..., Tensor], ...], operations: list[Operation]) -> list[Function]:
    """The function that draws from logits, and the one that draws from probabilities."""
    found = []
    for place, (source, signature, operation) in enumerate(zip(("logits", "probs"), of, operations, strict=True)):
        name = signature.__name__
        own: tuple[Operation, ...] = (operation,)
        route = _route(name, operation)
        if kind == "categorical":
            own = (operation, *(pair[place] for pair in (*list(_BY_KEPT.values())[1:], declare.FILTERED)))
            route = functools.partial(_route_any, name, place)
        renamed = {old: new for old, new in _RENAMED[kind].items() if source == "logits" or new != "temperature"}
        drawing = draw.drawing(kind, source)
        found.append(Function(name, signature, route, own, draw=drawing, weight=1, renamed=renamed))
    return found


FUNCTIONS = (
    *_pair("topk", (signatures.sample_topk, signatures.sample_topk_probs), declare.TOPK),
    *_pair("topp", (signatures.sample_topp, signatures.sample_topp_probs), declare.TOPP),
    *_pair("minp", (signatures.sample_minp, signatures.sample_minp_probs), declare.MINP),
    *_pair("topk_topp", (signatures.sample_topk_topp, signatures.sample_topk_topp_probs), declare.TOPK_TOPP),
    *_pair("categorical", (signatures.sample, signatures.sample_probs), declare.CATEGORICAL),
    Function("greedy", declare.greedy, _route("greedy", declare.GREEDY), (declare.GREEDY,), draw=draw.greedy, weight=1),
)
