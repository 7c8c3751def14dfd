"""Operations that nobody has, to see how results are judged that are no numbers near others: drawn, chosen, int8.

Registered as a third party does it, by the fixture below.
"""

from __future__ import annotations

import pytest
import torch

import layerzero as lz
from layerzero.core.dtypes import FLOATING
from layerzero.core.judge import Elementwise, Exact, Indices, reproducible
from layerzero.core.judges import Distribution
from layerzero.core.operation import Function, OpKind, Routed
from layerzero.engine.functions import CALLS
from layerzero.engine.registry import REGISTRY
from layerzero.ops import FUNCTIONS

INT64, INT8 = frozenset({torch.int64}), frozenset({torch.int8})
ROWS = lz.Axis("rows", scales=True, live=True, apart=True)
CASES = (lz.Case("small", {"rows": 8, "places": 16}), lz.Case("wide", {"rows": 3, "places": 64}))


def function(name, signature, operation):
    """A function that leads to one operation."""

    def route(arguments, default_layout):
        problems = operation.schema.validate(**arguments)
        least = arguments.get("count", 1) + arguments.get("skip", 0)
        if not problems and arguments[operation.schema.inputs[0].name].shape[-1] < least:
            problems = ["wanted as many places as are asked for"]
        if problems:
            raise lz.InvalidCallError(name, problems)
        return Routed(operation, arguments)

    return Function(name, signature, route, (operation,))


# draws


def weights_of(arguments):
    weights = arguments["weights"]
    return weights if arguments.get("sharpness") is None else weights ** arguments["sharpness"]


def draw_reference(weights, *, sharpness=None, seed=None):
    generator = None if seed is None else torch.Generator(weights.device).manual_seed(seed)
    weights = weights_of({"weights": weights.float(), "sharpness": sharpness})
    return torch.multinomial(weights, 1, generator=generator).squeeze(-1)


def weights_examples(case, dtype, device, generator):
    shape = (case.sizes["rows"], case.sizes["places"])
    return {"weights": torch.randn(shape, generator=generator).softmax(-1).to(device, dtype)}


DRAW = lz.Operation(
    schema=lz.OperationSchema(
        "invented.draw",
        (lz.TensorSchema("weights", ("rows", "places"), FLOATING),),
        (lz.TensorSchema("place", ("rows",), INT64),),
        (
            lz.Param("sharpness", float, None, lz.Role.PASSED, example=3.0),
            lz.Param("seed", int, None, lz.Role.PASSED, seeds=True),
        ),
        (ROWS, lz.Axis("places", scales=True)),
    ),
    summary="Draw a place by its weight",
    reference=draw_reference,
    fake=lambda weights, **_: weights.new_empty(weights.shape[:1], dtype=torch.int64),
    cases=CASES,
    judge=Distribution(weights_of, "a place comes as often as its weight says"),
    properties=(reproducible("seed", 1, 2),),
    kind=OpKind.SAMPLING,
    examples=weights_examples,
)


def invented_draw(weights: torch.Tensor, sharpness: float | None = None, seed: int | None = None) -> torch.Tensor:
    """Draw."""


# choices


def choose_reference(scores, *, count, skip):
    return scores.topk(count + skip).indices[:, skip:]


CHOOSE = lz.Operation(
    schema=lz.OperationSchema(
        "invented.choose",
        (lz.TensorSchema("scores", ("rows", "places"), FLOATING),),
        (lz.TensorSchema("chosen", ("rows", "count"), INT64),),
        (lz.Param("count", int, 1, example=3), lz.Param("skip", int, 0)),
        (ROWS, lz.Axis("places", scales=True)),
    ),
    summary="The best places",
    reference=choose_reference,
    fake=lambda scores, *, count, skip: scores.new_empty((len(scores), count), dtype=torch.int64),
    cases=CASES,
    judge={"chosen": Indices(lambda arguments: arguments["scores"], "whichever of equal scores comes first")},
)


def invented_choose(scores: torch.Tensor, count: int = 1, skip: int = 0) -> torch.Tensor:
    """Choose."""


# int8


def product_reference(left, right):
    return left.to(torch.float64) @ right.to(torch.float64).T


PRODUCT = lz.Operation(
    schema=lz.OperationSchema(
        "invented.product",
        (lz.TensorSchema("left", ("rows", "places"), INT8), lz.TensorSchema("right", ("columns", "places"), INT8)),
        (lz.TensorSchema("result", ("rows", "columns"), frozenset({torch.float32})),),
        (),
        (ROWS, lz.Axis("places", scales=True), lz.Axis("columns", scales=True)),
    ),
    summary="A product of int8 matrices",
    reference=lambda left, right: product_reference(left, right).float(),
    fake=lambda left, right: left.new_empty((len(left), len(right)), dtype=torch.float32),
    cases=tuple(lz.Case(each.name, {**each.sizes, "columns": 32}) for each in CASES),
    judge=Elementwise({torch.int8: lz.Tolerance(1e-6, 1e-6)}, "sums of products of integers, rounded once"),
)


def invented_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply."""


# what nobody can judge

UNSAID = lz.Operation(
    schema=lz.OperationSchema(
        "invented.unsaid",
        (lz.TensorSchema("x", ("rows", "places")),),
        (lz.TensorSchema("y", ("rows", "places")),),
        (),
        (ROWS,),
    ),
    summary="It names no dtype",
    reference=lambda x: x,
    fake=torch.empty_like,
    cases=CASES,
    judge=Exact("it moves numbers"),
)


def invented_unsaid(x: torch.Tensor) -> torch.Tensor:
    """Move."""


SIGNATURES = ((DRAW, invented_draw), (CHOOSE, invented_choose), (PRODUCT, invented_product), (UNSAID, invented_unsaid))
_calls = {}


@pytest.fixture(scope="module")
def invented_operations():
    """The operations are there for the tests of one file: others count what a user has."""
    for operation, signature in SIGNATURES:
        lz.register_operation(operation)
        name = signature.__name__
        if name in _calls:  # torch keeps the operator of a function for as long as the process lives
            FUNCTIONS[name], CALLS[name] = _calls[name]
        else:
            lz.register_function(function(name, signature, operation))
            _calls[name] = FUNCTIONS[name], CALLS[name]
    yield
    for operation, signature in SIGNATURES:
        FUNCTIONS.pop(signature.__name__)
        CALLS.pop(signature.__name__)
        with REGISTRY._change():
            known = REGISTRY._known
            rest = known.without(known.by_id[f"reference.{operation.name}"])
            rest.operations.pop(operation.name)
            rest.kernels.pop(operation.name)
            REGISTRY._known = rest._replace(operations=dict(rest.operations))
