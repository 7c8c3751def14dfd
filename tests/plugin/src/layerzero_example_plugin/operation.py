"""An operation of a third party, with its function and a kernel: found through an entry point like a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import layerzero as lz
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Routed
from layerzero_example_plugin import EXAMPLE

DOUBLED = lz.Operation(
    schema=lz.OperationSchema(
        "example.doubled",
        (lz.TensorSchema("given", ("count", "width"), FLOATING),),
        (lz.TensorSchema("twice", ("count", "width"), FLOATING),),
        (),
        (lz.Axis("count", scales=True, live=True, apart=True), lz.Axis("width", scales=True)),
    ),
    summary="Twice as much",
    reference=lambda given: given * 2,
    fake=torch.empty_like,
    cases=(lz.Case("small", {"count": 3, "width": 8}), lz.Case("wide", {"count": 2, "width": 512})),
    tolerance={dtype: lz.Tolerance(0.0, 0.0) for dtype in FLOATING},
    tolerance_reason="doubling is exact",
)


def example_doubled(given: Tensor) -> Tensor:
    """Give twice as much. Shapes: given (N, M), result (N, M)."""
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    problems = DOUBLED.schema.validate(**arguments)
    if problems:
        raise lz.InvalidCallError("example_doubled", problems)
    return Routed(DOUBLED, arguments)


def _load(facts: lz.Facts) -> Callable[..., Any]:
    return lambda given: given + given


OPERATIONS = (DOUBLED,)
FUNCTIONS = (lz.Function("example_doubled", example_doubled, _route, OPERATIONS),)
KERNELS = (lz.Kernel(id="example.doubled", operations=("example.doubled",), backend=EXAMPLE, load=_load, priority=60),)
