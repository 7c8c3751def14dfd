"""Products with weights as files hold them: rows of the weight dequantised block by block, or packed codes of torch's.

A block stays in the host's caches, so that the wide weight is never written to memory. On a CPU the product is in
float32, but in bfloat16 where there are instructions for it and rows to pay for the conversion.

With a PackedWeight that may be dense, the numbers are kept in the dtype of the product, and a product takes as long as
one with a floating weight; where a CPU lacks products of half precision, in float32.

``_weight_int4pack_mm_for_cpu`` has kernels for bfloat16 alone, too: float32 and float16 took 8 to 60 times as long as
``F.linear``. It wants a multiple of 16 outputs and groups of 32, 64, 128 or 256, reads scales and zero points in
bfloat16, and takes no rows with steps. A weight of 4096 x 4096 in groups of 128 and 1, 4, 16 and 128 rows of bfloat16,
in units of ``F.linear`` with one of bfloat16: 0.27, 0.51, 1.3 and 2.3; 2048 x 2048 with AVX-512 alone 0.36, 0.16, 0.30
and 0.43, with AVX2 0.94, 0.33, 0.39 and 0.59. ``_dyn_quant_matmul_4bit`` is made for ARM: 7 to 59 (one thread, torch
2.13.0, AMD EPYC Zen 4, 2026-11-26).

On CUDA ``_weight_int4pack_mm`` is tinygemm's: bfloat16 from sm_80 on, 8 outputs by 128 inputs a tile, two codes of a
byte with the first one higher (aten/src/ATen/native/cuda/int4mm.cu; torchao 0.18 calls it so). Each 16 rows read the
weight again: 4096 x 28672 took 43, 261 and 1036 us for 1, 32 and 128 rows, where bfloat16 took 96 to 100 (H100, torch
2.11). It never ran through this adapter.

Experts that have tokens are multiplied one after another, each by these products. Every format runs on every device.
Library: torch >= 2.10, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from layerzero.backends import grouped_weights
from layerzero.backends.grouped_weights import Product, Products, experts_of, grouped, looped
from layerzero.backends.torch.attention import FLOATS, TORCH, kernel
from layerzero.backends.torch.cpu_half import FEW_BITS, ROWS_APART, linear_for, many
from layerzero.backends.torch.quantized_linear import on_boundary
from layerzero.core import limits as limit
from layerzero.core.emulation import lacks
from layerzero.core.facts import Facts
from layerzero.ops.linear.packed import MAY_BE_DENSE, Pack, PackedWeight
from layerzero.ops.linear.quantized import QUANTIZED, of_outputs
from layerzero.ops.linear.weight_formats import FORMATTED
from layerzero.ops.moe.experts import Stack, weights_of
from layerzero.ops.quantize.gguf import AFFINE, affine
from layerzero.ops.quantize.schemes import scheme_of
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import Codes, Fields, WeightFormat, rotated

BLOCK = {"cpu": 2**17, "cuda": 2**25}
"""Numbers of a block: half a megabyte of float32 on a CPU; on a GPU, where each block is a dozen launches, as many as a
layer has, in 64 MB of bfloat16."""


def _dtypes(facts: Facts, few: Callable[[Facts], bool]) -> tuple[torch.dtype, torch.dtype]:
    """The dtype that numbers are dequantised in, and that of the products: of few rows on a CPU it is the same."""
    dtype = facts["dtype"]
    assert isinstance(dtype, torch.dtype)
    exact = torch.promote_types(dtype, torch.float32)
    if dtype is exact or facts.get("out_dtype") is not None:
        return exact, exact
    if facts["platform"] == "cpu" and (dtype is torch.float16 or lacks(facts.device, dtype) or few(facts)):
        return exact, exact
    return exact, dtype


def dequantizing(
    of: WeightFormat,
    sizes: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    platform: str,
    *,
    whole: bool = False,
    linear: Callable[[Tensor, Tensor], Tensor],
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
            return linear(left, numbers(given))
        parts = [scheme.cut(of, given, inputs, start, min(start + rows, outputs)) for start in starts]
        return torch.cat([linear(left, numbers(each)) for each in parts], -1)

    return run


def _load(facts: Facts) -> Callable[..., Any]:
    of, sizes = WeightFormat.of(str(facts["weight_format"])), (facts.size("out_features"), facts.size("in_features"))
    dtypes = _dtypes(facts, lambda facts: facts.size_bits("rows") < FEW_BITS)
    rotation, of = of.rotation, replace(of, rotation=0)
    if rotation and facts["dtype"] is torch.float16:  # rotated rows may be larger than any of its numbers
        dtypes = dtypes[0], dtypes[0]
    whole, linear = bool(facts["requires_grad"]), linear_for(facts)
    product = dequantizing(of, sizes, dtypes, str(facts["platform"]), whole=whole, linear=linear)

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
        rows = rotated(input.to(dtypes[0]), rotation) if rotation else input
        output = product(rows, Fields(weight, weight_scale, weight_zero, group_index, second_scale))
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
        *tensors: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None, packed: PackedWeight
    ) -> Tensor:
        input, _, weight_scale = tensors
        output = functional.linear(input.to(dtype), packed.form(("torch.kept", dtype), pack)) * of_outputs(weight_scale)
        return (output if bias is None else output + bias).to(out_dtype or input.dtype)

    return run


_GROUPS = (256, 128, 64, 32)
_TILES = 8
"""Of 16 inputs that tinygemm keeps together: the most, and what torchao takes."""


def int4(facts: Facts) -> tuple[Pack, Product]:
    """Numbers are ``(code - 8) * scale + zero``; what rounding to bfloat16 takes off a zero point is added behind."""
    on_cpu, library = facts["platform"] == "cpu", torch.ops.aten
    operator = library._weight_int4pack_mm_for_cpu.default if on_cpu else library._weight_int4pack_mm.default

    def converted(numbers: Tensor) -> Any:
        if on_cpu:
            return library._convert_weight_to_int4pack_for_cpu.default(numbers.to(torch.int32), 1)
        pairs = numbers[:, ::2] << 4 | numbers[:, 1::2]  # of marlin's words column by column, which it refuses
        return library._convert_weight_to_int4pack.default(pairs.contiguous(), _TILES)

    def pack(codes: Codes) -> tuple[tuple[Tensor, int, Tensor, Tensor | None], int]:
        codes = grouped_weights.regrouped(codes, _GROUPS)
        scale, exact = codes.scale.to(torch.bfloat16), None
        if (zero := codes.zero_points) is not None:
            exact = (codes.middle - zero.float()) * scale.float()
        return made(codes.numbers, codes.group, scale, exact)

    def made(
        numbers: Tensor, group: int, scale: Tensor, exact: Tensor | None
    ) -> tuple[tuple[Tensor, int, Tensor, Tensor | None], int]:
        numbers, zero, rest = converted(numbers), torch.zeros_like(scale), None
        if exact is not None:
            zero = exact.to(torch.bfloat16)
            rest = (exact - zero.float()).t().contiguous().to(torch.bfloat16)
        pairs = torch.stack((scale, zero), -1).transpose(0, 1).contiguous()
        size = numbers.nbytes + pairs.nbytes + (0 if rest is None else rest.nbytes)
        return (numbers, group, pairs, rest), size

    def pack_gguf(weight: QuantizedWeight) -> tuple[tuple[Tensor, int, Tensor, Tensor | None], int]:
        """A scale that is rounded takes its offset along, so that numbers near 0 stay there."""
        numbers, scale, offset = affine(weight.fields.data, weight.format.kind)
        narrow = scale.to(torch.bfloat16)
        ratio = torch.where(scale == 0.0, 1.0, narrow.float() / scale)
        return made(numbers, 32, narrow, 8.0 * narrow.float() + offset * ratio)

    def product(rows: Tensor, form: tuple[Tensor, int, Tensor, Tensor | None]) -> Tensor:
        numbers, group, pairs, rest = form
        output: Tensor = operator(rows, numbers, group, pairs)
        return output if rest is None else output.addmm_(grouped_weights.group_sums(rows, group), rest)

    return pack if facts["weight_scheme"] != "gguf" else pack_gguf, product


def int8(facts: Facts) -> tuple[Pack, Product]:
    """The product of torch with codes of eight bits."""
    operator = torch.ops.aten._weight_int8pack_mm.default

    def pack(codes: Codes) -> tuple[tuple[Tensor, Tensor], int]:
        numbers = (codes.numbers ^ 128).view(torch.int8)
        return (numbers, codes.scale.to(torch.bfloat16).reshape(-1)), numbers.nbytes

    return pack, lambda rows, form: operator(on_boundary(rows, 32), *form)


_SPREAD = many("tokens", of="top_k", over="experts")


def _load_experts(facts: Facts) -> Callable[..., Any]:
    dtypes = _dtypes(facts, lambda facts: not _SPREAD(facts))
    platform, whole, linear = str(facts["platform"]), bool(facts["requires_grad"]), linear_for(facts)

    def products(stack: Stack) -> Products:
        run = dequantizing(stack.of, (stack.shape[1], stack.shape[2]), dtypes, platform, whole=whole, linear=linear)
        return Products(stack.shape[0], lambda rows, number: run(rows, stack.given.of_expert(number)))

    return looped(facts, lambda given: map(products, weights_of(given, given["input"].dtype)))


_OF_INT8 = (
    limit.dtype("bfloat16"),
    limit.one_of("weight_bits", 8),
    limit.one_of("weight_zeros", "none"),
    limit.one_of("weight_group", 0),
)

_DENSE = FLOATS, MAY_BE_DENSE, ROWS_APART

KERNELS = (
    grouped(
        "torch.int4pack_mm",
        TORCH,
        int4,
        45,
        limit.cpu_feature("avx2"),
        limit.dtype("bfloat16"),
        grouped_weights.IN_FOUR_BITS,
        limit.dim("rows", max=128),
        *limit.dims("weight_group", "in_features", multiple=32),
        limit.dim("out_features", multiple=16),
        graph_safe=False,
    ),
    grouped(
        "torch.cuda.int4pack_mm",
        TORCH,
        int4,
        30,
        limit.arch(min=(8, 0)),
        limit.dtype("bfloat16"),
        grouped_weights.IN_FOUR_BITS,
        limit.dim("rows", max=64),
        limit.dim("weight_group", multiple=32),
        limit.dim("in_features", multiple=128),
        limit.dim("out_features", multiple=8),
        limit.aligned(16, "input"),
        platform="cuda",
    ),
    grouped(
        "torch.int4pack_mm_gguf",
        TORCH,
        int4,
        45,
        limit.cpu_feature("avx2"),
        limit.dtype("bfloat16"),
        limit.one_of("weight_kind", *AFFINE),
        limit.dim("rows", max=128),
        limit.dim("out_features", multiple=16),
        operation="gguf",
        graph_safe=False,
    ),
    grouped(
        "torch.int8pack_mm_rows",
        TORCH,
        int8,
        45,
        *_OF_INT8,
        limit.dim("rows", max=64),
        limit.dim("in_features", multiple=16),
        accepts=("weight_format", "bias", "group_index", "packed"),
        graph_safe=False,
    ),
    kernel(
        "torch.experts_dequantized",
        grouped_weights.EITHER,
        _load_experts,
        FLOATS,
        accepts=(*grouped_weights.ACCEPTS, *grouped_weights.TENSORS),
        grad=True,
        graph_safe=False,
        handles_negated=True,
        priority=20,
    ),
    experts_of(
        "torch.experts_int4",
        TORCH,
        int4,
        45,
        limit.cpu_feature("avx2"),
        limit.dtype("bfloat16"),
        grouped_weights.IN_FOUR_BITS,
        *limit.dims("weight_group", "hidden", "inner_features", multiple=32),
    ),
    experts_of("torch.experts_int8", TORCH, int8, 45, *_OF_INT8, *limit.dims("hidden", "inner_features", multiple=16)),
    *(
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
    ),
    kernel(
        "torch.kept_quant",
        QUANTIZED[None].name,
        _load_kept,
        limits=(limit.platform("cpu"), *_DENSE),
        accepts=("bias", "out_dtype", "packed"),
        priority=25,
    ),
    *(
        grouped(f"torch.kept_{name}", TORCH, _kept, 25, *_DENSE, operation=name, of_codes=False)
        for name in FORMATTED
        if FORMATTED[name].name not in grouped_weights.ROUNDING + grouped_weights.ROUNDING_GGUF
    ),
)
