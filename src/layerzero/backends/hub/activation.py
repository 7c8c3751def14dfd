"""kernels-community/activation: gates and activations with vLLM's signatures, which write into a tensor that is given.

Read: activation/torch-ext/activation/__init__.py and activation_cpu of huggingface/kernels-community, commit 40d4194f
(2026-08). On a CPU the repository has ``silu_and_mul`` alone, with AVX512-BF16 for bfloat16 and torch's own operators
else. A build that has no shared library may run anywhere; its limits are those of the strictest build.
Library: vLLM's csrc/activation_kernels.cu, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from layerzero.backends.hub.build import Build
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel


def kernels(build: Build) -> Sequence[Kernel]:
    """Declare what the repository serves on the build's platform."""

    def load(name: str, *, halves: bool) -> Callable[[Facts], Callable[..., Any]]:
        def loaded(facts: Facts) -> Callable[..., Any]:
            function = name
            if name.startswith("gelu") and facts["approximate"] == "tanh":
                function = name.replace("gelu", "gelu_tanh")
            compute = getattr(build.module(), function)

            def run(input: Tensor, **_: object) -> Tensor:
                width = input.shape[-1] // 2 if halves else input.shape[-1]
                output = input.new_empty((*input.shape[:-1], width))
                compute(output, input)
                return output

            return run

        return loaded

    dense = (limit.dtype("float32", "float16", "bfloat16"), limit.contiguous("input"), limit.aligned(16, "input"))
    halves = (*dense, limit.dim("joined", multiple=8))
    rows = (*dense, limit.dim("features", multiple=8))
    found = [build.kernel("silu_mul", "mlp.silu_mul.joined", load=load("silu_and_mul", halves=True), limits=halves)]
    if build.platform == "cpu" and build.compiled:
        return found
    given = {"accepts": ("approximate",)}
    return [
        *found,
        build.kernel("gelu_mul", "mlp.gelu_mul.joined", load=load("gelu_and_mul", halves=True), limits=halves, **given),
        build.kernel("gelu", "activation.gelu", load=load("gelu", halves=False), limits=rows, **given),
        build.kernel("silu", "activation.silu", load=load("silu", halves=False), limits=rows),
    ]
