"""kernels-community/fp8-fbgemm and finegrained-fp8: Triton kernels that quantise to float8 by rows and by blocks.

Read: fp8_fbgemm/quantizer.py and finegrained_fp8/utils.py of huggingface/kernels-community, commit 40d4194f (2026-08).
``quantize_fp8_per_row`` gives the scale of each row, ``fp8_act_quant`` that of each block of a row; both are what
the numbers are multiplied with afterwards. Neither ran here. The repositories for weights (gptq, eetq, bitsandbytes)
have formats of their own, which no operation of LayerZero has.
Library: BSD-3-Clause and Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from layerzero.backends.compiler_caches import triton_cache
from layerzero.backends.hub.build import Build
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel

_LIMITS = (limit.arch(min=(8, 9)), limit.dtype("float32", "float16", "bfloat16"), limit.contiguous("input"))


def kernels(build: Build) -> Sequence[Kernel]:
    """Declare what the repository serves."""
    load, name, per = (_load_rows, "rows", "row") if build.name == "fp8-fbgemm" else (_load_blocks, "blocks", "block")
    return (
        build.kernel(
            f"quantize_{name}",
            "quantize.fp8_e4m3",
            load=lambda facts: load(build, facts),
            accepts=("per",) if per == "row" else ("per", "block_size"),
            limits=(*_LIMITS, limit.one_of("per", per), limit.absent("scale")),
            jit=True,
            cache_folder=triton_cache,
        ),
    )


def _load_rows(build: Build, facts: Facts) -> Callable[..., Any]:
    compute, features = build.module().quantize_fp8_per_row, facts.size("features")

    def run(input: Tensor, *, per: str) -> tuple[Tensor, Tensor]:
        output, scale = compute(input.view(-1, features))
        return output.view(input.shape), scale.view(*input.shape[:-1], 1)

    return run


def _load_blocks(build: Build, facts: Facts) -> Callable[..., Any]:
    compute = build.module().fp8_act_quant

    def run(input: Tensor, *, per: str, block_size: int) -> tuple[Tensor, Tensor]:
        output, scale = compute(input, block_size)
        return output, scale

    return run
