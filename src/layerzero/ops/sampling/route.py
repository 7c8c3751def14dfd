"""The functions of sampling: signatures, the checks of a call, and the routes.

The engine makes the callables. Functions that draw differ in what they keep. Each is written once here, as what it
keeps and the arguments that say so, and made for logits and for probabilities.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch  # noqa: F401  # signatures name torch.Generator
from torch import Tensor

from layerzero.core.arguments import told
from layerzero.core.errors import refuse
from layerzero.core.operation import Function, Operation, Routed
from layerzero.ops.declaration import check_dense, given_twice
from layerzero.ops.sampling import declare, draw
from layerzero.ops.sampling.formulas import TEMPERATURES

Signature = Callable[..., Tensor]


class _Argument(NamedTuple):
    """An argument: its name, its annotation, and the lines that users read of it, none where another tells of it."""

    name: str
    annotation: str
    text: str = ""


class _KeptArguments(NamedTuple):
    """What a function keeps of a row: the end of its first sentence, more of it, its arguments, and where from."""

    summary: str
    more: str = ""
    arguments: tuple[_Argument, ...] = ()
    source: str = ""


_TIES = "A place is kept if fewer than top_k are likelier: places that tie with the last of them are kept, too."
_TOP_K = _Argument(
    "top_k",
    "int | Tensor | None",
    """\
        top_k: how many places, from 1; more than there are keep all. Or an int32 or int64 tensor (*) with a number for
            each row, where 0 and less is 1.""",
)


def _share(name: str, of_what: str, ends: str) -> _Argument:
    text = f"""\
        {name}: the share{of_what}, above 0 and up to 1. Or a float32 tensor (*) with a share
            for each row, where 0 and less keeps {ends}."""
    return _Argument(name, "float | Tensor | None", text)


_LIKELIEST = "the likeliest place, 1 and more all"

_KEPT = {
    "categorical": _KeptArguments(
        "a place of each row by its probability, among those that top_k, top_p and min_p keep",
        "What is None keeps all. Top-k comes first, then top-p of what the top_k likeliest have, then min-p. A batch\n"
        "    of requests is one call: each argument may be a tensor with a number for each row. With a seed for each\n"
        "    row a draw depends on its own row alone, wherever that is in whatever batch.",
    ),
    "topk": _KeptArguments("a place of each row among the top_k likeliest", _TIES, (_TOP_K,), "arXiv:1805.04833"),
    "topp": _KeptArguments(
        "a place of each row among the likeliest that have the share top_p together",
        "A place is kept if those that are likelier have less than top_p together: at least one, and all equals of "
        "the last.",
        (_share("top_p", "", _LIKELIEST),),
        "arXiv:1904.09751",
    ),
    "minp": _KeptArguments(
        "a place of each row among those at least min_p times as likely as the likeliest",
        "",
        (_share("min_p", " of the likeliest place's probability", "all, 1 and more the likeliest place"),),
        "arXiv:2407.01082",
    ),
    "topk_topp": _KeptArguments(
        "a place among the top_k likeliest, and of these among those that have the share top_p",
        "A place is kept if fewer than top_k are likelier, and if those that are likelier have less than the share\n"
        "    top_p of what such places have together: top-k first, then top-p of the rest, as engines do.",
        (_TOP_K, _share("top_p", " of what the top_k likeliest have", _LIKELIEST)),
        "arXiv:1805.04833, arXiv:1904.09751",
    ),
}

_TEMPERATURE = (
    _Argument(
        "temperature",
        "float | Tensor | None",
        """\
        temperature: what logits are divided by, from 1e-6; 1 if None. Or a float32 tensor (*) with one for each row,
            where 0 and less is 1e-6, so that the likeliest place comes.""",
    ),
)
_OF_ROWS = (
    _Argument(
        "top_k",
        "int | Tensor | None",
        """\
        top_k: how many places, from 1; more than there are keep all. In an int32 or int64 tensor 0 and less is 1.""",
    ),
    _Argument(
        "top_p",
        "float | Tensor | None",
        """\
        top_p: the share that the likeliest have together, above 0 and up to 1. In a float32 tensor 0 and less keeps the
            likeliest.""",
    ),
    _Argument(
        "min_p",
        "float | Tensor | None",
        """\
        min_p: the share of the likeliest place's probability, above 0 and up to 1. Of a float32 tensor 0 keeps all.""",
    ),
)
_SEEDS = _Argument(
    "seed",
    "int | Tensor | None",
    """\
        seed: gives the same ids wherever the same kernel runs the same call; from 0. Or an int64 tensor (*) with one
            for each row: each draw of a request wants another, such as ``request_seed * 2**32 + position``.""",
)
_RANDOM = (
    _Argument(
        "seed",
        "int | None",
        """\
        seed: gives the same ids wherever the same kernel runs the same call; from 0.""",
    ),
    _Argument(
        "generator",
        "torch.Generator | None",
        """\
        generator: on the same device, which goes on from call to call; torch's own of the device if both are None,
            which ``torch.manual_seed`` seeds.""",
    ),
)

_DTYPE = {
    "logits": "floating; computes in float32 or wider; returns int64.",
    "probs": "floating; each row adds up to 1 but for rounding; returns int64.",
}
_RAISES = """\
    Raises: InvalidCallError for what does not fit, and on a CPU for rows that nothing can be drawn of: NaN,
        {}. On a GPU, where looking means waiting, such a row gives some place."""
_UNDRAWABLE = {"logits": "+inf, -inf everywhere", "probs": "infinity, a number below 0, 0 everywhere"}


def _signature(kind: str, source: str) -> Signature:
    """The signature of the function that draws from ``logits`` or ``probs``, by the kind of its operation."""
    kept = _KEPT[kind]
    random = (_SEEDS, *_RANDOM[1:]) if kind == "categorical" else _RANDOM
    beside = (*(_OF_ROWS if kind == "categorical" else ()), *(_TEMPERATURE if source == "logits" else ()), *random)
    told = "\n".join(each.text for each in (*kept.arguments, *beside) if each.text)
    doc = [f"Draw {kept.summary}{'' if source == 'logits' else ', from probabilities'}.", ""]
    doc += [f"    {kept.more}", ""] if kept.more else []
    doc += [f"    Shapes: {source} (*, V) → (*), a place from 0 to V - 1", f"    Dtype: {_DTYPE[source]}"]
    doc += [
        "    Args:",
        told,
        _RAISES.format(_UNDRAWABLE[source]),
        *([f"    Source: {kept.source}."] if kept.source else []),
        "    ",
    ]
    name = "_".join(("sample", *((kind,) if kind != "categorical" else ()), *(("probs",) if source == "probs" else ())))
    return _function(name, _Argument(source, "Tensor"), kept.arguments, beside, "\n".join(doc))


def _function(
    name: str, first: _Argument, by_place: tuple[_Argument, ...], by_name: tuple[_Argument, ...], doc: str
) -> Signature:
    """A function that has a signature, and nothing that runs."""

    def signature(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("the signature only; the engine makes the callable")

    place, named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(first.name, place, annotation=first.annotation),
        *(inspect.Parameter(each.name, place, default=None, annotation=each.annotation) for each in by_place),
        *(inspect.Parameter(each.name, named, default=None, annotation=each.annotation) for each in by_name),
    ]
    signature.__name__ = signature.__qualname__ = name
    signature.__doc__ = doc
    signature.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": "Tensor"}
    signature.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what inspect looks for first
        parameters, return_annotation="Tensor"
    )
    return signature


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


def _pair(kind: str, operations: list[Operation]) -> list[Function]:
    """The function that draws from logits, and the one that draws from probabilities."""
    found = []
    for source, operation in zip(("logits", "probs"), operations, strict=True):
        signature, drawing = _signature(kind, source), draw.drawing(kind, source)
        name = signature.__name__
        own: tuple[Operation, ...] = (operation,)
        route = _route(name, operation)
        if kind == "categorical":
            place = ("logits", "probs").index(source)
            own = (operation, *(pair[place] for pair in (*list(_BY_KEPT.values())[1:], declare.FILTERED)))
            route = functools.partial(_route_any, name, place)
        renamed = {old: new for old, new in _RENAMED[kind].items() if source == "logits" or new != "temperature"}
        found.append(Function(name, signature, route, own, draw=drawing, weight=1, renamed=renamed))
    return found


FUNCTIONS = (
    *_pair("topk", declare.TOPK),
    *_pair("topp", declare.TOPP),
    *_pair("minp", declare.MINP),
    *_pair("topk_topp", declare.TOPK_TOPP),
    *_pair("categorical", declare.CATEGORICAL),
    Function("greedy", declare.greedy, _route("greedy", declare.GREEDY), (declare.GREEDY,), draw=draw.greedy, weight=1),
)
