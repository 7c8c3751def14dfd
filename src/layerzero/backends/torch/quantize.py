"""Narrow numbers and their scales as torch expressions: a pass each for the largest value, the quotient, the rounding.

torch has no operator of its own for these formats. float8's rule that NaN makes no scale costs a pass more on GPUs;
on a CPU the largest value is looked at first. The largest of 64 x 4096 absolute values took 37 us
as ``abs().amax(-1)``, 747 as ``vector_norm``, 839 with ``nan_to_num`` between (one thread, torch 2.13.0, AMD EPYC,
2026-11-23).
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.attention import FLOATS, TORCH, kernel
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.quantize import formats
from layerzero.ops.quantize.declare import DEQUANTIZE
from layerzero.ops.quantize.formats import E2M1_LARGEST, FORMATS, MX, NV, SCALED, Format, in_blocks, packed, rounded


def _format(facts: Facts) -> Format:
    return FORMATS[str(facts["operation"]).rpartition(".")[2]]


def scales(numbers: Tensor, of: Format, per: str, block_size: int | None) -> Tensor:
    """Computed scales of numbers in float32 or wider, as the operation says."""
    size = numbers.abs()
    if per == "tensor":
        most = size.amax()
    elif per == "row":
        most = size.amax(-1, True)
    else:
        most = in_blocks(size, block_size or 1).amax(-1)
    if of.is_whole:
        scale = (most / of.largest).to(torch.float32)
        return scale.masked_fill_(scale == 0.0, 1.0)
    if numbers.device.type != "cpu" or bool(most.isnan().any()):
        return formats.computed_scale(numbers, of, per, block_size)
    return (most / of.largest).to(torch.float32).clamp_(min=of.least_scale)


def _load_scaled(facts: Facts) -> Callable[..., Any]:
    of = _format(facts)
    wide = torch.float64 if facts["dtype"] is torch.float64 else torch.float32
    lowest, largest, narrow, is_whole = (-128.0 if of.is_whole else -of.largest), of.largest, of.dtype, of.is_whole

    def run(input: Tensor, *, scale: Tensor | None = None, per: str, block_size: int | None) -> tuple[Tensor, Tensor]:
        numbers = input.detach().to(wide)  # rounding lets no gradient through
        if scale is None:
            made = scales(numbers, of, per, block_size)
        else:
            made = scale.detach().clone(memory_format=torch.contiguous_format)
        quotients = formats.divided(numbers, made)
        if is_whole:
            quotients.round_()
        return quotients.clamp_(lowest, largest).to(narrow), made

    return run


def e2m1_by_bits(quotients: Tensor) -> Tensor:
    """Codes of the nearest e2m1 numbers of float32, of two as near the even one: its own bits, rounded to one of 23.

    Below 1 the numbers are halves, which float32 rounds to near 2^22. It takes 0.06 of the time of comparisons.
    """
    size = quotients.abs().clamp_(max=E2M1_LARGEST)
    bits = size.view(torch.int32)
    near = ((bits + 0x1FFFFF + (bits >> 22 & 1)) >> 22) - 252
    halves = (size + 4194304.0).view(torch.int32) & 3
    codes = torch.where(size < 1.0, halves, near).to(torch.uint8)
    return codes.add_((quotients < 0.0).to(torch.uint8), alpha=8)


def _load_blocks(divide: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Facts], Callable[..., Any]]:
    def load(facts: Facts) -> Callable[..., Any]:
        of, in_float32 = _format(facts), facts["dtype"] is not torch.float64

        def run(input: Tensor, **params: Any) -> tuple[Tensor, Tensor]:
            quotients, scale = divide(input, of, **params)
            if of.bits == 4 and in_float32:
                return packed(e2m1_by_bits(quotients)), scale
            return rounded(quotients, of), scale

        return run

    return load


_COMMON: dict[str, Any] = {"grad": True, "priority": 20}


def _of(formats: Iterable[Format]) -> tuple[str, ...]:
    return tuple(f"quantize.{each.name}" for each in formats)


KERNELS = (
    kernel("torch.quantize", _of(SCALED), _load_scaled, FLOATS, accepts=("scale", "per", "block_size"), **_COMMON),
    kernel("torch.quantize_mx", _of(MX), _load_blocks(formats.mx_quotients), FLOATS, **_COMMON),
    kernel(
        "torch.quantize_nvfp4",
        _of(NV),
        _load_blocks(formats.nv_quotients),
        FLOATS,
        accepts=("tensor_scale",),
        **_COMMON,
    ),
    Kernel.of_expression(
        *DEQUANTIZE.values(),
        id="torch.dequantize",
        backend=TORCH,
        accepts=("tensor_scale", "out_dtype"),
        limits=(limit.dtype("int8", "uint8", "float8_e4m3", "float8_e5m2"),),
        **_COMMON,
    ),
)
