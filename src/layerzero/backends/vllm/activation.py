"""vLLM's activations on CUDA, loaded as an operator library beside an installed vllm, which is never imported.

Read: the operators that ``vllm/_C.abi3.so`` of 0.20.0 defines, and csrc/activation_kernels.cu. They read dense rows,
whatever the strides say; where a row is whole vectors of 16 bytes they load those from wherever the data begins, so it
has to begin at 16. A block a row; row starts in 64 bits. gpt-oss's gate comes by turns, clamped by the device's
minimum, which drops a NaN: it is left out.
Library: vllm 0.20, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from layerzero.backends.vllm.library import VLLM, operators
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel


def _load_silu_mul(facts: Facts) -> Callable[..., Any]:
    return _joined(operators("_C.abi3.so", "_C").silu_and_mul.default)


def _load_gelu_mul(facts: Facts) -> Callable[..., Any]:
    library = operators("_C.abi3.so", "_C")
    return _joined((library.gelu_tanh_and_mul if facts["approximate"] == "tanh" else library.gelu_and_mul).default)


def _joined(operator: Callable[..., None]) -> Callable[..., Any]:
    def run(input: Tensor, **_: Any) -> Tensor:
        output = input.new_empty((*input.shape[:-1], input.shape[-1] // 2))
        operator(output, input)
        return output

    return run


KERNELS = tuple(
    Kernel(
        id=f"vllm.{name}",
        operations=(f"mlp.{name}.joined",),
        backend=VLLM,
        load=load,
        accepts=accepts,
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(8, 0)),
            limit.dtype("float32", "float16", "bfloat16"),
            limit.contiguous("input"),
            limit.aligned(16, "input"),
            limit.dim("joined", multiple=8),  # no copy aligns rows of other lengths
        ),
        priority=85,
    )
    for name, load, accepts in (("silu_mul", _load_silu_mul, ()), ("gelu_mul", _load_gelu_mul, ("approximate",)))
)
