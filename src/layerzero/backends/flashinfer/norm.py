"""FlashInfer's RMS norms, called as the module that it compiles with nvcc on first use.

``flashinfer.norm.rmsnorm`` takes the CuTe DSL's kernels where that is installed and the module's otherwise; here it is
always the module's, called without the operator registration around it (9 us a call through that, an H200 host,
2026-11-21). Limits follow csrc/norm.cu and include/flashinfer/norm.cuh: float16 and bfloat16 only, a dtype that is read
off the input and never compared with the weight's; row starts are computed in 32 bits; the last stride must be 1, which
that of a single element need not be.
Its fused_add_rmsnorm writes the norm over its input: norm.add_rms.inplace. For norm.add_rms it would need a copy of the
input first: two launches that move six times the tensor. Adding and then normalising are two launches that move it five
times, and they normalise the sum as it was rounded. Its layernorm wants float32 weights beside bfloat16 data, which
norm.layer does not have.
Library: flashinfer-python 0.7.2, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends.flashinfer.attention import FLASHINFER
from layerzero.backends.flashinfer.modules import is_built
from layerzero.backends.norm_limits import ElementsBelow, RowsAligned
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel


def _module(facts: Facts) -> Hashable:
    """One module holds the norms of every dtype and size."""
    return "norm"


def _prebuilt(facts: Facts) -> bool:
    return is_built("norm", facts)


def _rmsnorm(facts: Facts) -> tuple[Callable[..., None], bool]:
    """The compiled function, and whether it may start before the kernel ahead of it ends (it waits by itself)."""
    from flashinfer.norm import get_norm_module

    sm = facts.device.sm
    return get_norm_module().rmsnorm, sm is not None and sm >= (9, 0)


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    operator, overlap = _rmsnorm(facts)
    empty_like, hidden, is_matrix = torch.empty_like, facts.size("hidden"), facts["input_ndim"] == 2

    def matrix(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output = empty_like(input)
        operator(output, input, weight, eps, overlap)
        return output

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        rows = input.view(-1, hidden)  # of three axes it takes the last two for a head, a warp for each
        output = empty_like(rows)
        operator(output, rows, weight, eps, overlap)
        return output.view(input.shape)

    return matrix if is_matrix else run


def _load_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    norm = _load_rms_norm(facts)

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output: Tensor = norm(residual.add_(input), weight, eps=eps)
        return output

    return run


def _load_add_rms_norm_inplace(facts: Facts) -> Callable[..., Any]:
    from flashinfer.norm import get_norm_module

    operator, hidden, sm = get_norm_module().fused_add_rmsnorm, facts.size("hidden"), facts.device.sm
    overlap = sm is not None and sm >= (9, 0)

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> None:
        operator(input.view(-1, hidden), residual.view(-1, hidden), weight, eps, overlap)

    return run


_LIMITS = (
    limit.platform("cuda"),
    limit.arch(min=(8, 0)),
    limit.dtype("float16", "bfloat16"),
    limit.dim("hidden", min=2),
    ElementsBelow(2**32),
)

KERNELS = (
    Kernel(
        id="flashinfer.rms_norm",
        operations=("norm.rms",),
        backend=FLASHINFER,
        load=_load_rms_norm,
        accepts=("eps",),
        limits=(*_LIMITS, limit.contiguous("input", "weight"), RowsAligned(("input", "weight"))),
        deterministic=True,
        build_key=_module,
        prebuilt=_prebuilt,
        priority=95,
    ),
    Kernel(
        id="flashinfer.add_rms_norm",
        operations=("norm.add_rms",),
        backend=FLASHINFER,
        load=_load_add_rms_norm,
        accepts=("eps",),
        limits=(*_LIMITS, limit.contiguous("residual", "weight"), RowsAligned(("residual", "weight"))),
        deterministic=True,
        build_key=_module,
        prebuilt=_prebuilt,
        priority=85,
    ),
    Kernel(
        id="flashinfer.add_rms_norm_inplace",
        operations=("norm.add_rms.inplace",),
        backend=FLASHINFER,
        load=_load_add_rms_norm_inplace,
        accepts=("eps",),
        limits=(
            *_LIMITS[:2],
            limit.dtype("bfloat16"),  # it normalises the sum before that is rounded: of float16 more than its tolerance
            *_LIMITS[3:],
            limit.contiguous("input", "residual", "weight"),
            RowsAligned(("input", "residual", "weight")),
        ),
        deterministic=True,
        build_key=_module,
        prebuilt=_prebuilt,
        priority=85,
    ),
)
