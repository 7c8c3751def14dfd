"""Two products with an activation between them, as one call: mlp.fused, and gated, its weights apart or joined.

mlp.fused          down(activation(up x))
mlp.fused.gated    down(activation(gate x) * up x)
mlp.fused.joined   the same with the gate's rows before up's in one weight
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param
from layerzero.core.judge import Elementwise
from layerzero.core.operation import Case, Operation, Random, Tolerance, Work
from layerzero.ops.activation.formulas import FORMULAS
from layerzero.ops.declaration import operation, tensor, wide
from layerzero.ops.linear import stock
from layerzero.ops.linear.declare import ALIASES, AXES, mlp_sweep, scaled
from layerzero.ops.linear.packed import PackedWeight, packed_param

TOLERANCE = {
    torch.float64: Tolerance(1e-5, 1e-5),
    torch.float32: Tolerance(2e-5, 2e-5),
    torch.float16: Tolerance(1e-3, 6e-3),
    torch.bfloat16: Tolerance(1e-2, 3e-2),
}
TOLERANCE_REASON = (
    "kernels round what lies between the products up to three times (both products, the activation), by up to 2^-9 of "
    "a value in bfloat16 and 2^-12 in float16; the second product adds that up as it adds up the values, so that a "
    "small sum of large values is off by a part of their size: two of 688,500 random calls were off by 0.043 where "
    "0.26 was right (bfloat16) and by 0.0093 of 0.72 (float16; Intel Xeon with AMX, torch 2.11, 2026-11-22)"
)

WEIGHTS = ("up_weight", "down_weight", "gate_weight")
PACKED_OF = {f"packed_{name.removesuffix('_weight')}": name for name in WEIGHTS}
"""The packed weights of a call, and what each is made of."""

FEW = 64
"""Sums of fewer products are drawn as small as those of so many: one large number would decide a whole row of a gate,
and what lies between the products would be far from 1."""

_ACTIVATION = Param("activation", str, "silu", example="gelu", works=False)


def _wide_of(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def mlp(
    input: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None = None,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate_bias: Tensor | None = None,
    activation: str = "silu",
    packed_up: PackedWeight | None = None,
    packed_down: PackedWeight | None = None,
    packed_gate: PackedWeight | None = None,
) -> Tensor:
    """Multiply with a weight, activate, multiply with another: the feed-forward block of a model, gated or plain.

    ``down(activation(up x))``; with a gate ``down(activation(gate x) * up x)``. An ``up_weight`` with twice the rows
    that ``down_weight`` reads holds the gate in its first half, as ``torch.cat((gate, up))``.

    Shapes: input (*, K), up_weight and gate_weight (I, K), or up_weight (2 I, K) alone; down_weight (N, I); biases as
        many as their weight has rows → (*, N)
    Dtype: floating, the same for all; sums are in float32; returns input.dtype.
    Args:
        activation: ``"relu"``, ``"gelu"`` (by erf), ``"gelu_tanh"``, ``"silu"`` or ``"relu2"``.
        packed_up, packed_down, packed_gate: the :class:`layerzero.PackedWeight` of each weight; kernels that want
            weights in another order want all of them. They change no result, and have no effect in compiled code.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, for a gate's bias without a gate, and for a
        packed weight of another tensor or of one that was written into since.
    Source: arXiv:2002.05202.
    """
    dtype = wide(input.dtype)
    up, gate = _between(input, up_weight, down_weight, gate_weight, up_bias, gate_bias)
    formula = FORMULAS[activation]
    through = formula(up) if gate is None else formula(gate) * up
    return functional.linear(through, down_weight.to(dtype), _wide_of(down_bias, dtype)).to(input.dtype)


def _between(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor | None,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """What the first product gives: up's part and the gate's, None where there is no gate."""
    dtype = wide(x.dtype)
    through = functional.linear(x.to(dtype), up_weight.to(dtype), _wide_of(up_bias, dtype))
    inner = down_weight.shape[1]
    if gate_weight is not None:
        return through, functional.linear(x.to(dtype), gate_weight.to(dtype), _wide_of(gate_bias, dtype))
    if up_weight.shape[0] == inner:
        return through, None
    return through[..., inner:], through[..., :inner]


def _summed(arguments: Mapping[str, Any]) -> Tensor:
    """The deviation of a result if each of the values between the products is off by its own size.

    An activation is at most as large as what it is of, and what lies between is rounded before it as well; but for
    relu2, which is as large as the square and whose relative error is twice that of what it is of.
    """
    down = arguments["down_weight"]
    of = (arguments.get(name) for name in ("gate_weight", "up_bias", "gate_bias"))
    up, gate = _between(arguments["input"], arguments["up_weight"], down, *of)
    activated = up if gate is None else gate
    if arguments.get("activation") == "relu2":
        activated = 2.0 * activated.square()
    through = activated if gate is None else activated * up
    return functional.linear(through.square(), down.square()).sqrt()


def _work(products: int, facts: Mapping[str, Any]) -> Work:
    """So many products into the inner features, and one out of them; every weight once."""
    rows, inputs, inner = facts["rows"], facts["in_features"], facts["inner_features"]
    weights = products * inputs * inner + inner * facts["out_features"]
    tensors = weights + rows * (inputs + facts["out_features"])
    return Work(2.0 * rows * weights, float(tensors * facts["dtype"].itemsize))


def _operation(name: str, summary: str, *, gated: bool = False, joined: bool = False) -> Operation:
    up_axis = "joined_features" if joined else "inner_features"
    shapes = {
        "up_weight": (up_axis, "in_features"),
        "down_weight": ("out_features", "inner_features"),
        **({"gate_weight": ("inner_features", "in_features")} if gated else {}),
    }
    biases = {f"{each.removesuffix('_weight')}_bias": shape[0] for each, shape in shapes.items()}

    def examples(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Tensor]:
        sizes = {name: (case.sizes[rows], case.sizes[columns]) for name, (rows, columns) in shapes.items()}
        return {name: scaled(name, size, dtype, device, generator, FEW) for name, size in sizes.items()}

    def case(name: str, rows: int, inputs: int, inner: int, *given: str, **params: object) -> Case:
        sizes = {"rows": rows, "in_features": inputs, "inner_features": inner, "out_features": inputs}
        return Case(name, sizes | ({"joined_features": 2 * inner} if joined else {}), params, given)

    return operation(
        name,
        summary,
        mlp,
        inputs=(
            "input: ... in_features",
            *(tensor(f"{each}: {' '.join(axes)}", resident=True) for each, axes in shapes.items()),
            *(tensor(f"{each}: {axis}", required=False) for each, axis in biases.items()),
        ),
        outputs=("output: ... out_features",),
        params=(_ACTIVATION, *(packed_param(each, of) for each, of in PACKED_OF.items() if of in shapes)),
        axes=(
            *AXES,
            Axis("inner_features", scales=True),
            *((Axis("joined_features", scales=True, implied=True),) if joined else ()),
        ),
        cases=(
            case("small", 33, 96, 64, *biases),
            case("small_gelu", 33, 96, 64, activation="gelu"),
            case("decode", 1, 1024, 2816),
            case("prefill", 256, 1024, 2816),
        ),
        tolerance=TOLERANCE,
        tolerance_reason=TOLERANCE_REASON,
        judge=Elementwise(TOLERANCE, TOLERANCE_REASON, _summed),
        aliases=ALIASES,
        examples=examples,
        work=functools.partial(_work, 2 if gated or joined else 1),
        sweep=functools.partial(mlp_sweep, joined=joined),
        stock=stock.mlp,
    )


FUSED = _operation("mlp.fused", "Two products with an activation between them")
FUSED_GATED = _operation("mlp.fused.gated", "Two products with a gate between them", gated=True)
FUSED_JOINED = _operation(
    "mlp.fused.joined", "Two products with a gate between them, whose weights are one", joined=True
)
OPERATIONS = (FUSED, FUSED_GATED, FUSED_JOINED)
