"""Liger's Triton kernels for norms, on NVIDIA's and AMD's GPUs.

The forward functions are called without their autograd functions: those cost 60 us a call on an H200 host (2026-11-21).
Their backward passes have not been compared with the reference, and rms_norm's writes the gradient over the one it was
given unless told otherwise, so ``grad`` stays False. Casting mode ``gemma`` multiplies with the weight in float32, as
norm.rms does; ``llama`` rounds before it. The fused addition's kernel is launched from here, with the residual as its
second output: the function around it would make a new one. A kernel compiles in about a second for each power of two
of the row length, and again for what Triton specialises on: dtype, lengths that are multiples of 16, or 1.
H200, bfloat16, through the autograd functions: rms_norm 25 us at 1 x 4096 and 136 at 16384 x 8192 (torch 11 and 202),
layer_norm 15 at 64 x 4096 and 181 at 16384 x 8192 (torch 12 and 225).
Library: liger-kernel 0.8.5, BSD-2-Clause, arXiv:2410.10989; read line by line, hence one version only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.norm_limits import specialised
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel

LIGER = Backend(
    name="liger",
    summary="Liger's Triton kernels",
    import_name="liger_kernel",
    distribution="liger-kernel",
    versions="==0.8.5",
    tested=("0.8.5",),
    platforms=("cuda", "rocm"),
    install="pip install liger-kernel==0.8.5",
    homepage="https://github.com/linkedin/Liger-Kernel",
)


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:  # noqa: A002
        # float: Triton makes a constant of an integer, which cannot be cast as its kernel does
        output: Tensor = rms_norm_forward(input, weight, float(eps), 0.0, "gemma", None)[0]
        return output

    return run


def _load_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.fused_add_rms_norm import (
        _CASTING_MODE_GEMMA,
        _fused_add_rms_norm_forward_kernel,
    )
    from liger_kernel.ops.utils import calculate_settings

    rows, hidden = facts.size("rows"), facts.size("hidden")
    block, warps = calculate_settings(hidden)
    launch = _fused_add_rms_norm_forward_kernel[(rows,)]
    mode = _CASTING_MODE_GEMMA.value

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:  # noqa: A002
        output = torch.empty_like(input)
        scales = torch.empty(rows, dtype=torch.float32, device=input.device)
        # output, sum, input, residual, weight, scales: each with its stride; then eps, offset, casting mode
        launch(
            *(output, hidden, residual, hidden, input, hidden, residual, hidden, weight, 1, scales, 1),
            *(hidden, float(eps), 0.0, mode),
            BLOCK_SIZE=block,
            num_warps=warps,
            num_stages=2,
        )
        increment_version(residual)  # Triton writes behind autograd's back
        return output

    return run


def _load_layer_norm(facts: Facts) -> Callable[..., Any]:
    from liger_kernel.ops.layer_norm import layer_norm_forward

    hidden = facts.size("hidden")

    def run(
        input: Tensor,  # noqa: A002
        *,
        normalized_shape: tuple[int, ...],
        weight: Tensor,
        bias: Tensor,
        eps: float,
    ) -> Tensor:
        rows = input.view(-1, hidden)
        output: Tensor = layer_norm_forward(rows, weight.view(hidden), bias.view(hidden), float(eps))[0]
        return output.view(input.shape)

    return run


_LIMITS = (
    limit.arch(min=(8, 0)),  # of NVIDIA's: Triton has no bfloat16 before
    limit.dtype("float32", "float16", "bfloat16"),
    limit.contiguous("input", "residual", "weight", "bias"),
)
_WIDEST = 65536
# Rows shorter than a block of threads are read by several of them, and some could read what one has written already.
_IN_PLACE = limit.dim("hidden", min=512, max=_WIDEST)

KERNELS = (
    Kernel(
        id="liger.rms_norm",
        operations=("norm.rms",),
        backend=LIGER,
        load=_load_rms_norm,
        accepts=("eps",),
        limits=(*_LIMITS, limit.dim("hidden", max=_WIDEST)),
        deterministic=True,
        graph_safe=True,
        jit=True,
        build_key=specialised,
        priority=60,
    ),
    Kernel(
        id="liger.add_rms_norm",
        operations=("norm.add_rms",),
        backend=LIGER,
        load=_load_add_rms_norm,
        accepts=("eps",),
        limits=(*_LIMITS, _IN_PLACE),
        deterministic=True,
        graph_safe=True,
        jit=True,
        build_key=specialised,
        priority=65,
    ),
    Kernel(
        id="liger.layer_norm",
        operations=("norm.layer",),
        backend=LIGER,
        load=_load_layer_norm,
        accepts=("normalized_shape", "weight", "bias", "eps"),
        limits=(
            *_LIMITS,
            limit.dim("hidden", max=_WIDEST),
            limit.one_of("weight", "float"),
            limit.one_of("bias", "float"),
        ),
        deterministic=True,
        graph_safe=True,
        jit=True,
        build_key=specialised,
        priority=45,
    ),
)
