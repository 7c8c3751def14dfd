"""Products with weights of four bits on CPUs: quantization-gptq and quantization-bitsandbytes of kernels-community.

Read at commit 40d4194f (2026-08): the same code but for what a code stands for, with AVX512-BF16 or torch's operators.
Blocks of 32 outputs hold 64 codes, two of each output, in 32 bytes, the first 32 in the low bits. Rows, scales and the
numbers that codes stand for are bfloat16. More than four rows are multiplied by blocks of 128 inputs, which groups must
divide or be multiples of. quantization-eetq has no adapter: ``preprocess_weights`` is registered for CUDA and takes
tensors of a CPU alone, so nothing there lays out codes that exist already.
Library: MIT.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.grouped_weights import IN_FOUR_BITS, Product, bytes_of, grouped, regrouped
from layerzero.backends.hub.build import Build
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.linear.packed import Pack
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import Codes

_POWERS = tuple(1 << power for power in range(5, 13))
"""Sizes of blocks."""

_WHOLE_BLOCKS = limit.rule(
    "in_features: a multiple of weight_group", lambda facts: facts["in_features"] % facts["weight_group"] == 0
)


def four_bits(build: Build) -> Sequence[Kernel]:
    """Declare the product with weights by group, or with those of nf4 and fp4."""
    of_groups = build.name == "quantization-gptq"
    groups = (limit.dim("in_features", multiple=32), limit.dim("weight_group", multiple=32), IN_FOUR_BITS)
    blocks = (limit.one_of("weight_group", *_POWERS), _WHOLE_BLOCKS)
    return (
        grouped(
            f"hub.{build.name}.linear",
            build.backend,
            functools.partial(_by_group if of_groups else _by_block, build),
            20,
            limit.dtype("bfloat16"),
            limit.dim("out_features", multiple=32),
            *(groups if of_groups else blocks),
            operation="group" if of_groups else "codebook",
            trust=build.fields("linear")["trust"],
        ),
    )


def _in_blocks(codes: Tensor) -> Tensor:
    """Codes as blocks of 32 outputs. Shapes: uint8 (N, K) → uint8 (N, K / 2)."""
    outputs, inputs = codes.shape
    pairs = codes.view(-1, 32, inputs // 2, 2).transpose(1, 2).reshape(-1, 2, 32)
    return (pairs[:, 0] | pairs[:, 1] << 4).view(outputs, -1)


def _by_group(build: Build, facts: Facts) -> tuple[Pack, Product]:
    compute = build.module().gemm_int4_forward

    def pack(codes: Codes) -> tuple[tuple[Any, ...], int]:
        codes = regrouped(codes, (128, 64, 32))
        zero = torch.full_like(codes.scale, codes.middle, dtype=torch.uint8) if codes.zero is None else codes.zero
        form = (_in_blocks(codes.numbers), zero.t().contiguous(), codes.scale.to(torch.bfloat16).t().contiguous())
        return (*form, codes.group), bytes_of(*form)

    return pack, lambda rows, form: compute(rows, *form)


def _by_block(build: Build, facts: Facts) -> tuple[Pack, Product]:
    compute, kind = build.module().gemm_4bit_forward, int(facts["weight_scheme"] == "fp4")

    def pack(weight: QuantizedWeight) -> tuple[tuple[Any, ...], int]:
        data, scale = weight.fields.data, weight.fields.scale
        assert scale is not None
        codes = torch.cat([data >> 4, data & 15], 1).view(weight.shape)
        form = _in_blocks(codes), scale.to(torch.bfloat16).view(len(codes), -1).t().contiguous()
        return (*form, weight.format.group, kind), bytes_of(*form)

    return pack, lambda rows, form: compute(rows, *form)
