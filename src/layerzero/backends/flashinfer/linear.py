"""FlashInfer's product for a few rows, TensorRT-LLM's tinygemm: bfloat16, 16 outputs by 8 rows a block, from sm_90 on.

One module, compiled with nvcc on first use and called directly, not through ``flashinfer.gemm.tinygemm_bf16`` and its
checks of every call. Read: flashinfer-python 0.7.2, gemm/routergemm.py and csrc/tinygemm2.cu: dense tensors through TMA
descriptors, made on the host for each call, so they begin at 16 bytes; inputs in steps of 64, outputs of 16; the
launch does not set the device. It is never told to start early: its documentation says that it hangs beside kernels
that do not.
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


@functools.cache
def _module() -> Any:
    from flashinfer.jit import gen_tinygemm2_module

    return gen_tinygemm2_module().build_and_load()


def _key(facts: Facts) -> Hashable:
    """One module for every size."""
    return "tinygemm2", facts.device.sm


def _prebuilt(facts: Facts) -> bool:
    return is_built("tinygemm2", facts)


def _load(facts: Facts) -> Callable[..., Any]:
    module = _module()
    with_bias, without = module.tinygemm2_op, module.tinygemm2_nobias_op
    inputs, outputs, ndim = facts.size("in_features"), facts.size("out_features"), facts["input_ndim"]

    def run(input: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
        rows = input if ndim == 2 else input.view(-1, inputs)
        output = rows.new_empty((rows.shape[0], outputs))
        if bias is None:
            without(rows, weight, output, False)
        else:
            with_bias(rows, weight, bias, output, False)
        return output if ndim == 2 else output.view(*input.shape[:-1], outputs)

    return run


KERNELS = (
    Kernel(
        id="flashinfer.tinygemm",
        operations=("mlp.linear",),
        backend=FLASHINFER,
        load=_load,
        accepts=("bias",),
        limits=(
            limit.platform("cuda"),
            limit.arch(min=(9, 0)),
            limit.dtype("bfloat16"),
            limit.dim("rows", max=64),  # beyond, each block of 8 rows reads the weight again
            limit.dim("in_features", multiple=64),
            limit.dim("out_features", multiple=16),
            limit.contiguous("input", "weight", "bias"),
            limit.aligned(16, "input", "weight"),
        ),
        deterministic=True,
        build_key=_key,
        prebuilt=_prebuilt,
        device_guard=False,
        priority=40,
    ),
)
