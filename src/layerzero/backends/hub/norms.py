"""kernels-community/rmsnorm for CPUs and Intel GPUs, kernels-community/layer-norm for NVIDIA's.

Read: rmsnorm/torch-ext and rmsnorm_cpu, layer-norm/torch-ext and layer_norm/ln_api.cpp of
huggingface/kernels-community, commit 40d4194f (2026-08). ``apply_rms_norm`` reads whole vectors of
a dense row with a weight of the same dtype.
``dropout_add_ln_fwd`` is FlashAttention's dropout_layer_norm: two axes, rows of multiples of 8 up to 8192 elements.
Library: Apache-2.0 and BSD-3-Clause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from layerzero.backends.hub.build import Build
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel

_DTYPES = limit.dtype("float32", "float16", "bfloat16")


def kernels(build: Build) -> Sequence[Kernel]:
    """Declare what the repository serves."""
    return _rmsnorm(build) if build.name == "rmsnorm" else _layer_norm(build)


def _rmsnorm(build: Build) -> Sequence[Kernel]:
    def load(facts: Facts) -> Callable[..., Any]:
        compute, hidden = build.module().apply_rms_norm, facts.size("hidden")

        def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
            output: Tensor = compute(input.view(-1, hidden), weight, eps)
            return output.view(input.shape)

        return run

    limits = (
        limit.dtype("float32", "bfloat16") if build.compiled else _DTYPES,
        limit.contiguous("input", "weight"),
        limit.dim("hidden", multiple=32),
    )
    return (build.kernel("rms_norm", "norm.rms", load=load, accepts=("eps",), limits=limits),)


def _layer_norm(build: Build) -> Sequence[Kernel]:
    def load_rms(facts: Facts) -> Callable[..., Any]:
        norm, hidden = _forward(build, rms=True), facts.size("hidden")

        def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
            return norm(input.view(-1, hidden), weight, None, eps).view(input.shape)

        return run

    def load_layer(facts: Facts) -> Callable[..., Any]:
        norm, hidden = _forward(build, rms=False), facts.size("hidden")

        def run(
            input: Tensor, *, normalized_shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float
        ) -> Tensor:
            rows = input.view(-1, hidden)
            return norm(rows, weight.view(hidden), bias.view(hidden), eps).view(input.shape)

        return run

    shared = (_DTYPES, limit.dim("hidden", max=8192, multiple=8))
    return (
        build.kernel(
            "rms_norm",
            "norm.rms",
            load=load_rms,
            accepts=("eps",),
            limits=(*shared, limit.contiguous("input", "weight"), limit.aligned(16, "input", "weight")),
        ),
        build.kernel(
            "layer_norm",
            "norm.layer",
            load=load_layer,
            accepts=("normalized_shape", "weight", "bias", "eps"),
            limits=(
                *shared,
                limit.contiguous("input", "weight", "bias"),
                limit.aligned(16, "input", "weight", "bias"),
                limit.one_of("weight", "float"),
                limit.one_of("bias", "float"),
            ),
        ),
    )


def _forward(build: Build, *, rms: bool) -> Callable[[Tensor, Tensor, Tensor | None, float], Tensor]:
    """The norm alone: no dropout, no residual, no scales of rows and columns, no subsets."""
    compute = build.module().dropout_add_ln_fwd

    def run(rows: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        output: Tensor = compute(rows, weight, bias, None, None, None, None, 0.0, eps, 1.0, 0, None, False, rms)[0]
        return output

    return run
