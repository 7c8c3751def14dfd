"""Products with weights as files hold them: rows of the weight dequantised block by block, and ``F.linear`` of each.

A block stays in the host's caches, so that the wide weight is never written to memory. On a CPU the product is in
float32, but in bfloat16 where there are instructions for it and rows to pay for the conversion.

With a PackedWeight that may be dense, the numbers are kept in the dtype of the product, and a product takes as long as
one with a floating weight; where a CPU lacks products of half precision, in float32.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends.grouped_weights import ROUNDING, ROUNDING_GGUF, Product, grouped
from layerzero.backends.torch.attention import FLOATS, TORCH, kernel
from layerzero.backends.torch.widened import FEW_BITS
from layerzero.core import limits as limit
from layerzero.core.emulation import lacks
from layerzero.core.facts import Facts
from layerzero.ops.linear.packed import MAY_BE_DENSE, Pack, PackedWeight
from layerzero.ops.linear.quantized import QUANTIZED, of_outputs
from layerzero.ops.linear.weight_formats import FORMATTED
from layerzero.ops.quantize.schemes import scheme_of
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import Fields, WeightFormat

BLOCK = {"cpu": 2**17, "cuda": 2**25}
"""Numbers of a block: half a megabyte of float32 on a CPU; on a GPU, where each block is a dozen launches, as many as a
layer has, in 64 MB of bfloat16."""


def _dtypes(facts: Facts) -> tuple[torch.dtype, torch.dtype]:
    dtype = facts["dtype"]
    assert isinstance(dtype, torch.dtype)
    exact = torch.promote_types(dtype, torch.float32)
    if facts["out_dtype"] is not None or dtype is exact:
        return exact, exact
    on_cpu = facts["platform"] == "cpu"
    if on_cpu and (dtype is torch.float16 or lacks(facts.device, dtype) or facts.size_bits("rows") < FEW_BITS):
        return exact, exact
    return exact, dtype


def dequantizing(
    of: WeightFormat,
    sizes: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    platform: str,
    *,
    whole: bool = False,
) -> Callable[[Tensor, Fields], Tensor]:
    """A product of rows (M, K) with weights of a format and of these sizes N and K, by blocks of the weight's rows.

    ``dtypes`` are those that numbers are dequantised in and multiplied in; the result has the second. Of ``whole``
    weights there is one block: autograd keeps what each product read.
    """
    (outputs, inputs), (wide, narrow), scheme = sizes, dtypes, scheme_of(of)
    step = scheme.step(of, inputs)
    rows = max(BLOCK.get(platform, BLOCK["cuda"]) // max(inputs, 1) // step, 1) * step
    starts = range(0, outputs, outputs or 1) if whole or rows >= outputs else range(0, outputs, rows)

    def numbers(given: Fields) -> Tensor:
        with torch.no_grad():
            return scheme.dequantized(of, given, inputs, wide).to(narrow)

    def run(left: Tensor, given: Fields) -> Tensor:
        left = left.to(narrow)
        if len(starts) == 1:
            return functional.linear(left, numbers(given))
        parts = [scheme.cut(of, given, inputs, start, min(start + rows, outputs)) for start in starts]
        return torch.cat([functional.linear(left, numbers(each)) for each in parts], -1)

    return run


def _load(facts: Facts) -> Callable[..., Any]:
    of, sizes = WeightFormat.of(str(facts["weight_format"])), (facts.size("out_features"), facts.size("in_features"))
    product = dequantizing(of, sizes, _dtypes(facts), str(facts["platform"]), whole=bool(facts["requires_grad"]))

    def run(
        input: Tensor,
        weight: Tensor,
        weight_scale: Tensor | None = None,
        *,
        bias: Tensor | None = None,
        weight_format: str,
        weight_zero: Tensor | None = None,
        group_index: Tensor | None = None,
        second_scale: Tensor | None = None,
        out_dtype: torch.dtype | None,
    ) -> Tensor:
        output = product(input, Fields(weight, weight_scale, weight_zero, group_index, second_scale))
        return (output if bias is None else output + bias).to(out_dtype or input.dtype)

    return run


def _kept_in(facts: Facts) -> torch.dtype:
    """The dtype of numbers that are kept: of the result, but float32 where a CPU would emulate the product."""
    dtype = facts["out_dtype"] or facts["dtype"]
    assert isinstance(dtype, torch.dtype)
    return torch.float32 if dtype is torch.float16 or lacks(facts.device, dtype) else dtype


def _kept(facts: Facts) -> tuple[Pack, Product]:
    dtype = _kept_in(facts)

    def pack(weight: QuantizedWeight) -> tuple[Tensor, int]:
        numbers = weight.dequantized(torch.promote_types(dtype, torch.float32)).to(dtype)
        return numbers, numbers.nbytes

    return pack, lambda rows, form: functional.linear(rows.to(dtype), form).to(rows.dtype)


def _load_kept(facts: Facts) -> Callable[..., Any]:
    """Of the numbers alone, which each dtype holds exactly: scales are behind the product, as each call brings them."""
    dtype = _kept_in(facts)

    def pack(weight: Tensor | QuantizedWeight) -> tuple[Tensor, int]:
        numbers = (weight if isinstance(weight, Tensor) else weight.fields.data).to(dtype)
        return numbers, numbers.nbytes

    def run(
        input: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        *,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None,
        packed: PackedWeight,
    ) -> Tensor:
        output = functional.linear(input.to(dtype), packed.form(("torch.kept", dtype), pack)) * of_outputs(weight_scale)
        return (output if bias is None else output + bias).to(out_dtype or input.dtype)

    return run


KERNELS = tuple(
    kernel(
        f"torch.dequantized_{name}",
        operation.name,
        _load,
        FLOATS,
        accepts=("weight_format", *(each.name for each in operation.schema.optional), "out_dtype"),
        grad=True,
        handles_negated=True,
        priority=20,
    )
    for name, operation in FORMATTED.items()
)

KERNELS += (
    kernel(
        "torch.kept_quant",
        QUANTIZED[None].name,
        _load_kept,
        limit.platform("cpu"),
        FLOATS,
        MAY_BE_DENSE,
        accepts=("bias", "out_dtype", "packed"),
        priority=25,
    ),
    *(
        grouped(f"torch.kept_{name}", TORCH, _kept, 25, FLOATS, MAY_BE_DENSE, operation=name, of_codes=False)
        for name in FORMATTED
        if FORMATTED[name].name not in ROUNDING + ROUNDING_GGUF
    ),
)
