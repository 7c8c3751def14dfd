"""Liger's Triton gates, on NVIDIA's and AMD's GPUs: a block a row, whole rows in registers, float32 inside.

The forward functions are called without their autograd functions, whose backward passes write gradients over what was
saved. Those that read two tensors take one stride for all of them. A kernel compiles in about a second for each length
of rows, and again for what Triton specialises on.
Library: liger-kernel 0.8.5, BSD-2-Clause, arXiv:2410.10989; read line by line, hence one version only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from layerzero.backends.liger.norm import LIGER
from layerzero.backends.triton_cache import triton_cache
from layerzero.core import limits as limit
from layerzero.core.facts import MAX_ALIGNMENT_BYTES, Facts
from layerzero.core.kernel import Kernel


def _load_silu_mul(facts: Facts) -> Callable[..., Any]:
    if "up" not in facts.tensors:
        from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

        def together(input: Tensor) -> Tensor:
            output: Tensor = swiglu_fused_gate_up_forward(input)[1]
            return output

        return together
    from liger_kernel.ops.swiglu import swiglu_forward

    def apart(gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = swiglu_forward(gate, up)[2]
        return output

    return apart


def _load_gelu_mul(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.geglu import geglu_forward

    def run(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
        output: Tensor = geglu_forward(gate, up)[2]
        return output

    return run


def _specialised(facts: Facts) -> Hashable:
    """The length of a row is a constant to Triton, the alignment of data what it specialises on."""
    aligned = tuple(tensor.alignment_bytes == MAX_ALIGNMENT_BYTES for tensor in facts.tensors.values())
    return facts.device.sm, facts["operation"], facts["dtype"], facts.size("features"), aligned


KERNELS = tuple(
    Kernel(
        id=f"liger.{name}",
        operations=operations,
        backend=LIGER,
        load=load,
        accepts=accepts,
        limits=(
            limit.arch(min=(8, 0)),  # of NVIDIA's: Triton has no bfloat16 before
            limit.dtype("float32", "float16", "bfloat16"),
            limit.contiguous("input", "up"),
            limit.dim("features", max=65536),
            *limits,
        ),
        cache_folder=triton_cache,
        build_key=_specialised,
        priority=50,
    )
    for name, operations, load, accepts, limits in (
        ("silu_mul", ("mlp.silu_mul", "mlp.silu_mul.joined"), _load_silu_mul, (), ()),
        ("gelu_mul", ("mlp.gelu_mul",), _load_gelu_mul, ("approximate",), (limit.one_of("approximate", "tanh"),)),
    )
)
