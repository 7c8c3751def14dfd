"""A library's forward and backward functions as one function of autograd, and the kernel that has both.

Libraries bring autograd functions of their own, which are left alone. Liger's write gradients over tensors that the
caller may still read, and a second pass multiplies them again; gradients of gradients lack terms without a word. Here
backward functions get copies of what they write over, and a pass that would be wrong raises.

The loss of a linear layer and its gradients by chunks of rows, whichever kernel computes the losses of a chunk.

A chunk's logits become their gradient in the same memory. Gradients of a block of chunks are then multiplied together.
On a GPU both take no more memory than the weight's gradient takes anyway. Of V classes and D features in half precision
that is 6 VD bytes: a sum in float32 takes 4 VD, and the rounded gradient 2 VD.

- Up to 2 D rows are one block. Their gradients take the 4 VD, and no sum: the one product has its own in float32.
  Chunks of D / 4 rows, with logits and softmax in float32, take the 2 VD before the product does.
- More rows need the sum. Blocks of D / 2 rows and chunks of D / 8 share the 2 VD.

4096 rows of 2048 features and 128,256 classes took 17.1 ms, 11.2 with Liger's kernel, and 1519 MiB with the gradients.
Chunks of 128 rows, each of which read and wrote the sum in float32, took 56.4 and 39.7 ms, all logits take 15.0 ms and
6012 MiB (bfloat16, H200, torch 2.11, 2026-11-27).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel, Trust
from layerzero.ops.declaration import wide


def once(compute: Callable[..., Any], operation: str) -> Callable[..., Any]:
    """What computes the same, and refuses ``create_graph=True``: its gradients would be constants to the next pass.

    torch's own guard trusts what comes from behind, and leads nowhere else: the second gradients of a loss were 0.
    """

    def refuse(_: Any) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{operation}: wanted a backward pass without create_graph, got create_graph=True, and this kernel's "
                f"gradients have none; use lz.scope(locks={{{operation!r}: 'reference'}}), or torch.func.grad"
            )

    def run(*arguments: Any, **named: Any) -> Any:
        given = {each.grad_fn for each in (*arguments, *named.values()) if isinstance(each, Tensor)}
        found = compute(*arguments, **named)
        for each in found if isinstance(found, (tuple, list)) else (found,):
            node = each.grad_fn if isinstance(each, Tensor) else None
            if node is not None and node not in given:  # an argument's is the caller's
                node.register_prehook(refuse)
        return found

    return run


class _FromKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], differentiate: Callable[..., Any], *tensors: Any) -> Tensor:
        result: Tensor
        result, kept = compute(*(each if each is None else each.detach() for each in tensors))
        ctx.save_for_backward(*kept)  # what is the caller's is seen to be written into: detached tensors share versions
        ctx.differentiate = differentiate
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.differentiate(ctx.saved_tensors, ctx.needs_input_grad[2:], gradient.contiguous())


class _GivenAway(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], scaled: Callable[..., Any], anew: bool, *tensors: Any) -> Tensor:
        result: Tensor
        result, ctx.gradients = compute(
            ctx.needs_input_grad[3:], *(each if each is None else each.detach() for each in tensors)
        )
        ctx.scaled, ctx.compute = scaled, compute if anew else None
        if anew:
            ctx.save_for_backward(*tensors)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None and ctx.compute is None:
            raise RuntimeError(
                "cross-entropy: wanted one backward pass, got another: its gradients were given away; call it again, "
                "or lock the operation's reference (lz.scope) for retain_graph=True"
            )
        if gradients is None:
            given = [each if each is None else each.detach() for each in ctx.saved_tensors]
            gradients = ctx.compute(ctx.needs_input_grad[3:], *given)[1]
        return None, None, None, *ctx.scaled(gradient, *gradients)


def from_kept(compute: Callable[..., Any], differentiate: Callable[..., Any], *tensors: Tensor | None) -> Tensor:
    """A result whose gradients are computed in the backward pass, from tensors that the forward pass kept.

    ``compute(*tensors)`` gives the result and what is kept, ``differentiate(kept, needed, gradient)`` a gradient for
    each tensor, or None.
    """
    result: Tensor = _FromKept.apply(compute, differentiate, *tensors)  # type: ignore[no-untyped-call]
    return result


def given_away(
    compute: Callable[..., Any], scaled: Callable[..., Any], *tensors: Tensor | None, anew: bool = False
) -> Tensor:
    """A result whose gradients are computed with it, and given away in the first backward pass.

    ``compute(needed, *tensors)`` gives the result and a gradient for each tensor, or None; ``scaled(gradient,
    *gradients)`` multiplies them with what comes from behind, in their own memory. ``anew``: the tensors are kept, and
    a further pass (``retain_graph=True``) computes once more. Else it raises.
    """
    result: Tensor = _GivenAway.apply(compute, scaled, anew, *tensors)  # type: ignore[no-untyped-call]
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


_LOGITS, _ROWS = 2**23, 128
"""Numbers of a chunk's logits, 32 MiB in float32, as far as that is 128 rows: products of fewer take longer a row."""

_EVEN = 16
"""Chunks of a GPU start at multiples of so many rows: Triton makes a variant for data that starts elsewhere."""

Needed = tuple[bool, ...]
Chunk = Callable[[Tensor, slice, Tensor | None], Tensor]
"""``chunk(hidden[part], part, room)``: losses of rows; the gradient of their logits is left in the room, if any."""


class Sizes(NamedTuple):
    """Rows whose logits are made at a time, and rows whose gradients are multiplied together."""

    chunk: int
    block: int


def sizes(rows: int, weight: Tensor) -> Sizes:
    """How the rows of a layer are cut."""
    classes, features = weight.shape
    chunk = max(_ROWS, _LOGITS // classes)
    if weight.device.type == "cpu":
        return Sizes(chunk, chunk)
    if weight.dtype is wide(weight.dtype):
        chunk = max(chunk, features // 4) // _EVEN * _EVEN
        return Sizes(chunk, chunk)
    alone = rows <= 2 * features
    chunk = max(chunk, features // (4 if alone else 8)) // _EVEN * _EVEN
    return Sizes(chunk, rows if chunk < rows and alone else max(chunk, features // 2 // _EVEN * _EVEN))


def _adds_up_wide(tensor: Tensor) -> bool:
    """Whether a product of half precision can be had in float32, as its kernel has it before it rounds."""
    if not tensor.is_cuda or torch.version.hip is not None or tensor.dtype is wide(tensor.dtype):
        return False
    return torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def wide_product(one: Tensor, other: Tensor, total: Tensor | None = None) -> Tensor:
    """``one @ other`` in float32 or wider, or what it adds to total, in its memory."""
    dtype = wide(one.dtype)
    more: dict[str, Any] = {} if one.dtype is dtype else {"out_dtype": dtype}
    if more and not _adds_up_wide(one):
        found = torch.mm(one, other)
        return found.to(dtype) if total is None else total.add_(found)
    return torch.mm(one, other, **more) if total is None else torch.addmm(total, one, other, out=total, **more)


def over_chunks(
    chunk: Chunk,
    hidden: Tensor,
    weight: Tensor,
    needed: Needed,
    cut: Sizes,
    padded: Callable[..., Any] = lambda *rows: rows,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss of each row, and those gradients of the sum of all losses that are needed: of rows, weight and bias.

    Gradients of weight and bias are added up in float32 or wider, and rounded once. ``padded`` pads rows of a
    product where a CPU reads over their ends.

    Shapes: hidden (T, D), weight (V, D) → (T,), (T, D), (V, D), (V,)
    """
    dtype, rows = wide(weight.dtype), len(hidden)
    losses = torch.empty(rows, dtype=dtype, device=hidden.device)
    of_hidden = torch.empty_like(hidden) if needed[0] else None
    of_weight: Tensor | None = None
    of_bias = torch.zeros(len(weight), dtype=dtype, device=weight.device) if needed[2] else None
    room = weight.new_empty((min(cut.block, rows), len(weight))) if any(needed) else None
    for first in range(0, rows, cut.block):
        block = slice(first, min(first + cut.block, rows))
        for start in range(first, block.stop, cut.chunk):
            part = slice(start, min(start + cut.chunk, block.stop))
            losses[part] = chunk(hidden[part], part, None if room is None else room[start - first : part.stop - first])
        if room is None:
            continue
        made = room[: block.stop - first]
        if of_hidden is not None:
            slopes, columns = padded(made, weight.t())
            torch.mm(slopes, columns.t(), out=of_hidden[block])
        if needed[1]:
            alone = cut.block >= rows  # the product adds up in float32 itself, and rounds
            of_weight = torch.mm(made.t(), hidden) if alone else wide_product(made.t(), hidden[block], of_weight)
        if of_bias is not None:
            of_bias += made.sum(0, dtype=dtype)
        del made
    del room
    if needed[1]:
        of_weight = torch.zeros_like(weight) if of_weight is None else of_weight.to(weight.dtype)
    return losses, of_hidden, of_weight, None if of_bias is None else of_bias.to(weight.dtype)


def scaled(gradient: Tensor, *gradients: Tensor | None) -> Sequence[Tensor | None]:
    """Gradients times what comes from behind, in their own memory.

    It is 1 where a loss ends a step, and waiting to know that costs less than the product: 1 ms of 18 for the gradient
    of 128,256 x 2048 numbers in bfloat16 (H200, torch 2.11, 2026-11-27).
    """
    if not (gradient.is_cuda and torch.cuda.is_current_stream_capturing()) and bool(gradient == 1.0):
        return gradients
    exact = gradient.reshape(1)  # a factor of no axis would be rounded to their dtype first
    return [None if each is None else torch.mul(each, exact, out=each) for each in gradients]
