"""The signatures of sampling's functions, with what users read of them; the engine makes the callables.

Those that draw differ in what they keep. Each is written once here, as what it keeps and the arguments that say so, and
made for logits and for probabilities.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch  # noqa: F401  # annotations name it
from torch import Tensor

Signature = Callable[..., Tensor]


class _Argument(NamedTuple):
    """An argument: its name, its annotation, and the lines that users read of it, none where another tells of it."""

    name: str
    annotation: str
    text: str = ""


class _Kept(NamedTuple):
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
    "categorical": _Kept("a place of each row by its probability"),
    "topk": _Kept("a place of each row among the top_k likeliest", _TIES, (_TOP_K,), "arXiv:1805.04833"),
    "topp": _Kept(
        "a place of each row among the likeliest that have the share top_p together",
        "A place is kept if those that are likelier have less than top_p together: at least one, and all equals of "
        "the last.",
        (_share("top_p", "", _LIKELIEST),),
        "arXiv:1904.09751",
    ),
    "minp": _Kept(
        "a place of each row among those at least min_p times as likely as the likeliest",
        "",
        (_share("min_p", " of the likeliest place's probability", "all, 1 and more the likeliest place"),),
        "arXiv:2407.01082",
    ),
    "topk_topp": _Kept(
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


def drawing(kind: str, source: str) -> Signature:
    """The signature of the function that draws from ``logits`` or ``probs``, by the kind of its operation."""
    kept = _KEPT[kind]
    beside = (*_TEMPERATURE, *_RANDOM) if source == "logits" else _RANDOM
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


def greedy(logits: Tensor) -> Tensor:
    """Pick the place of the largest logit of each row, the first of equals; that of the first NaN where there is one.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; returns int64.
    Raises: InvalidCallError for other dtypes, and where there is no place.
    """
    raise AssertionError("the signature only; the engine makes the callable")
