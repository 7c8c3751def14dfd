"""vLLM's int8 on CUDA: rows by scales of their own, all by one that is given, and CUTLASS' products of what they give.

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
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.torch.quantized_linear import on_boundary, quantized_rows
from layerzero.backends.vllm.library import STABLE, VLLM, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.ops.linear.quantized import QUANTIZED
from layerzero.ops.quantize.formats import FORMATS


def _library() -> Any:
    return operators("_C.abi3.so", "_C")


def _rows() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Rows as int8, and the scale of each, (rows, 1)."""
    operator = _library().dynamic_scaled_int8_quant.default

    def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
        output = torch.empty_like(rows, dtype=torch.int8)
        scale = rows.new_empty((len(rows), 1), dtype=torch.float32)
        operator(output, rows, scale, None)
        return output, scale.masked_fill_(scale == 0.0, 1.0)

    return quantized


def _load_rows(facts: Facts) -> Callable[..., Any]:
    features = facts.size("features")
    quantized = _rows()

    def run(input: Tensor, *, per: str) -> tuple[Tensor, Tensor]:
        output, scale = quantized(input.view(-1, features))
        return output.view(input.shape), scale.view(*input.shape[:-1], 1)

    return run


def _load_given(facts: Facts) -> Callable[..., Any]:
    operator, features = _library().static_scaled_int8_quant.default, facts.size("features")

    def run(input: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        output = torch.empty_like(input, dtype=torch.int8)
        operator(output.view(-1, features), input.view(-1, features), scale, None)
        return output, scale.clone()

    return run


def _float8_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    return quantized_rows(rows.to(torch.float32), FORMATS["fp8_e4m3"])


def _load_linear(facts: Facts) -> Callable[..., Any]:
    of_int8 = _rows()  # first: it finds out whose the name space is
    quantized = of_int8 if facts["operation"] == QUANTIZED["int8"].name else _float8_rows
    operator = operators(f"{STABLE}.abi3.so", "_C", STABLE).cutlass_scaled_mm.default
    features, outputs, ndim = facts.size("in_features"), facts.size("out_features"), facts["input_ndim"]

    def run(input: Tensor, weight: Tensor, weight_scale: Tensor, *, bias: Tensor | None = None) -> Tensor:
        rows = input if ndim == 2 else input.view(-1, features)
        codes, scale = quantized(rows)
        output = rows.new_empty((len(rows), outputs))
        operator(output, codes, weight.t(), scale, on_boundary(weight_scale.reshape(-1)), bias)
        return output if ndim == 2 else output.view(*input.shape[:-1], -1)

    return run


_LIMITS = (limit.dtype("float32", "float16", "bfloat16"), limit.contiguous("input"), limit.aligned(16, "input"))

KERNELS = (
    VLLM.kernel(
        "vllm.quantize_rows",
        "quantize.int8",
        _load_rows,
        accepts=("per",),
        limits=(*_LIMITS, limit.one_of("per", "row")),
        priority=55,
    ),
    VLLM.kernel(
        "vllm.quantize_by_one",
        "quantize.int8",
        _load_given,
        accepts=("scale",),
        limits=(*_LIMITS, limit.one_of("scale", "float"), limit.one_of("granularity", "tensor")),
        priority=55,
    ),
    VLLM.kernel(
        "vllm.int8_linear",
        QUANTIZED["int8"].name,
        _load_linear,
        limit.arch(min=(8, 0), max=(9, 9)),  # its products of int8 end with Hopper
        limit.dtype("float16", "bfloat16"),
        limit.dim("in_features", multiple=16),
        limit.dim("out_features", multiple=16),
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
        limit.dim("in_features", multiple=16),
        limit.dim("out_features", multiple=16),
        limit.contiguous("input", "weight", "bias"),
        limit.aligned(16, "input", "weight", "bias"),
        accepts=("bias",),
        priority=32,  # 1.01 to 1.25 times as fast as torch's in 6 of 7 sizes of Llama-3-8B (H200, 2026-11-26)
    ),
)
