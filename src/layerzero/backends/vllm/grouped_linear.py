"""vLLM's products with codes by group on CUDA: Marlin, Machete, ExLlama's of GPTQ, and AutoAWQ's.

Operators and their arguments are those that vllm 0.20.0's ``_C.abi3.so`` registers; limits follow
csrc/quantization/{marlin,machete,gptq,awq} and, of Marlin, the instantiations in that library: codes of 4 and 8 bits
with a scale for each row or for 32, 64 or 128 numbers, zero points with 4 bits alone. Machete is Hopper's alone, and
adds zero points as ``-scale * zero`` in the dtype of the rows. ExLlama's kernel adds up in float16 by atomics, and
makes the wide weight for more than 50 rows; AutoAWQ's writes eight partial sums.

vLLM's int8 on CUDA: rows by scales of their own, all by one that is given, and CUTLASS' products of what they give.

Argument orders are those of csrc/torch_bindings.cpp and csrc/libtorch_stable/torch_bindings.cpp: vLLM 0.20 ships
``cutlass_scaled_mm`` in a second library, which adds to the first one's name space. All three conform on an H200 (torch
2.11, 2026-11-23). Before Hopper, where none of them ran, the product reads a scale for each output and the bias by
vectors of up to 16 bytes. Rows of zeros get a scale of 0, which is made 1 here. Its operators that
quantize to float8 are left out: they clamp by fminf, which makes the largest number of NaN
(csrc/quantization/w8a8/fp8/common.cuh), and what computes NaN should say so. CUTLASS' product of float8 takes what
torch quantized, from Ada on, with results in float16, too, where torch's has bfloat16 alone; it never ran here.
Library: vllm 0.20, Apache-2.0; CUTLASS, BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.grouped_weights import IN_FOUR_BITS, Locks, Product, bytes_of, grouped, regrouped
from layerzero.backends.shape_cache import give_context
from layerzero.backends.torch.quantized_linear import on_boundary, quantized_rows
from layerzero.backends.vllm.library import STABLE, VLLM, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.ops.linear.packed import Pack
from layerzero.ops.linear.quantized import QUANTIZED
from layerzero.ops.quantize.formats import FORMATS
from layerzero.ops.quantize.groups import GROUPED, marlin_codes, marlin_scale, marlin_zero
from layerzero.ops.quantize.weight_format import Codes, WeightFormat, packed

UNSIGNED = {4: 1125899906843648, 8: 1125899906844672}
BIASED = {4: 1125899907892224, 8: 1125899923621888}
"""Numbers of ``scalar_types.uint4`` and ``uint8``, and of ``uint4b8`` and ``uint8b128`` (vllm/scalar_type.py)."""


def marlin(facts: Facts, kind: int) -> Product:
    """Marlin's product with (words, scale, zero points or none, second scale or none, locks)."""
    operator = operators("_C.abi3.so", "_C").marlin_gemm.default
    inputs, outputs = facts.size("in_features"), facts.size("out_features")

    def run(rows: Tensor, form: tuple[Any, ...]) -> Tensor:
        words, scale, zero, second, locks = form
        of_zeros = kind if zero is None else UNSIGNED[4]
        output: Tensor = operator(
            *(rows, None, words, None, scale, None, second, zero, None, None, locks.now(), of_zeros),
            *(len(rows), outputs, inputs, True, False, True, False),  # all of K, no atomics, sums in float32
        )
        return output

    return run


def multiprocessors(device: torch.device) -> int:
    """How many Marlin has blocks for, a lock each."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def marlin_form(
    words: Tensor, scale: Tensor, zero: Tensor | None = None, second: Tensor | None = None
) -> tuple[tuple[Any, ...], int]:
    """What :func:`marlin` multiplies with, its locks among it, and the bytes of that."""
    locks = Locks(multiprocessors(words.device), words.device)
    return (words, scale, zero, second, locks), bytes_of(words, scale, zero, second)


def _marlin(facts: Facts) -> tuple[Pack, Product]:
    dtype, bits = facts.tensors["input"].dtype, max(facts.size("weight_bits"), 4)

    def pack(codes: Codes) -> tuple[tuple[Any, ...], int]:
        if codes.scale.shape[1] > 1:
            codes = regrouped(codes, (128, 64, 32))
        words, scale = marlin_codes(codes.numbers, bits), marlin_scale(codes.scale, dtype)
        zero = None if (points := codes.zero_points) is None else marlin_zero(points)
        return marlin_form(words, scale, zero)

    return pack, marlin(facts, BIASED[bits])


def _machete(facts: Facts) -> tuple[Pack, Product]:
    library, bits = operators("_C.abi3.so", "_C"), max(facts.size("weight_bits"), 4)
    operator, prepack, dtype = library.machete_mm.default, library.machete_prepack_B.default, facts["dtype"]

    def pack(codes: Codes) -> tuple[tuple[Any, ...], int]:
        whole = codes.scale.shape[1] == 1
        codes = codes if whole else regrouped(codes, (128, 64))
        scale, zero, kind = codes.scale.t().to(dtype).contiguous(), None, BIASED[bits]  # type: ignore[call-overload]
        if (points := codes.zero_points) is not None:
            zero, kind = (points.t().to(scale.dtype) * -scale).contiguous(), UNSIGNED[bits]
        words = prepack(packed(codes.numbers, bits).t(), dtype, kind, dtype)
        return (words, kind, scale, zero, -1 if whole else codes.group), bytes_of(words, scale, zero)

    def product(rows: Tensor, form: tuple[Any, ...]) -> Tensor:
        words, kind, scale, zero, group = form
        give_context(rows)
        output: Tensor = operator(rows, words, kind, None, scale, zero, group, None, None, None)
        return output

    return pack, product


def _as_file(codes: Codes, scheme: str) -> tuple[Tensor, Tensor, Tensor]:
    """Words, zero points and float16 scales as a file of a scheme has them."""
    of = WeightFormat(scheme, bits=codes.bits, group=codes.group, zeros="stored")
    made = GROUPED[scheme].encoded(of, replace(codes, group_index=None))
    assert made.scale is not None
    assert made.zero is not None
    return made.data, made.zero, made.scale.to(torch.float16)


def _exllama(facts: Facts) -> tuple[Pack, Product]:
    library, bits = operators("_C.abi3.so", "_C"), max(facts.size("weight_bits"), 4)
    operator, shuffle = library.gptq_gemm.default, library.gptq_shuffle.default

    def pack(codes: Codes) -> tuple[tuple[Tensor, ...], int]:
        words, zero, scale = _as_file(codes, "gptq")
        in_order = words.new_empty(0)
        shuffle(words, in_order, bits)
        return (words, zero, scale, in_order), bytes_of(words, zero, scale)

    return pack, lambda rows, form: operator(rows, *form, True, True, bits)


def _awq(facts: Facts) -> tuple[Pack, Product]:
    operator = operators("_C.abi3.so", "_C").awq_gemm.default

    def pack(codes: Codes) -> tuple[tuple[Tensor, ...], int]:
        words, zero, scale = _as_file(codes, "awq")
        return (words, scale, zero), bytes_of(words, zero, scale)

    return pack, lambda rows, form: operator(rows, *form, 8)


def wide_weight(facts: Facts) -> int:
    """The bytes of the weight in 16 bits, which is made for the time of a call."""
    return 2 * facts.size("in_features") * facts.size("out_features")


_HALVES = (limit.dtype("float16", "bfloat16"), limit.aligned(16, "input"))
MARLIN = (*_HALVES, limit.dim("in_features", multiple=128), limit.dim("out_features", multiple=64))
"""What Marlin demands of every weight."""

_FLOAT16 = (limit.dtype("float16"), limit.aligned(16, "input"))


Operator = Callable[..., None]


def _operator(_: Facts, name: str) -> Operator:
    operator: Operator = getattr(operators("_C.abi3.so", "_C"), name).default
    return operator


_LEAST = 2.0**-128
"""The operators multiply by what 127 is over a row's largest number: up to this scale, that is infinite."""


def _for_sixteen(rows: Tensor) -> Tensor:
    """Rows from a multiple of 16 numbers on, on a GPU; a copy where they begin elsewhere.

    A GPU's operator reads on from such a multiple and stores 16 codes at once, wherever that is in the result. Off 16
    bytes that is a misaligned address (``vectorize_with_alignment<16>`` in
    csrc/quantization/w8a8/int8/scaled_quant.cu of 0.20.0).
    """
    return rows if rows.is_cpu else on_boundary(rows, 16 * rows.element_size())


def _rows(operator: Operator) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Rows as int8, and the scale of each, (rows, 1).

    On a GPU rows of numbers below 4e-37 come out as -128, 0 or 127 times 3e-39: to look for them would be to wait, and
    to quantize twice without a look takes 3.5 to 5.3 times as long (H200, 2026-12-01).
    """

    def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = _for_sixteen(rows)
        output = rows.new_empty(rows.shape, dtype=torch.int8)
        scale = rows.new_empty((len(rows), 1), dtype=torch.float32)
        operator(output, rows, scale, None)
        if not rows.is_cpu:
            return output, scale.masked_fill_(scale == 0.0, 1.0)
        if len(rows) and bool(scale.amin() > _LEAST):
            return output, scale
        output.mul_(scale != 0.0)  # numbers below 9e-44 have that scale, too; to fill takes 20 times as long
        if bool((least := scale.masked_fill_(scale == 0.0, 1.0)[:, 0] <= _LEAST).any()):
            codes, scale[least] = quantized_rows(rows[least].to(torch.float32), FORMATS["int8"])
            output[least] = codes.to(torch.int8)
        return output, scale

    return quantized


def int8_kernels(
    backend: Backend, prefix: str, operator: Callable[[Facts, str], Operator], *limits: limit.Limit
) -> tuple[Kernel, Kernel]:
    """Numbers as int8, rows by scales of their own or all by one that is given: vLLM's operators of any device."""

    def load_rows(facts: Facts) -> Callable[..., Any]:
        quantized, features = _rows(operator(facts, "dynamic_scaled_int8_quant")), facts.size("features")

        def run(input: Tensor, *, per: str) -> tuple[Tensor, Tensor]:
            output, scale = quantized(input.view(-1, features))
            return output.view(input.shape), scale.view(*input.shape[:-1], 1)

        return run

    def load_given(facts: Facts) -> Callable[..., Any]:
        compute, features = operator(facts, "static_scaled_int8_quant"), facts.size("features")

        def run(input: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
            output = torch.empty_like(input, dtype=torch.int8)
            compute(output.view(-1, features), _for_sixteen(input.view(-1, features)), scale, None)
            return output, scale.clone()

        return run

    by_row, by_one = limit.one_of("per", "row"), (limit.one_of("scale", "float"), limit.one_of("granularity", "tensor"))
    shared: dict[str, Any] = {"limits": limits, "priority": 55}
    return (
        backend.kernel(f"{prefix}.quantize_rows", "quantize.int8", load_rows, by_row, accepts=("per",), **shared),
        backend.kernel(f"{prefix}.quantize_by_one", "quantize.int8", load_given, *by_one, accepts=("scale",), **shared),
    )


def _float8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    return quantized_rows(rows.to(torch.float32), FORMATS["fp8_e4m3"])


def _load_linear(facts: Facts) -> Callable[..., Any]:
    of_int8 = facts["operation"] == QUANTIZED["int8"].name
    by_int8 = _rows(_operator(facts, "dynamic_scaled_int8_quant"))  # first: it finds out whose the name space is
    quantized = by_int8 if of_int8 else _float8_rows
    operator = operators(f"{STABLE}.abi3.so", "_C", STABLE).cutlass_scaled_mm.default
    features, outputs, ndim = facts.size("in_features"), facts.size("out_features"), facts["input_ndim"]

    def run(input: Tensor, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None = None) -> Tensor:
        rows = input if ndim == 2 else input.view(-1, features)
        codes, scale = quantized(rows)
        if of_int8:  # the operator's own scale passes over NaN; 0 times NaN or infinity is NaN, as in the reference
            scale.add_(rows.abs().amax(-1, keepdim=True), alpha=0.0)
        output = rows.new_empty((len(rows), outputs))
        operator(output, codes, weight.t(), scale, on_boundary(weight_scale.reshape(-1)), bias)
        return output if ndim == 2 else output.view(*input.shape[:-1], -1)

    return run


_LIMITS = (limit.dtype("float32", "float16", "bfloat16"), limit.contiguous("input"), limit.aligned(16, "input"))

KERNELS = (
    grouped(
        "vllm.marlin", VLLM, _marlin, 40, *MARLIN, limit.dim("weight_group", multiple=32), IN_FOUR_BITS, platform="cuda"
    ),
    grouped(
        "vllm.marlin_int8",
        VLLM,
        _marlin,
        40,
        *MARLIN,
        limit.dim("weight_group", multiple=32),
        limit.one_of("weight_bits", 8),
        limit.one_of("weight_zeros", "none"),
        platform="cuda",
        accepts=("weight_format", "bias", "group_index", "packed"),
    ),
    grouped(
        "vllm.machete",
        VLLM,
        _machete,
        45,
        limit.arch(min=(9, 0), max=(9, 0)),
        *_HALVES,
        limit.one_of("weight_bits", 2, 3, 4, 8),
        *limit.dims("weight_group", "in_features", multiple=64),
        limit.dim("out_features", multiple=128),
        platform="cuda",
    ),
    grouped(
        "vllm.gptq",
        VLLM,
        _exllama,
        22,
        *_FLOAT16,
        limit.one_of("weight_bits", 2, 3, 4, 8),
        *limit.dims("weight_group", "in_features", "out_features", multiple=32),
        platform="cuda",
        deterministic=False,
        workspace_bytes=wide_weight,
    ),
    grouped(
        "vllm.awq",
        VLLM,
        _awq,
        21,
        *_FLOAT16,
        IN_FOUR_BITS,
        limit.dim("weight_group", one_of=(32, 64, 128)),
        limit.dim("in_features", multiple=32),
        limit.dim("out_features", multiple=128),  # of 64 it has a kernel, too, but groups must divide the outputs
        platform="cuda",
        workspace_bytes=lambda facts: 16 * facts.size("rows") * facts.size("out_features"),
    ),
    *int8_kernels(VLLM, "vllm", _operator, *_LIMITS),
    VLLM.kernel(
        "vllm.int8_linear",
        QUANTIZED["int8"].name,
        _load_linear,
        limit.arch(min=(8, 0), max=(9, 9)),  # its products of int8 end with Hopper
        limit.dtype("float16", "bfloat16"),
        *limit.dims("in_features", "out_features", multiple=16),
        limit.contiguous("input", "weight", "bias"),
        limit.aligned(16, "input", "weight", "bias"),
        accepts=("bias",),
        priority=55,
    ),
    VLLM.kernel(
        "vllm.fp8_linear",
        QUANTIZED["fp8_e4m3"].name,
        _load_linear,
        limit.arch(min=(8, 9)),
        limit.dtype("bfloat16"),  # Hopper adds up float8 in 14 bits: float16 was off by 1.6 of its tolerance, H200
        *limit.dims("in_features", "out_features", multiple=16),
        limit.contiguous("input", "weight", "bias"),
        limit.aligned(16, "input", "weight", "bias"),
        accepts=("bias",),
        priority=32,  # 1.01 to 1.25 times as fast as torch's in 6 of 7 sizes of Llama-3-8B (H200, 2026-11-26)
    ),
)
