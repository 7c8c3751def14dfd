"""Narrow numbers and their scales as torch expressions: a pass each for the largest value, the quotient, the rounding.

torch has no operator of its own for these formats. What a plan keeps of float8's rule that numbers which are not finite
make no scale costs a pass more on GPUs; on a CPU the largest value is looked at first.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import TORCH
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.quantize import reference
from layerzero.ops.quantize.formats import FORMATS, MX, NV, SCALED, Format, in_blocks

_FLOATS = ("float32", "float64", "float16", "bfloat16")


def _format(facts: Facts) -> Format:
    return FORMATS[str(facts["operation"]).rpartition(".")[2]]


def _load_scaled(facts: Facts) -> Callable[..., Any]:
    of, on_cpu = _format(facts), facts.device.platform == "cpu"
    wide = torch.float64 if facts["dtype"] is torch.float64 else torch.float32
    largest, least = of.largest, of.least_scale
    largest_of: Callable[..., Tensor] = torch.linalg.vector_norm
    lowest, narrow, is_whole = (-128.0 if of.is_whole else -largest), of.dtype, of.is_whole

    def computed(numbers: Tensor, per: str, block_size: int | None) -> Tensor:
        if per == "tensor":
            most = largest_of(numbers, torch.inf)
        elif per == "row":
            most = largest_of(numbers, torch.inf, -1, True)
        else:
            most = largest_of(in_blocks(numbers, block_size or 1), torch.inf, -1)
        if is_whole:
            scale = (most / largest).to(torch.float32)
            return scale.masked_fill_(scale == 0.0, 1.0)
        if not on_cpu or not bool(most.isfinite().all()):
            return reference.computed_scale(numbers, of, per, block_size)
        return (most / largest).to(torch.float32).clamp_(min=least)

    def run(
        input: Tensor,  # noqa: A002  # torch's name
        *,
        scale: Tensor | None = None,
        per: str,
        block_size: int | None,
    ) -> tuple[Tensor, Tensor]:
        numbers = input.detach().to(wide)  # rounding lets no gradient through
        if scale is None:
            made = computed(numbers, per, block_size)
        else:
            made = scale.clone(memory_format=torch.contiguous_format)
        quotients = reference.divided(numbers, made)
        if is_whole:
            quotients.round_()
        return quotients.clamp_(lowest, largest).to(narrow), made

    return run


def _load_formula(compute: Callable[..., Any]) -> Callable[[Facts], Callable[..., Any]]:
    def load(facts: Facts) -> Callable[..., Any]:
        return functools.partial(_with_format, compute, _format(facts))

    return load


def _with_format(compute: Callable[..., Any], of: Format, *tensors: Tensor, **params: Any) -> Any:
    return compute(*tensors, of, **params)


_COMMON: dict[str, Any] = {
    "backend": TORCH,
    "grad": True,
    "deterministic": True,
    "graph_safe": True,
    "device_guard": True,
    "priority": 20,
}

KERNELS = (
    Kernel(
        id="torch.quantize",
        operations=tuple(f"quantize.{each.name}" for each in SCALED),
        load=_load_scaled,
        accepts=("scale", "per", "block_size"),
        limits=(limit.dtype(*_FLOATS),),
        **_COMMON,
    ),
    Kernel(
        id="torch.quantize_mx",
        operations=tuple(f"quantize.{each.name}" for each in MX),
        load=_load_formula(reference.quantize_mx),
        limits=(limit.dtype(*_FLOATS),),
        **_COMMON,
    ),
    Kernel(
        id="torch.quantize_nvfp4",
        operations=tuple(f"quantize.{each.name}" for each in NV),
        load=_load_formula(reference.quantize_nv),
        accepts=("tensor_scale",),
        limits=(limit.dtype(*_FLOATS),),
        **_COMMON,
    ),
    Kernel(
        id="torch.dequantize",
        operations=tuple(f"dequantize.{each.name}" for each in FORMATS.values()),
        load=_load_formula(reference.dequantize),
        accepts=("tensor_scale", "out_dtype"),
        limits=(limit.dtype("int8", "uint8", "float8_e4m3", "float8_e5m2"),),
        **_COMMON,
    ),
)
