"""Activations: of one tensor, and of a gate times what it lets through, apart or joined in one tensor.

activation.gelu    activation.silu    activation.relu2
mlp.silu_mul       mlp.gelu_mul       mlp.swiglu_oai                   gate and up are two tensors
mlp.silu_mul.joined mlp.gelu_mul.joined                                one tensor, gate before up
mlp.swiglu_oai.interleaved                                             one tensor, gate and up by turns
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.core.arguments import Axis, Param, told
from layerzero.core.operation import Case, Function, Operation
from layerzero.ops.activation import formulas
from layerzero.ops.declaration import NDIM, ROUNDED_TWICE, cases, function, moved, operation, same_shape, wide
from layerzero.ops.draw import Draw

_JUDGED: dict[str, Any] = {
    "tolerance": ROUNDED_TWICE,
    "tolerance_reason": "twice the rounding of the output: kernels may round the activation before they multiply",
    "fuses": True,
}

_ROWS = Axis("rows", scales=True, live=True, apart=True, leading=True)
_AXES = (_ROWS, Axis("features", scales=True, shared=True), NDIM)
_JOINED_AXES = (_ROWS, Axis("joined", scales=True), Axis("features", scales=True, implied=True), NDIM)
_SHAPES = {"small": (33, 96), "decode": (1, 14336), "minilm": (1024, 1536), "batch_decode": (64, 14336)}

APPROXIMATE = Param("approximate", str, "none", example="tanh")
ALPHA = Param("alpha", float, 1.702, example=1.25, works=False)
LIMIT = Param("limit", float, 7.0, example=0.75, works=False)


def halves(input: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up, one after the other."""
    middle = input.shape[-1] // 2
    return input[..., :middle], input[..., middle:]


def turns(input: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up by turns."""
    return input[..., ::2], input[..., 1::2]


Formula = Callable[..., Tensor]
Split = Callable[[Tensor], tuple[Tensor, Tensor]]


def _alone(formula: Formula, input: Tensor) -> Tensor:
    return formula(input.to(wide(input.dtype))).to(input.dtype)


def _gated(formula: Formula, split: Split, input: Tensor, up: Tensor | None, **params: Any) -> Tensor:
    """A formula of gate and up, in two tensors or in one."""
    return formula(*(split(input) if up is None else (input, up)), **params)


def _gated_wide(formula: Formula, split: Split, input: Tensor, up: Tensor | None, **params: Any) -> Tensor:
    dtype = wide(input.dtype)
    return _gated(formula, split, input.to(dtype), None if up is None else up.to(dtype), **params).to(input.dtype)


def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    """Apply the Gaussian error linear unit: ``x / 2 * (1 + erf(x / sqrt(2)))``, or its approximation by tanh.

    Shapes: input (*) → (*)
    Dtype: floating; computes in float32; returns input.dtype. An infinity may give NaN.
    Args:
        approximate: ``"none"`` or ``"tanh"``.
    Raises: InvalidCallError for dtypes or a name that is none of these.
    Source: arXiv:1606.08415.
    """
    return _alone(formulas.gelu_tanh if approximate == "tanh" else formulas.gelu, input)


def silu(input: Tensor) -> Tensor:
    """Apply the sigmoid linear unit: ``x / (1 + exp(-x))``.

    Shapes: input (*) → (*)
    Dtype: floating; computes in float32; returns input.dtype.
    Raises: InvalidCallError for other dtypes.
    Source: arXiv:1702.03118.
    """
    return _alone(functional.silu, input)


def relu2(input: Tensor) -> Tensor:
    """Apply the squared rectified linear unit: ``max(x, 0)^2``.

    Shapes: input (*) → (*)
    Dtype: floating; computes in float32; returns input.dtype.
    Raises: InvalidCallError for other dtypes.
    Source: arXiv:2109.08668.
    """
    return _alone(formulas.relu2, input)


def silu_mul(input: Tensor, up: Tensor | None = None) -> Tensor:
    """Multiply the SiLU of a gate with what it lets through: ``silu(gate) * up``.

    Shapes: gate and up (*, D) → (*, D); or both in one input (*, 2 D), the gate first, as one product with the two
        weights joined makes them.
    Dtype: floating, the same for both; computes in float32; returns input.dtype.
    Args:
        input: the gate, or gate and up.
        up: what the gate lets through; None if it is in the input.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit.
    Source: arXiv:2002.05202.
    """
    return _gated_wide(_silu_mul, halves, input, up)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def gelu_mul(input: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Multiply the GELU of a gate with what it lets through: ``gelu(gate) * up``.

    Shapes: gate and up (*, D) → (*, D); or both in one input (*, 2 D), the gate first.
    Dtype: floating, the same for both; computes in float32; returns input.dtype. An infinite gate may give NaN.
    Args:
        input: the gate, or gate and up.
        up: what the gate lets through; None if it is in the input.
        approximate: ``"none"`` or ``"tanh"``, as for :func:`layerzero.gelu`.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, or another approximation.
    Source: arXiv:2002.05202.
    """
    return _gated_wide(_gelu_mul_exact, halves, input, up, approximate=approximate)


def _gelu_mul_exact(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return (formulas.gelu_tanh if approximate == "tanh" else formulas.gelu)(gate) * up


def _gelu_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    return functional.gelu(gate, approximate=approximate) * up


def swiglu_oai(input: Tensor, up: Tensor | None = None, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Apply gpt-oss's gate: ``g * sigmoid(alpha * g) * (u + 1)``, with the gate clamped from above, up on both sides.

    Shapes: gate and up (*, D) → (*, D); or both in one input (*, 2 D) **by turns**: gate 0, up 0, gate 1, up 1, …
    Dtype: floating, the same for both; computes in float32; returns input.dtype.
    Args:
        input: the gate, or gate and up by turns.
        up: what the gate lets through; None if it is in the input.
        alpha: factor on the gate within the sigmoid.
        limit: what the gate is at most, and up on either side; above 0.
    Raises: InvalidCallError for shapes, dtypes or devices that do not fit, and for numbers that mean nothing.
    Source: gpt-oss, arXiv:2508.10925.
    """
    return _gated_wide(formulas.swiglu_oai, turns, input, up, alpha=alpha, limit=limit)


_SWEEP_ROWS = {"cuda": (1, 4, 16, 64, 256, 1024, 4096, 16384), "cpu": (1, 4, 16, 64, 256, 1024)}
_SWEEP_FEATURES = {"cuda": (2816, 5632, 14336), "cpu": (1536, 2816, 8192)}
_MAX_ELEMENTS = {"cuda": 2**27, "cpu": 2**21}


def _sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    """Every size of a kind of device; of the wanted sizes."""
    kind = device if device in _SWEEP_ROWS else "cpu"
    if not narrow.keys() <= {"rows", "features"}:
        return
    for features in narrow.get("features", _SWEEP_FEATURES[kind]):
        for rows in narrow.get("rows", _SWEEP_ROWS[kind]):
            if narrow or rows * features <= _MAX_ELEMENTS[kind]:
                yield Case(f"{rows}x{features}", {"rows": rows, "features": features})


def _joined_sweep(device: str, narrow: Mapping[str, Sequence[int]]) -> Iterator[Case]:
    for case in _sweep(device, narrow):
        yield Case(case.name, {"rows": case.sizes["rows"], "joined": 2 * case.sizes["features"]})


def _cases(params: tuple[Param, ...], axis: str = "features", factor: int = 1) -> tuple[Case, ...]:
    """Shapes of models' layers, and a small one with each parameter away from its neutral value."""
    found = cases(f"rows {axis}", {name: (rows, factor * size) for name, (rows, size) in _SHAPES.items()})
    other = {each.name: each.example for each in params}
    return (*found, Case("other", found[0].sizes, other)) if other else found


def _of_one(reference: Formula, summary: str, flops: int, expression: Formula, *params: Param) -> Operation:
    return operation(
        f"activation.{reference.__name__}",
        summary,
        reference,
        inputs=("input: ... features",),
        outputs=("output: ... features",),
        params=params,
        axes=_AXES,
        cases=_cases(params),
        work=moved("rows features", 2, flops),
        sweep=_sweep,
        expression=expression,
        **_JUDGED,
    )


def _of_two(
    reference: Formula, summary: str, flops: int, formula: Formula, *params: Param, ending: str = "joined"
) -> tuple[Operation, Operation]:
    name, split = f"mlp.{reference.__name__}", halves if ending == "joined" else turns

    def expression(input: Tensor, up: Tensor | None = None, **given: Any) -> Tensor:
        return _gated(formula, split, input, up, **given)

    shared: dict[str, Any] = {
        "outputs": ("output: ... features",),
        "params": params,
        "work": moved("rows features", 3, flops),
        "expression": expression,
        **_JUDGED,
    }
    apart = operation(
        name,
        summary,
        reference,
        inputs=("input: ... features", "up: ... features"),
        axes=_AXES,
        cases=_cases(params),
        sweep=_sweep,
        **shared,
    )
    together = operation(
        f"{name}.{ending}",
        f"{summary}, both in one tensor",
        reference,
        inputs=("input: ... joined",),
        axes=_JOINED_AXES,
        cases=_cases(params, "joined", 2),
        derive=lambda _, sizes: {"features": sizes["joined"] // 2},
        derived_from={"features": ("joined",)},
        sweep=_joined_sweep,
        **shared,
    )
    return apart, together


def _value_problems(arguments: dict[str, Any]) -> list[str]:
    problems = []
    approximate, alpha, limit = (arguments.get(name) for name in ("approximate", "alpha", "limit"))
    if isinstance(approximate, str) and approximate not in ("none", "tanh"):
        problems.append(f"approximate: wanted 'none' or 'tanh', got {told(approximate)}")
    if isinstance(alpha, (int, float)) and not math.isfinite(alpha):
        problems.append(f"alpha: wanted a finite number, got {told(alpha)}")
    if isinstance(limit, (int, float)) and not (math.isfinite(limit) and limit > 0):
        problems.append(f"limit: wanted a finite number above 0, got {told(limit)}")
    return problems


def _gate_problems(arguments: dict[str, Any]) -> list[str]:
    shape = tuple(arguments["input"].shape)
    if "up" not in arguments and shape[-1] % 2:
        return [f"input: wanted gate and up in one tensor, an even last axis, got {shape}; or pass up="]
    return same_shape("up", "input")(arguments)


_WIDTHS = (1, 2, 3, 7, 8, 16, 24, 33, 64, 100, 128, 257, 1536)


def _deviation(draw: Draw) -> float:
    """The deviation of what is activated: 1, now and then as wide as activations get before they are flat or straight.

    What a gate is multiplied by stays near 1: it scales the error of the activation, which tolerances bound for that.
    """
    return float(draw.of((4.0, 12.0))) if draw.chance(0.3) else 1.0


def _drawn(operation: Operation) -> Callable[[Draw, torch.dtype], dict[str, Any]]:
    """Random calls: shapes, memory, gates apart and joined, data on both sides of every bend."""
    params, gated = [each.name for each in operation.schema.params], len(operation.schema.inputs) > 1

    def drawn(draw: Draw, dtype: torch.dtype) -> dict[str, Any]:
        shape = (*draw.leading((0, 1, 2, 3), (1, 6, 3, 1)), draw.of(_WIDTHS))
        gate = draw.normal(shape, dtype) * _deviation(draw)
        up = draw.normal(shape, dtype) if gated else None
        arguments: dict[str, Any]
        if up is None or draw.chance(0.5):
            arguments = {"input": draw.laid_out(gate if up is None else torch.cat((gate, up), -1))}
        else:
            arguments = {"input": draw.laid_out(gate), "up": draw.laid_out(up)}
        draw.poison(arguments, tuple(arguments))
        if "approximate" in params and draw.chance(0.7):
            arguments["approximate"] = draw.of(("none", "tanh", "tanh"))
        if "alpha" in params and draw.chance(0.3):
            arguments |= {"alpha": draw.of((1.0, 1.702, 0.5)), "limit": draw.of((7.0, 1.5, 7))}
        return arguments

    return drawn


def _function(apart: Operation, together: Operation | None = None) -> Function:
    more: dict[str, Any] = {"values": _value_problems, "draw": _drawn(apart)}
    name = apart.name.partition(".")[2]
    if together is None:
        return function(name, apart, weight=1, **more)
    choose = lambda arguments: together if arguments["up"] is None else apart  # noqa: E731
    return function(name, apart, together, choose=choose, fits=_gate_problems, **more)


ALONE = (
    _of_one(gelu, "Gaussian error linear unit", 8, functional.gelu, APPROXIMATE),
    _of_one(silu, "Sigmoid linear unit", 4, functional.silu),
    _of_one(relu2, "Square of the rectified linear unit", 2, formulas.relu2),
)
GATED = (
    _of_two(silu_mul, "SiLU of a gate, times up", 5, _silu_mul),
    _of_two(gelu_mul, "GELU of a gate, times up", 9, _gelu_mul, APPROXIMATE),
    _of_two(
        *(swiglu_oai, "gpt-oss's clamped gate, times up and one", 9, formulas.swiglu_oai, ALPHA, LIMIT),
        ending="interleaved",
    ),
)
OPERATIONS = (*ALONE, *(each for pair in GATED for each in pair))
FUNCTIONS = (*map(_function, ALONE), *(_function(*pair) for pair in GATED))
