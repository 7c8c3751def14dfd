"""A library's forward and backward functions as one function of autograd, and the kernel that has both.

Libraries bring autograd functions of their own, which are left alone. Liger's write gradients over tensors that the
caller may still read, and a second pass multiplies them again; gradients of gradients lack terms without a word. Here
backward functions get copies of what they write over, and a pass that would be wrong raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel, Trust


class _FromKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], differentiate: Callable[..., Any], *tensors: Any) -> Tensor:
        result: Tensor
        result, kept = compute(*(each if each is None else each.detach() for each in tensors))
        ctx.save_for_backward(*kept)  # what is the caller's is seen to be written into: detached tensors share versions
        ctx.differentiate = differentiate
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.differentiate(ctx.saved_tensors, ctx.needs_input_grad[2:], gradient.contiguous())


class _GivenAway(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], scaled: Callable[..., Any], *tensors: Any) -> Tensor:
        result: Tensor
        result, ctx.gradients = compute(
            ctx.needs_input_grad[2:], *(each if each is None else each.detach() for each in tensors)
        )
        ctx.scaled = scaled
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "cross-entropy: wanted one backward pass, got another: its gradients were given away; call it again, "
                "or lock the operation's reference (lz.scope) for retain_graph=True"
            )
        return None, None, *ctx.scaled(gradient, *gradients)


def from_kept(compute: Callable[..., Any], differentiate: Callable[..., Any], *tensors: Tensor | None) -> Tensor:
    """A result whose gradients are computed in the backward pass, from tensors that the forward pass kept.

    ``compute(*tensors)`` gives the result and what is kept, ``differentiate(kept, needed, gradient)`` a gradient for
    each tensor, or None.
    """
    result: Tensor = _FromKept.apply(compute, differentiate, *tensors)  # type: ignore[no-untyped-call]
    return result


def given_away(compute: Callable[..., Any], scaled: Callable[..., Any], *tensors: Tensor | None) -> Tensor:
    """A result whose gradients are computed with it, and given away in the one backward pass.

    ``compute(needed, *tensors)`` gives the result and a gradient for each tensor, or None; ``scaled(gradient,
    *gradients)`` multiplies them with what comes from behind, in their own memory.
    """
    result: Tensor = _GivenAway.apply(compute, scaled, *tensors)  # type: ignore[no-untyped-call]
    return result


def with_gradients(
    forward: Kernel, load: Callable[[Facts], Callable[..., Any]], *, priority: int, trust: Trust, **fields: Any
) -> Kernel:
    """The kernel that runs a proven one, and its library's backward pass.

    It is another kernel, so that a wrong gradient bans no forward pass.

    Args:
        priority: among kernels that record gradients; below the forward kernel's.
    """
    return dataclasses.replace(
        forward,
        id=f"{forward.id}.grad",
        load=lambda facts: load(facts) if facts["requires_grad"] else forward.load(facts),
        grad=True,
        priority=priority,
        priority_since={},
        trust=trust,
        aliases=(),
        **fields,
    )
