"""FlashInfer's gates, called as the modules that it compiles with nvcc on first use: one for each activation.

``flashinfer.silu_and_mul`` goes through an operator registration; here the module is called directly. Read:
flashinfer-python 0.7.2, jit/activation.py and include/flashinfer/activation.cuh: float16 and bfloat16 only; dense rows;
vectors as wide as divide a row, loaded from wherever the data begins, so it has to begin at 16 bytes; row starts in 64
bits. It makes the tensors' device the current one and leaves it so, hence the plan's guard where there are several.
Library: flashinfer-python 0.7.2, Apache-2.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from layerzero.backends.flashinfer.attention import FLASHINFER
from layerzero.backends.flashinfer.modules import is_built
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel


def _activation(facts: Facts) -> str:
    """FlashInfer's name for what a call asks for."""
    if facts["operation"] == "mlp.silu_mul.joined":
        return "silu"
    return "gelu_tanh" if facts["approximate"] == "tanh" else "gelu"


def _module(facts: Facts) -> Hashable:
    return facts.device.sm, _activation(facts)


def _prebuilt(facts: Facts) -> bool:
    return is_built(f"{_activation(facts)}_and_mul", facts)


@functools.cache
def _function(activation: str) -> Callable[..., None]:
    from flashinfer.jit import gen_act_and_mul_module

    module = gen_act_and_mul_module(activation).build_and_load()
    function: Callable[..., None] = getattr(module, f"{activation}_and_mul")
    return function


def _load(facts: Facts) -> Callable[..., Any]:
    operator, sm = _function(_activation(facts)), facts.device.sm
    overlap = sm is not None and sm >= (9, 0)  # it may start before the kernel ahead of it ends: it waits by itself

    def run(input: Tensor, **_: Any) -> Tensor:
        output = input.new_empty((*input.shape[:-1], input.shape[-1] // 2))
        operator(output, input, overlap)
        return output

    return run


KERNELS = tuple(
    Kernel(
        id=f"flashinfer.{name}",
        operations=(f"mlp.{name}.joined",),
        backend=FLASHINFER,
        load=_load,
        accepts=accepts,
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("float16", "bfloat16"),
            limit.contiguous("input"),
            limit.aligned(16, "input"),
            limit.dim("joined", multiple=8),  # no copy aligns rows of other lengths
        ),
        deterministic=True,
        build_key=_module,
        prebuilt=_prebuilt,
        device_guard=False,
        priority=90,
    )
    for name, accepts in (("silu_mul", ()), ("gelu_mul", ("approximate",)))
)
