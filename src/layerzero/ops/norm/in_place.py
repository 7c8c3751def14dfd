"""norm.add_rms.inplace and ``lz.add_rms_norm_``: the sum over the residual, its norm over the input.

What serving frameworks call between two halves of a layer, where nobody reads either tensor again: libraries have it as
one kernel that moves four times the tensor, while a norm that leaves the input alone costs them a second launch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerzero.core.arguments import Param, TensorSchema
from layerzero.core.dtypes import FLOATING
from layerzero.core.operation import Function, Operation, Routed
from layerzero.core.schema import OperationSchema
from layerzero.ops.norm import declare, draw, stock


def add_rms_norm_inplace_reference(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
) -> None:
    """``norm.add_rms``, its result written over the input.

    Shapes, dtypes, units and source as of ``norm.add_rms``. Mutates input and residual; returns nothing.
    """
    input.copy_(declare.add_rms_norm_reference(input, residual, weight, eps=eps))


def _nothing(*_: object, **__: object) -> None:
    """Input and residual are written over."""


ADD_RMS_INPLACE = Operation(
    schema=OperationSchema(
        operation="norm.add_rms.inplace",
        inputs=(
            TensorSchema("input", ("...", "hidden"), FLOATING, mutated=True),
            TensorSchema("residual", ("...", "hidden"), FLOATING, mutated=True),
            TensorSchema("weight", ("hidden",), FLOATING),
        ),
        outputs=(),
        params=(Param("eps", float, 1e-6, example=0.1),),
        axes=declare.ADD_RMS.schema.axes,
    ),
    summary="Residual addition and root mean square normalisation, both written in place",
    reference=add_rms_norm_inplace_reference,
    fake=_nothing,
    cases=declare.ADD_RMS.cases,
    tolerance=declare.ADD_RMS.tolerance,
    tolerance_reason=declare.ADD_RMS.tolerance_reason,
    derive=declare.ADD_RMS.derive,
    derived=declare.ADD_RMS.derived,
    derived_from=declare.ADD_RMS.derived_from,
    work=declare.ADD_RMS.work,
    sweep=declare.ADD_RMS.sweep,
    stock=stock.add_rms_norm_,
)


def add_rms_norm_(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """Add the input to the residual in place, and write the sum, normalised by its root mean square, over the input.

    Shapes: input and residual (*, D), the same; weight (D,)
    Dtype: floating, the same for all; the sum is rounded to it, then normalised in float32.
    Units: eps in x^2.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for an input or residual that needs
        gradients as a leaf, that overlaps itself in memory, or that shares memory with the other or with the weight.
    Source: arXiv:1910.07467; vLLM's fused_add_rms_norm.
    """
    raise AssertionError("the signature only; the engine makes the callable")


def _route(arguments: dict[str, Any], default_layout: str | None) -> Routed:
    return declare.route_sum("add_rms_norm_", ADD_RMS_INPLACE, arguments, ("input", "residual"), ("weight",))


ADD_RMS_NORM_IN_PLACE = Function("add_rms_norm_", add_rms_norm_, _route, (ADD_RMS_INPLACE,), draw=draw.add_rms_norm_)
