"""Draws of a place of each row, a token id, and the likeliest place, with their named calls.

sampling.categorical    all places
sampling.topk           the k likeliest
sampling.topp           the likeliest that have the share p together
sampling.minp           those at least p times as likely as the likeliest
sampling.topk_topp      the k likeliest, and of their sum those that have the share p
sampling.filtered       any of top-k, top-p and min-p, in this order, each row by a seed of its own if it has one
sampling.greedy         the largest logit, the first of equals

Each of the first six draws from logits; with ``.probs`` after its name, from probabilities.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, Role, TensorSchema
from layerzero.core.handle import FOREIGN
from layerzero.core.judge import Exact, Property, reproducible
from layerzero.core.operation import Case, Operation, OpKind, Random, Work
from layerzero.ops.declaration import operation, tensor
from layerzero.ops.sampling import formulas, stock
from layerzero.ops.sampling.checks import check_drawable, check_signs, check_values, judge

_SHAPES = {
    "small": (33, 32),
    "odd": (5, 1003),
    "llama2_batch": (8, 32000),
    "llama3": (2, 128256),
    "llama3_decode": (1, 128256),
}

_ROWS = {"cuda": (1, 4, 16, 64, 256), "cpu": (1, 4, 16)}
_VOCAB = (32000, 128256, 151936)
_MAX_ELEMENTS = {"cuda": 2**26, "cpu": 2**21}

Examples = Callable[[Case, torch.dtype, torch.device, torch.Generator | None], dict[str, Any]]
Sweep = Callable[[str, Mapping[str, Sequence[int]]], Iterator[Case]]


def cases(small: Mapping[str, object], usual: Mapping[str, object]) -> tuple[Case, ...]:
    """Vocabularies from 32 to 128256; parameters that keep a few of 32 places, and usual ones."""
    return tuple(
        Case(name, {"rows": rows, "vocab": vocab}, small if name == "small" else usual)
        for name, (rows, vocab) in _SHAPES.items()
    )


def sweep(params: Mapping[str, object], device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Every size of a kind of device; of the wanted sizes."""
    kind = device if device in _ROWS else "cpu"
    if not narrow.keys() <= {"rows", "vocab"}:
        return
    for vocab in narrow.get("vocab", _VOCAB):
        for rows in narrow.get("rows", _ROWS[kind]):
            if narrow or rows * vocab <= _MAX_ELEMENTS[kind]:
                yield Case(f"{rows}x{vocab}", {"rows": rows, "vocab": vocab}, params)


def examples(
    name: str, usual: Mapping[str, object], case: Case, dtype: torch.dtype, device: torch.device, generator: Random
) -> dict[str, Any]:
    """Logits with a spread of 3, as those of models about have, or their probabilities; with usual numbers.

    A draw needs its top_k, top_p or min_p: a call described by the shape of its logits alone has usual ones.
    """
    shape = (case.sizes["rows"], case.sizes["vocab"])
    beside = {each: value for each, value in usual.items() if f"{each}_by_row" not in case.given}
    if device.type == "meta":
        return {name: torch.empty(shape, dtype=dtype, device=device), **beside}
    where = device if generator is None else generator.device
    logits = torch.randn(shape, generator=generator, device=where) * 3
    values = logits if name == "logits" else logits.softmax(-1)
    if "temperature_by_row" in case.given:
        beside["temperature_by_row"] = (torch.rand(shape[:1], generator=generator, device=where) + 0.5).to(device)
    return {name: values.to(device, dtype), **beside}


AXES = (Axis("rows", scales=True, live=True, apart=True, leading=True), Axis("vocab", scales=True))
IDS = frozenset({torch.int64})
COUNTS = frozenset({torch.int32, torch.int64})

LEAST = 2.0**-126
"""The smallest share: what float32 has above 0 without losing digits."""

MOST_SEED = 2**63 - 1


def on_device(generator: torch.Generator, tensor: Tensor) -> bool:
    """Whether a generator draws where a tensor lies."""
    mine, theirs = generator.device, tensor.device
    return theirs.type == "meta" or (mine.type == theirs.type and (mine.index or 0) == (theirs.index or 0))


def kind_of_generator(generator: torch.Generator, tensor: Tensor) -> str:
    """What a choice depends on of a generator: that it draws where the tensor lies."""
    return "given" if on_device(generator, tensor) else FOREIGN


def generator_for(seed: int | None, name: str) -> Callable[..., torch.Generator]:
    """A generator on the device of a call's tensor: of this seed, or of one that goes on from call to call."""

    def make(arguments: Mapping[str, Any], capturable: bool = False) -> torch.Generator:
        device = arguments[name].device
        if device.type == "meta":  # a call in question, which draws nothing
            device = torch.device("cpu")
        return torch.Generator(device).manual_seed(0 if seed is None else seed)

    return make


def generator_param(source: str) -> Param:
    """The generator that a call over this tensor draws from."""
    return Param(
        "generator",
        torch.Generator,
        None,
        Role.HANDLE,
        made_of=(source,),
        kind=kind_of_generator,
        make=generator_for(None, source),
        changes_result=True,
        seeds=True,
    )


def generator_problems(arguments: Mapping[str, Any], source: str) -> list[str]:
    """What is wrong with a generator that draws elsewhere than the tensor lies."""
    generator, tensor = arguments.get("generator"), arguments[source]
    if not isinstance(generator, torch.Generator) or on_device(generator, tensor):
        return []
    return [f"generator: wanted one on {tensor.device} like {source}, got one on {generator.device}"]


TEMPERATURE = Param("temperature", float, None, Role.PASSED, *formulas.TEMPERATURES, example=0.5)
SEED = Param("seed", int, None, Role.PASSED, 0, MOST_SEED, example=1, seeds=True)
TOP_K = Param("top_k", int, None, Role.PASSED, 1, 2**31 - 1, example=5)
TOP_P = Param("top_p", float, None, Role.PASSED, LEAST, 1.0, example=0.8)
MIN_P = Param("min_p", float, None, Role.PASSED, LEAST, 1.0, example=0.1)


def of_rows(param: Param) -> TensorSchema:
    """A number for each row, in place of one for all."""
    dtypes = frozenset({torch.float32}) if float in param.kinds else COUNTS
    name = f"{param.name}_by_row"
    return TensorSchema(name, ("...",), dtypes, required=False, same_dtype=False, given_as=param.name)


TEMPERATURE_BY_ROW = of_rows(TEMPERATURE)


def seeds_of_rows(axis: str = "...") -> TensorSchema:
    """A seed for each row, in place of one for all."""
    return TensorSchema("seed_by_row", (axis,), IDS, required=False, same_dtype=False, given_as="seed", seeds=True)


def seeds_for(number: int, source: str) -> Callable[..., Tensor]:
    """Seeds of the rows of a call's tensor."""

    def make(arguments: Mapping[str, Any]) -> Tensor:
        tensor = arguments[source]
        rows = tensor.shape[:1] if source == "target_probs" else tensor.shape[:-1]
        return torch.arange(math.prod(rows), device=tensor.device).view(rows) + number

    return make


def seeded(source: str, *, by_row: bool = True) -> tuple[Property, ...]:
    """What a seed, a generator in the same state and, where there may be such, seeds of rows do again."""
    found = reproducible("seed", 1, 2), reproducible("generator", *(generator_for(each, source) for each in (1, 2)))
    of_rows = (reproducible("seed_by_row", *(seeds_for(each, source) for each in (0, 2**40))),)
    return found + (of_rows if by_row else ())


def _work(facts: Mapping[str, Any]) -> Work:
    """Each number read once, an id a row written; a maximum, a difference, an exponential and a sum of each."""
    elements = facts["rows"] * facts["vocab"]
    return Work(4.0 * elements, float(elements * facts["dtype"].itemsize + 8 * facts["rows"]))


def _fake(tensor: Tensor, **_: object) -> Tensor:
    return tensor.new_empty(tensor.shape[:-1], dtype=torch.int64)


def _top_k_top_p(
    weights: Tensor,
    top_k: int | None = None,
    top_k_by_row: Tensor | None = None,
    top_p: float | None = None,
    top_p_by_row: Tensor | None = None,
) -> Tensor:
    first = formulas.keep_top_k(weights, top_k, top_k_by_row)
    return first & formulas.keep_top_p(weights * first, top_p, top_p_by_row)


def _reference(name: str, rule: formulas.Rule, *, logits: bool) -> Callable[..., Tensor]:
    def reference(
        tensor: Tensor,
        *,
        temperature: float | None = None,
        temperature_by_row: Tensor | None = None,
        seed: int | None = None,
        seed_by_row: Tensor | None = None,
        generator: torch.Generator | None = None,
        **given: Any,
    ) -> Tensor:
        weights = formulas.probabilities(tensor.detach(), temperature, temperature_by_row, logits=logits)
        if tensor.device.type == "cpu":
            check_signs(tensor, name)
            check_drawable(weights.sum(-1), tensor, name)
        weights = weights * rule(weights, **given)
        return formulas.drawn(weights, formulas.generator_of(seed, generator, tensor.device), seed_by_row)

    reference.__doc__ = "A place of each row. Dtype: computes in float32 or wider, shares in 2^-52; returns int64."
    return reference


def _operation(kind: str, summary: str, rule: formulas.Rule, *params: Param) -> list[Operation]:
    """One that draws from logits, and one that draws from probabilities."""
    inputs = tuple(of_rows(each) for each in params)
    if kind == "filtered":
        inputs += (seeds_of_rows(),)
    small: dict[str, object] = {each.name: each.example for each in params}
    usual: dict[str, object] = {each.name: _USUAL[kind, each.name] for each in params}

    def of(source: str) -> Operation:
        logits = source == "logits"
        name = f"sampling.{kind}" if logits else f"sampling.{kind}.probs"
        return operation(
            name,
            summary if logits else f"{summary}, from probabilities",
            _reference(name, rule, logits=logits),
            inputs=(f"{source}: ... vocab", *inputs, *((TEMPERATURE_BY_ROW,) if logits else ())),
            outputs=(tensor("ids: ...", IDS),),
            params=(*params, *((TEMPERATURE,) if logits else ()), SEED, generator_param(source)),
            axes=AXES,
            fake=_fake,
            cases=cases(small, usual),
            judge=judge(kind, logits=logits),
            properties=seeded(source, by_row=any(each.seeds for each in inputs)),
            kind=OpKind.SAMPLING,
            check_values=check_values,
            examples=functools.partial(examples, source, usual),
            work=_work,
            sweep=functools.partial(sweep, usual),
            stock=stock.stock(kind, logits=logits),
        )

    return [of("logits"), of("probs")]


_USUAL: Mapping[tuple[str, str], object] = {
    ("topk", "top_k"): 50,
    ("topp", "top_p"): 0.9,
    ("minp", "min_p"): 0.1,
    ("topk_topp", "top_k"): 50,
    ("topk_topp", "top_p"): 0.9,
    ("filtered", "top_k"): 50,
    ("filtered", "top_p"): 0.9,
    ("filtered", "min_p"): 0.05,
}

CATEGORICAL = _operation(
    "categorical", "A place by its probability", lambda weights: torch.ones_like(weights, dtype=torch.bool)
)
TOPK = _operation("topk", "A place of the k likeliest", formulas.keep_top_k, TOP_K)
TOPP = _operation("topp", "A place of the likeliest that have the share p", formulas.keep_top_p, TOP_P)
MINP = _operation("minp", "A place at least p times as likely as the likeliest", formulas.keep_min_p, MIN_P)
TOPK_TOPP = _operation("topk_topp", "A place of the likeliest p of the k likeliest", _top_k_top_p, TOP_K, TOP_P)


FILTERED = _operation("filtered", "A place by top-k, top-p and min-p", formulas.keep_all_three, TOP_K, TOP_P, MIN_P)


def greedy(logits: Tensor) -> Tensor:
    """Pick the place of the largest logit of each row, the first of equals; that of the first NaN where there is one.

    Shapes: logits (*, V) → (*), a place from 0 to V - 1
    Dtype: floating; returns int64.
    Raises: InvalidCallError for other dtypes, and where there is no place.
    """
    return logits.detach().argmax(-1)


GREEDY = operation(
    "sampling.greedy",
    "The place of the largest logit",
    greedy,
    inputs=("logits: ... vocab",),
    outputs=(tensor("ids: ...", IDS),),
    axes=AXES,
    cases=cases({}, {}),
    judge=Exact("it compares numbers and computes none; the first of equals is the one"),
    work=lambda facts: Work(_work(facts).flops / 4, _work(facts).bytes),
    sweep=functools.partial(sweep, {}),
    stock=stock.greedy,
)

OPERATIONS = (*CATEGORICAL, *TOPK, *TOPP, *MINP, *TOPK_TOPP, *FILTERED, GREEDY)
