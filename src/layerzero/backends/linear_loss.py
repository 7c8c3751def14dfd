"""The loss of a linear layer and its gradients by chunks of rows, whichever kernel computes the losses of a chunk.

A chunk's logits become their gradient in the same memory, which is multiplied for as many rows together as that memory
allows: what a weight's gradient takes anyway. In half precision it is added up in float32, 4 bytes a number, and
rounded into 2 more. Logits' gradients of twice as many rows as a row has features take those 4 bytes, too, and need no
addition: the product's own is in float32. Of more rows than that, gradients of half as many rows as features, and
float32 logits of an eighth with their softmax, take the 2. Chunks of 128 rows read and wrote the sum in float32 so
often that 4096 rows of 2048 features and 128,256 classes took 56.4 ms, and Liger's chunks, of as many rows, 39.7
(bfloat16, H200, torch 2.11, 2026-11-27).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerzero.ops.declaration import wide

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
    chunk = max(chunk, features * weight.element_size() // 16) // _EVEN * _EVEN
    if weight.dtype is wide(weight.dtype):
        return Sizes(chunk, chunk)
    return Sizes(chunk, rows if chunk < rows <= 2 * features else max(chunk, features // 2 // _EVEN * _EVEN))


def _widens(tensor: Tensor) -> bool:
    """Whether a product of half precision can be had in float32, as its kernel has it before it rounds."""
    if not tensor.is_cuda or torch.version.hip is not None or tensor.dtype is wide(tensor.dtype):
        return False
    return torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def wide_product(one: Tensor, other: Tensor, total: Tensor | None = None) -> Tensor:
    """``one @ other`` in float32 or wider, or what it adds to total, in its memory."""
    dtype = wide(one.dtype)
    more: dict[str, Any] = {} if one.dtype is dtype else {"out_dtype": dtype}
    if more and not _widens(one):
        found = torch.mm(one, other)
        return found.to(dtype) if total is None else total.add_(found)
    return torch.mm(one, other, **more) if total is None else torch.addmm(total, one, other, out=total, **more)


def over_chunks(
    chunk: Chunk, hidden: Tensor, weight: Tensor, needed: Needed, cut: Sizes
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss of each row and the gradients of rows, weight and bias that are needed, of the sum of all losses.

    Gradients of weight and bias are added up in float32 or wider, and rounded once.

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
            torch.mm(made, weight, out=of_hidden[block])
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
    """Gradients times what comes from behind, in their own memory."""
    return [None if each is None else each.mul_(gradient) for each in gradients]
