"""QuACK's norms in the CuTe DSL, for Hopper and newer: the compiled function itself, bound when a plan is made.

``quack.rmsnorm`` costs 78 us of host time a call (H200, 2026-11-21): autograd, an operator or its bypass, a lookup of
the compiled function. What compiles is one function for each dtype, row length and set of tensors, in 1 to 3 s; the
library keeps it on disk. Its arguments may be None where it was compiled without them. One kernel does both norms,
with weight and bias of any dtype, and the addition too: it may write the sum over the residual, since it reads that
once, into shared memory, and every thread writes back what it has read itself (quack/rmsnorm.py with the launch
settings of quack/rmsnorm_config.py, which never read again from global memory). It normalises the sum as it was
before rounding. Rows of odd lengths would need asynchronous copies of 2 bytes, which no GPU has.

Norms and cross-entropy with their backward passes: results and gradients are the reference's in float32, float16 and
bfloat16 (conformance, quack-kernels 0.6.5, H200, torch 2.11, 2026-11-27). Forward and backward of 4096 x 2048 in
bfloat16 took rms_norm 1.24 and layer_norm 1.38 of torch's time, so that torch's come first; cross-entropy of 4096 x
128,256 took 0.69 to 0.78, a third of its memory. The library's functions are called, not what they compile: their host
time matters less where a backward pass follows.
Gradients of weights are added up in float32, by one partial sum a multiprocessor. Cross-entropy keeps the logits and
their log-sum-exp, and writes their gradient into new memory (quack/cross_entropy.py); rows are added up here, in
float32. Its classes are a multiple of 8, as norms' rows are. What the backward pass launches compiles inside the first
one.
Library: quack-kernels 0.6.5, Apache-2.0; private functions are called, hence one version only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from layerzero.backends.gradients import Needed, from_kept, with_gradients
from layerzero.backends.norm_limits import RowsAligned, row_length
from layerzero.backends.shape_cache import stamps, temporary
from layerzero.backends.torch.quantized_linear import on_boundary
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Trust
from layerzero.core.reasons import Reason, ReasonCode

QUACK = Backend(
    name="quack",
    summary="QuACK's kernels in the CuTe DSL, compiled on first use",
    import_name="quack",
    distribution="quack-kernels",
    versions="==0.6.5",
    tested=("0.6.5",),
    requires=("nvidia-cutlass-dsl>=4.7", "cuda>=12.3", "driver>=575.51.03"),  # the CuTe DSL's
    platforms=("cuda",),
    least_sm=(9, 0),
    install="pip install quack-kernels==0.6.5",
    homepage="https://github.com/Dao-AILab/quack",
    flags=("deterministic", "graph_safe", "jit"),
)


def _cache_folder() -> Path | None:
    """Where the library keeps compiled functions (quack/cache); none where the user turned that off."""
    if os.environ.get("QUACK_CACHE_ENABLED", "1") != "1":
        return None
    named = os.environ.get("QUACK_CACHE_DIR")
    return temporary("quack_cache") if named is None else Path(named)


def _compiled(
    facts: Facts, *, weight: bool = True, bias: bool = False, residual: bool = False, centred: bool = False
) -> Callable[..., None]:
    """Compile for (x, weight, bias, residual, out, residual_out, rstd, mean, eps), rows in two axes."""
    from quack.cute_dsl_utils import torch2cute_dtype_map
    from quack.rmsnorm import _compile_rmsnorm_fwd

    dtype = torch2cute_dtype_map[facts.tensors["input"].dtype]
    with torch.cuda.device(facts.device.index):  # it asks the current device for its generation
        compiled: Callable[..., None] = _compile_rmsnorm_fwd(
            *(dtype, dtype, *(dtype if each else None for each in (residual, weight, bias, residual))),
            *(facts.size("hidden"), False, False),  # no 1 / rms, no mean
            *(centred, False, 0.0),  # one weight for all heads
        )
    return compiled


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    compiled, hidden = _compiled(facts), facts.size("hidden")

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        rows = input.view(-1, hidden)
        output = torch.empty_like(rows)
        compiled(rows, weight, None, None, output, None, None, None, float(eps))
        return output.view(input.shape)

    return run


def _load_add_rms_norm(facts: Facts) -> Callable[..., Any]:
    compiled, hidden = _compiled(facts, residual=True), facts.size("hidden")

    def run(input: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        rows, sums = input.view(-1, hidden), residual.view(-1, hidden)
        output = torch.empty_like(rows)
        compiled(rows, weight, None, sums, output, sums, None, None, float(eps))
        increment_version(residual)  # it writes behind autograd's back
        return output.view(input.shape)

    return run


def _load_layer_norm(facts: Facts) -> Callable[..., Any]:
    has_weight, has_bias = "weight" in facts.tensors, "bias" in facts.tensors
    compiled, hidden = _compiled(facts, weight=has_weight, bias=has_bias, centred=True), facts.size("hidden")

    def run(
        input: Tensor,
        *,
        normalized_shape: tuple[int, ...],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float,
    ) -> Tensor:
        rows = input.view(-1, hidden)
        output = torch.empty_like(rows)
        flat = (None if each is None else each.view(hidden) for each in (weight, bias))
        compiled(rows, *flat, None, output, None, None, None, float(eps))
        return output.view(input.shape)

    return run


_TENSORS = ("input", "residual", "weight", "bias")
_LIMITS = (limit.dtype("float32", "float16", "bfloat16"), limit.contiguous(*_TENSORS), RowsAligned(_TENSORS))

_FORWARD = {
    name: QUACK.kernel(
        f"quack.{name}",
        operation,
        load,
        accepts=accepts,
        limits=(*_LIMITS, limit.dim("hidden", max=widest, multiple=8)),
        build_key=lambda facts: (row_length(facts), stamps()),
        cache_folder=_cache_folder,
        priority=priority,
    )
    # rows and, where it adds, the residual's too must fit shared memory, 227 KiB on Hopper, in float32
    for name, operation, load, accepts, widest, priority in (
        ("rms_norm", "norm.rms", _load_rms_norm, ("eps",), 65536, 70),
        ("add_rms_norm", "norm.add_rms", _load_add_rms_norm, ("eps",), 16384, 75),
        ("layer_norm", "norm.layer", _load_layer_norm, ("normalized_shape", "weight", "bias", "eps"), 65536, 50),
    )
}


def _load_rms_norm_grad(facts: Facts) -> Callable[..., Any]:
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

    hidden = facts.size("hidden")

    def differentiate(kept: Any, _: Needed, gradient: Tensor) -> Any:
        rows, weight, scales = kept
        return rmsnorm_bwd(rows, weight, on_boundary(gradient), scales)[:2]  # a slice of a gradient begins anywhere

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        def compute(rows: Tensor, weight: Tensor) -> Any:
            output, _, scales = rmsnorm_fwd(rows, weight, eps=float(eps), store_rstd=True)
            return output, (rows, weight, scales)

        rows = input.view(-1, hidden)
        output = from_kept(compute, differentiate, rows, weight)
        return output.view(input.shape)

    return run


def _load_layer_norm_grad(facts: Facts) -> Callable[..., Any]:
    from quack.rmsnorm import _rmsnorm_fwd, layernorm_bwd

    hidden = facts.size("hidden")

    def differentiate(kept: Any, _: Needed, gradient: Tensor) -> Any:
        rows, weight, scales, mean = kept
        return layernorm_bwd(rows, weight, on_boundary(gradient), scales, mean)

    def run(input: Tensor, *, normalized_shape: tuple[int, ...], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        def compute(rows: Tensor, weight: Tensor, bias: Tensor) -> Any:
            output = torch.empty_like(rows)
            scales, mean = torch.empty((2, len(rows)), dtype=torch.float32, device=rows.device)
            _rmsnorm_fwd(rows, weight, output, bias, scales, mean, eps=float(eps), is_layernorm=True)
            return output, (rows, weight, scales, mean)

        given = input.view(-1, hidden), weight.view(hidden), bias.view(hidden)
        output = from_kept(compute, differentiate, *given)
        return output.view(input.shape)

    return run


def _load_cross_entropy(facts: Facts) -> Callable[..., Any]:
    from quack.cross_entropy import cross_entropy_bwd, cross_entropy_fwd

    by_row = facts["operation"] == "loss.cross_entropy.rows"

    def run(
        logits: Tensor, target: Tensor, *, weight: Tensor | None = None, ignore_index: int, reduction: str = "mean"
    ) -> Tensor:
        places = target.reshape(-1)
        weight = None if weight is None else weight.detach()

        def compute(logits: Tensor) -> Any:
            losses, sums = cross_entropy_fwd(logits, places, weight=weight, ignore_index=ignore_index, return_lse=True)
            return losses, (logits, places, sums)

        def differentiate(kept: Any, _: Needed, gradient: Tensor) -> Any:
            logits, places, sums = kept
            return (cross_entropy_bwd(logits, places, gradient, sums, weight, ignore_index),)

        rows = logits.reshape(-1, logits.shape[-1])
        losses = from_kept(compute, differentiate, rows)
        if by_row:
            return losses.view(target.shape).to(logits.dtype)
        if reduction == "mean":
            counted = places != ignore_index
            shares = (
                counted if weight is None else counted * weight.float().take(places.masked_fill(~counted, 0).long())
            )
            return (losses.sum() / shares.sum()).to(logits.dtype)
        return losses.sum().to(logits.dtype)

    return run


def _loss_key(facts: Facts) -> Hashable:
    target, weight = facts.tensors["target"].dtype, "weight" in facts.tensors
    return facts.device.sm, facts["dtype"], facts.size("vocab"), target, weight, stamps()


_THREADS, _WARP = 256, 32


def _warps_without_classes(facts: Facts) -> Reason | None:
    """Its forward pass cuts rows beyond 16,384 classes among blocks of a cluster, and each block among warps.

    A warp without a class has a maximum of -inf, and adds exp(-inf + inf) times 0, which is NaN, to the row's sum
    (``online_softmax_reduce`` in quack/reduce.py, ``_set_cluster_n`` in quack/cross_entropy.py). So it is where all
    logits of a warp are -inf, which no limit sees. Of 151,936 classes in half precision the last of 16 blocks has none.
    """
    vocab, width, sm = facts.size("vocab"), facts.tensors["logits"].dtype.itemsize, facts.device.sm or (9, 0)
    if vocab <= 2**14:
        return None
    double = width == 2 or sm[0] == 12
    most = (2**14, 2**15, 2**16, 2**17) if double else (2**14, 2**16, 2**17, 2**18)
    blocks = min(2 ** sum(vocab > each for each in most), 8 if sm[0] == 12 else 16)
    step = 16 // width * _THREADS
    last = vocab - (blocks - 1) * step * -(-vocab // (step * blocks))
    least = 16 // width * (_THREADS - _WARP)
    if last > least:
        return None
    wanted = f"more than {least} in the last of {blocks} blocks"
    return Reason(ReasonCode.CONSTRAINT_FAILED, "vocab", wanted, f"{last} ({vocab})", _NO_NUMBER)


_NO_NUMBER = "warps of the kernel without a class make NaN of a row's loss"

_AFFINE = (limit.one_of("weight", "float"), limit.one_of("bias", "float"))
_LOGITS = ("logits",)

KERNELS = (
    *_FORWARD.values(),
    with_gradients(_FORWARD["rms_norm"], _load_rms_norm_grad, priority=9, trust=Trust.DECLARED),
    with_gradients(
        _FORWARD["layer_norm"],
        _load_layer_norm_grad,
        priority=39,
        trust=Trust.DECLARED,
        limits=(*_FORWARD["layer_norm"].limits, *_AFFINE),
    ),
    *(
        QUACK.kernel(
            f"quack.cross_entropy{'_rows' if rows else ''}",
            f"loss.cross_entropy{'.rows' if rows else ''}",
            _load_cross_entropy,
            limit.dtype("float32", "float16", "bfloat16"),
            limit.contiguous("logits", "target", "weight"),
            RowsAligned(_LOGITS, size="vocab"),
            limit.dim("vocab", multiple=8),
            limit.Custom("vocab: classes for every warp of the forward pass", _warps_without_classes),
            accepts=("weight", "ignore_index", *(() if rows else ("reduction",))),
            grad=True,
            build_key=_loss_key,
            cache_folder=_cache_folder,
            priority=45,
        )
        for rows in (False, True)
    ),
)
