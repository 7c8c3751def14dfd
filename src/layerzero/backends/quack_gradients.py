"""QuACK's norms and cross-entropy with their backward passes, in the CuTe DSL, for Hopper and newer.

Results and gradients are the reference's in float32, float16 and bfloat16 (conformance, quack-kernels 0.6.5, H200,
torch 2.11, 2026-11-27). Forward and backward of 4096 x 2048 in bfloat16 took rms_norm 1.24 and layer_norm 1.38 of
torch's time, so that torch's come first; cross-entropy of 4096 x 128,256 took 0.69 to 0.78, a third of its memory.
The library's functions are called, not what they compile: their host time matters less where a backward pass follows.
Gradients of weights are added up in float32, by one partial sum a multiprocessor. Cross-entropy keeps the logits and
their log-sum-exp, and writes their gradient into new memory (quack/cross_entropy.py); rows are added up here, in
float32. Its classes are a multiple of 8, as norms' rows are. What the backward pass launches compiles inside the first
one.
Library: quack-kernels 0.6.5, Apache-2.0; private functions are called, hence one version only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from layerzero.backends import quack
from layerzero.backends.compiler_caches import stamps
from layerzero.backends.gradients import from_kept, with_gradients
from layerzero.backends.norm_limits import RowsAligned
from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Trust

Needed = tuple[bool, ...]


def _load_rms_norm(facts: Facts) -> Callable[..., Any]:
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

    hidden = facts.size("hidden")

    def differentiate(kept: Any, _: Needed, gradient: Tensor) -> Any:
        rows, weight, scales = kept
        return rmsnorm_bwd(rows, weight, gradient, scales)[:2]

    def run(input: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        def compute(rows: Tensor, weight: Tensor) -> Any:
            output, _, scales = rmsnorm_fwd(rows, weight, eps=float(eps), store_rstd=True)
            return output, (rows, weight, scales)

        rows = input.view(-1, hidden)
        output = from_kept(compute, differentiate, rows, weight)
        return output.view(input.shape)

    return run


def _load_layer_norm(facts: Facts) -> Callable[..., Any]:
    from quack.rmsnorm import _rmsnorm_fwd, layernorm_bwd

    hidden = facts.size("hidden")

    def differentiate(kept: Any, _: Needed, gradient: Tensor) -> Any:
        rows, weight, scales, mean = kept
        return layernorm_bwd(rows, weight, gradient, scales, mean)

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


_FORWARD = {each.id.removeprefix("quack."): each for each in quack.KERNELS}
_AFFINE = (limit.one_of("weight", "float"), limit.one_of("bias", "float"))
_LOGITS = ("logits",)

KERNELS = (
    with_gradients(_FORWARD["rms_norm"], _load_rms_norm, priority=9, trust=Trust.DECLARED),
    with_gradients(
        _FORWARD["layer_norm"],
        _load_layer_norm,
        priority=39,
        trust=Trust.DECLARED,
        limits=(*_FORWARD["layer_norm"].limits, *_AFFINE),
    ),
    *(
        quack.QUACK.kernel(
            f"quack.cross_entropy{'_rows' if rows else ''}",
            f"loss.cross_entropy{'.rows' if rows else ''}",
            _load_cross_entropy,
            limit.dtype("float32", "float16", "bfloat16"),
            limit.contiguous("logits", "target", "weight"),
            RowsAligned(_LOGITS, size="vocab"),
            limit.dim("vocab", multiple=8),
            accepts=("weight", "ignore_index", *(() if rows else ("reduction",))),
            grad=True,
            build_key=_loss_key,
            cache_folder=_FORWARD["rms_norm"].cache_folder,
            priority=45,
        )
        for rows in (False, True)
    ),
)
