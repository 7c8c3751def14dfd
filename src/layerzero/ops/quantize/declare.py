"""Numbers as narrow ones with scales, and back: an operation for each format, ``quantize.*`` and ``dequantize.*``.

    quantize.int8, quantize.fp8_e4m3, quantize.fp8_e5m2     scales in float32, of a tensor, rows, columns or blocks
    quantize.mxfp8_e4m3, quantize.mxfp8_e5m2, quantize.mxfp4   a power of two for each 32 numbers
    quantize.mxfp6_e2m3, quantize.mxfp6_e3m2                the same
    quantize.nvfp4                                          an e4m3 scale for each 16, one in float32 for the tensor

A right rounding is the reference's, or its neighbour where a quotient lies as good as between both.

Math: see :mod:`layerzero.ops.quantize.formats`. Source: OCP Microscaling Formats 1.0 for MX; vLLM for the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerzero.core.arguments import Axis, Param, TensorSchema
from layerzero.core.judge import Given, Judge, first_of, first_wrong
from layerzero.core.operation import Case, Operation, Random, Work
from layerzero.core.values import Check
from layerzero.ops.calls import drawn
from layerzero.ops.declaration import NDIM, operation, tensor
from layerzero.ops.quantize import formats
from layerzero.ops.quantize.formats import FORMATS, MX, NV, SCALED, Format, in_blocks, rounded, widened

NEAR = 2e-6
"""How far apart two quotients may be, relative: a division, a product and a scale, each rounded to float32."""


@dataclass(frozen=True, slots=True)
class Rounded(Judge):
    """Numbers of a format that quotients round to.

    Attributes:
        format: theirs.
        quotients: from the call's canonical arguments in float64, what is rounded, and where nothing is said: a mask.
        reason: why a number may be another one.
    """

    format: Format
    quotients: Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]]
    reason: str = (
        "a quotient that lies within rounding of the middle between two numbers may become either: libraries multiply "
        "by the reciprocal of a scale, or compute it in another order"
    )

    def __str__(self) -> str:
        return f"the nearest {self.format.name} number, either one within {NEAR:g} of the middle between two"

    def basis(self, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The quotients, and where nothing is said."""
        return self.quotients(arguments)

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:
        quotients, unsaid = given.basis
        wide = torch.float64
        mine, theirs = (self._numbers(each.detach()) for each in (got, want))
        slack = quotients.abs() * NEAR
        low, high = (
            widened(rounded(each, self.format), self.format, wide) for each in (quotients - slack, quotients + slack)
        )
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        either = (low <= mine) & (mine <= high) & (low <= theirs) & (theirs <= high)
        wrong = ~(same | either | unsaid)
        if not wrong.any():
            return ""
        where = first_of(wrong)
        found = f"wanted {theirs[where].item():g} of {quotients[where].item():.9g}, got {mine[where].item():g}"
        return f"{int(wrong.sum())} of {wrong.numel()} numbers are not the nearest ones; first at {where}: {found}"

    def _numbers(self, result: Tensor) -> Tensor:
        """What a result stands for; of float64 it is the numbers already."""
        if result.dtype is torch.float64:
            return result
        return widened(result, self.format, torch.float64)


@dataclass(frozen=True, slots=True)
class Scales(Judge):
    """Scales near the reference's.

    Attributes:
        unsaid: from the call's canonical arguments, where nothing is said: a mask in their shape.
        reason: why that far.
    """

    unsaid: Callable[[Mapping[str, Any]], Tensor]
    reason: str = "one division in float32"

    def __str__(self) -> str:
        return "scales within 1e-6 of the reference's"

    def basis(self, arguments: Mapping[str, Any]) -> Tensor:
        return self.unsaid(arguments)

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:
        mine, theirs = (each.detach().to(torch.float64) for each in (got, want))
        wrong = ~(torch.isclose(mine, theirs, rtol=1e-6, atol=0.0, equal_nan=True) | given.basis)
        return first_wrong(wrong, "scales are too far", theirs, mine)


@dataclass(frozen=True, slots=True)
class RoundedOnce(Judge):
    """Products that are rounded once, to the dtype of the result, or in float32 and then to that."""

    reason: str = "a product in float32, rounded to the dtype of the result: one step of it, and 2^-22"

    def __str__(self) -> str:
        return "within one step of the result's dtype"

    def problem(self, got: Tensor, want: Tensor, given: Given) -> str:  # noqa: ARG002  # a judge's names
        mine, theirs = (each.detach().to(torch.float64) for each in (got, want))
        kind = torch.finfo(got.dtype)
        relative, least = max(kind.eps, 2.0**-22), max(kind.smallest_normal * kind.eps, 2.0**-149)
        wrong = ~torch.isclose(mine, theirs, rtol=relative, atol=least, equal_nan=True)
        return first_wrong(wrong, "numbers are too far", theirs, mine)


GRANULARITIES = ("tensor", "row", "block")
"""What may have a scale that is computed."""

_FLOAT32 = frozenset({torch.float32})
_AXES = (Axis("rows", scales=True, live=True, leading=True), Axis("features", scales=True), NDIM)
_SHAPES = {"small": (33, 96), "decode": (1, 4096), "batch_decode": (64, 4096), "prefill": (512, 4096)}

SCALE = TensorSchema("scale", (), _FLOAT32, required=False, same_dtype=False)
TENSOR_SCALE = TensorSchema("tensor_scale", (), _FLOAT32, required=False, same_dtype=False)
PER = Param("per", str, "tensor", example="row")
BLOCK_SIZE = Param("block_size", int, None)
OUT_DTYPE = Param("out_dtype", torch.dtype, torch.float32, example=torch.bfloat16)


def _granularity(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    scale = arguments.get("scale")
    if scale is None:
        return {"granularity": arguments.get("per", "tensor")}
    numbers = arguments["input"] if "input" in arguments else arguments["quantized"]
    return {"granularity": formats.granularity(numbers.shape, scale.shape)}


def _work(facts: Mapping[str, Any]) -> Work:
    """Two operations a number, which is read and written once: as narrow as a byte on one side."""
    elements = facts["rows"] * facts["features"]
    return Work(2.0 * elements, float(elements * ((facts.get("out_dtype") or facts["dtype"]).itemsize + 1)))


def _reference(compute: Callable[..., Any], of: Format) -> Callable[..., Any]:
    @functools.wraps(compute)
    def run(*tensors: Tensor, **params: Any) -> Any:
        return compute(*tensors, of, **params)

    return run


def _check(of: Format, input: Tensor, scale: Tensor | None = None, tensor_scale: Tensor | None = None) -> list[Check]:
    checks = _scale_values({"scale": scale, "tensor_scale": tensor_scale})
    if not of.dtype.is_floating_point:
        text = f"input: wanted finite numbers, since {of.name} holds no other, got one that is not"
        checks.append(_all(input.isfinite(), text))
    return checks


def _scale_values(scales: Mapping[str, Tensor | None]) -> list[Check]:
    return [
        _all((scale > 0.0) & scale.isfinite(), f"{name}: wanted finite numbers above 0, got one that is not")
        for name, scale in scales.items()
        if scale is not None
    ]


def _all(right: Tensor, text: str) -> Check:
    return Check(~right.all(), None, lambda _, __: text)


def _check_dequantize(quantized: Tensor, scale: Tensor, tensor_scale: Tensor | None = None) -> list[Check]:
    scales = {"scale": scale if scale.dtype is torch.float32 else None, "tensor_scale": tensor_scale}
    return _scale_values(scales)  # those of a format's own may be 0 or NaN


# what is judged: quotients by the reference's own scales, in float64


def _unsaid_scales(arguments: Mapping[str, Any], of: Format) -> Tensor:
    """Of whole numbers, where NaN would make the scale; in float8 it makes none."""
    numbers = formats.wide(arguments["input"])
    per, size = arguments.get("per", "tensor"), arguments.get("block_size")
    if arguments.get("scale") is not None:
        return torch.zeros(arguments["scale"].shape, dtype=torch.bool, device=numbers.device)
    strange = numbers.isnan() if of.is_whole else torch.zeros_like(numbers, dtype=torch.bool)
    return strange.any() if per == "tensor" else in_blocks(strange, size or numbers.shape[-1]).any(-1)


def _scaled_quotients(arguments: Mapping[str, Any], of: Format) -> tuple[Tensor, Tensor]:
    numbers, scale = formats.wide(arguments["input"]), arguments.get("scale")
    if scale is None:
        scale = formats.computed_scale(numbers, of, arguments.get("per", "tensor"), arguments.get("block_size"))
    unsaid = _unsaid_scales(arguments, of)
    ones = formats.multiplied(torch.ones_like(numbers), unsaid.to(numbers.dtype)) > 0.0
    return formats.divided(numbers, scale), ones | (~numbers.isfinite() if of.is_whole else ones)


def _mx_quotients(arguments: Mapping[str, Any], of: Format) -> tuple[Tensor, Tensor]:
    return _with_blocks_unsaid(formats.mx_quotients(arguments["input"], of)[0], arguments["input"], of)


def _nv_quotients(arguments: Mapping[str, Any], of: Format) -> tuple[Tensor, Tensor]:
    quotients, _ = formats.nv_quotients(arguments["input"], of, tensor_scale=arguments.get("tensor_scale"))
    return _with_blocks_unsaid(quotients, arguments["input"], of)


def _with_blocks_unsaid(quotients: Tensor, numbers: Tensor, of: Format) -> tuple[Tensor, Tensor]:
    blocks = in_blocks(numbers, of.block)
    strange = (~blocks.isfinite()).any(-1, keepdim=True).expand(blocks.shape)
    return quotients.nan_to_num(0.0), strange.flatten(-2)


def _unsaid_nowhere(arguments: Mapping[str, Any]) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=arguments["input"].device)


# declarations


def _sizes(of: Format, rows: int, features: int) -> dict[str, int]:
    sizes = {"rows": rows, "features": features}
    if of.block:
        sizes["scale_blocks"] = features // of.block
    if of.is_packed:
        sizes["packed_features"] = features * of.bits // 8
    return sizes


def _quantized(of: Format) -> TensorSchema:
    axis = "packed_features" if of.is_packed else "features"
    return tensor(f"quantized: ... {axis}", frozenset({of.dtype}), same_dtype=False)


def _scales_of(of: Format) -> TensorSchema:
    return tensor(f"scale: {'... scale_blocks' if of.block else ''}", frozenset({of.scale_dtype}), same_dtype=False)


def _static_example(case: Case, dtype: torch.dtype, device: torch.device, generator: Random) -> dict[str, Any]:
    """A scale that three deviations of a normal number go with, where a case has one."""
    return {name: torch.tensor(0.025, device=device) for name in ("scale", "tensor_scale") if name in case.given}


def _quantize(of: Format) -> Operation:
    cases = [Case(name, _sizes(of, *shape)) for name, shape in _SHAPES.items()]
    optional, more = (TENSOR_SCALE,) if of in NV else (), dict[str, Any]()
    compute: Callable[..., Any] = formats.quantize_mx if of in MX else formats.quantize_nv
    quotients = _mx_quotients if of in MX else _nv_quotients
    unsaid: Callable[[Mapping[str, Any]], Tensor] = _unsaid_nowhere
    if of in SCALED:
        cases += [
            *(
                Case("rows" if name == "small" else f"{name}_rows", _sizes(of, *shape), {"per": "row"})
                for name, shape in _SHAPES.items()
            ),
            Case("blocks", _sizes(of, 33, 96), {"per": "block", "block_size": 32}),
        ]
        compute, quotients = formats.quantize_scaled, _scaled_quotients
        unsaid = functools.partial(_unsaid_scales, of=of)
        optional = (SCALE,)
        more = {"params": (PER, BLOCK_SIZE), "derive": _granularity, "derived_from": {"granularity": ()}}
    cases += [Case(f"given_{each.name}", _sizes(of, 33, 96), given=(each.name,)) for each in optional]
    return operation(
        f"quantize.{of.name}",
        f"Numbers as {of.name} with their scales",
        _reference(compute, of),
        inputs=("input: ... features", *optional),
        outputs=(_quantized(of), _scales_of(of)),
        axes=(*_AXES, *((Axis("granularity"),) if of in SCALED else ())),
        cases=tuple(cases),
        judge={"quantized": Rounded(of, functools.partial(quotients, of=of)), "scale": Scales(unsaid)},
        fixed={"dtype": of.name},
        examples=_static_example,
        check_values=functools.partial(_check, of),
        work=_work,
        stock=None,
        fake=_reference(compute, of),  # results' dtypes follow from the format, and no schema says so
        **more,
    )


QUANTIZE: dict[str, Operation] = {of.name: _quantize(of) for of in (*SCALED, *MX, *NV)}
"""By the format's name."""


def _features(bits: int, arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, object]:
    return {"features": arguments["quantized"].shape[-1] * 8 // bits}


def _examples_back(
    of: Format, case: Case, dtype: torch.dtype, device: torch.device, generator: Random
) -> dict[str, Any]:
    """What normal numbers become, by the reference; where sizes contradict each other what is drawn is no call."""
    shape = case.sizes["rows"], case.sizes["features"]
    if _sizes(of, *shape) != dict(case.sizes) or not shape[1] or (of.block and shape[1] % of.block):
        return {} if of.block else {"scale": torch.ones(shape[0], 1, device=device)}  # no call, or an empty one
    numbers = drawn(TensorSchema("input"), shape, torch.float32, device, {}, generator)
    made = _static_example(case, dtype, device, generator)
    given = {"per": "row"} if of in SCALED else made
    quantized, scale = QUANTIZE[of.name].reference(numbers, **given)
    return {"quantized": quantized, "scale": scale, **made}


def _dequantize(of: Format) -> Operation:
    whole = (TENSOR_SCALE,) if of in NV else ()
    cases = [Case(name, _sizes(of, *shape)) for name, shape in _SHAPES.items()]
    cases.append(Case("small_half", _sizes(of, 33, 96), {"out_dtype": torch.bfloat16}))
    cases += [Case("given_tensor_scale", _sizes(of, 33, 96), given=(each.name,)) for each in whole]
    return operation(
        f"dequantize.{of.name}",
        f"The numbers that {of.name} and its scales stand for",
        _reference(formats.dequantize, of),
        inputs=(_quantized(of), _scales_of(of), *whole),
        outputs=(tensor("output: ... features", dtype_from="out_dtype"),),
        params=(OUT_DTYPE,),
        axes=(*_AXES, *((Axis("packed_features", scales=True),) if of.is_packed else ())),
        cases=tuple(cases),
        judge=RoundedOnce(),
        fixed={"dtype": of.name},
        derive=functools.partial(_features, of.bits) if of.is_packed else _granularity,
        derived_from={"features": ("packed_features",)} if of.is_packed else {"granularity": ()},
        examples=functools.partial(_examples_back, of),
        check_values=_check_dequantize,
        work=_work,
        stock=None,
    )


DEQUANTIZE: dict[str, Operation] = {name: _dequantize(of) for name, of in FORMATS.items()}
"""By the format's name."""

OPERATIONS = (*QUANTIZE.values(), *DEQUANTIZE.values())
