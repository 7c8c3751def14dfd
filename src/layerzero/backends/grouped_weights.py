"""What every kernel for weights of whole numbers by group does around its library's operator.

The library's own form is made of :class:`Codes`, so that a kernel takes every file format within its limits. Columns
that an act-order index scatters are put in order in that form once, those of the rows in each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerzero.core import limits as limit
from layerzero.core.facts import Facts
from layerzero.core.kernel import Backend, Kernel
from layerzero.core.limit import Limit
from layerzero.ops.linear.packed import BELONGS, PackedWeight
from layerzero.ops.linear.weight_formats import FORMATTED
from layerzero.ops.quantize.weight import QuantizedWeight
from layerzero.ops.quantize.weight_format import Codes

ROUNDING = (FORMATTED["group.int8"].name,)
"""Of kernels that round rows; those that do not take both operations."""

Pack = Callable[[Codes], tuple[Any, int]]
"""Makes the library's form of codes whose columns lie in order, and tells its bytes."""

Product = Callable[[Tensor, Any], Tensor]
"""Multiplies dense rows (M, K) with the form."""

Parts = Callable[[Facts], tuple[Pack, Product]]


def _load(facts: Facts, owner: str, parts: Parts) -> Callable[..., Any]:
    pack, product = parts(facts)
    ndim, features = facts["input_ndim"], facts.size("in_features")

    def made(weight: QuantizedWeight) -> tuple[tuple[Any, Tensor | None], int]:
        codes, order = weight.codes, None
        if codes.group_index is not None:
            order = codes.group_index.argsort(stable=True)
            codes = replace(codes, numbers=codes.numbers[:, order], group_index=None)
        if codes.bits < 4:  # in four bits, with their middle as a zero point
            zero = torch.full_like(codes.scale, codes.middle, dtype=torch.uint8) if codes.zero is None else codes.zero
            codes = replace(codes, bits=4, zero=zero)
        form, size = pack(codes)
        return (form, order), size + (0 if order is None else order.nbytes)

    def run(
        input: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        *,
        weight_format: str,
        bias: Tensor | None = None,
        weight_zero: Tensor | None = None,
        group_index: Tensor | None = None,
        packed: PackedWeight,
    ) -> Tensor:
        form, order = packed.form(owner, made)
        rows = input if ndim == 2 else input.reshape(-1, features)
        rows = rows.contiguous() if order is None else rows.index_select(1, order)
        output = product(rows, form)
        if bias is not None:
            output = output.add_(bias)
        return output if ndim == 2 else output.view(*input.shape[:-1], -1)

    return run


IN_FOUR_BITS = limit.one_of("weight_bits", 2, 3, 4)
"""What fits kernels of codes of four bits."""


def grouped(kernel_id: str, backend: Backend, parts: Parts, priority: int, *limits: Limit, **changes: Any) -> Kernel:
    """A kernel for weights by group.

    Args:
        kernel_id, backend, priority, changes: see :class:`layerzero.core.kernel.Kernel`.
        parts: of the facts of a call, what makes the library's form and what multiplies with it.
        limits: what the library demands, besides the form.
    """
    fields: dict[str, Any] = {
        "operations": (FORMATTED["group"].name, FORMATTED["group.int8"].name),
        "load": functools.partial(_load, owner=kernel_id, parts=parts),
        "accepts": ("weight_format", "bias", "weight_zero", "group_index", "packed"),
        "limits": (limit.platform("cpu"), *limits, BELONGS),
    }
    return Kernel(id=kernel_id, backend=backend, priority=priority, **fields | changes)


def has_zeros(codes: Codes) -> bool:
    """Whether some code of 0 is not in the middle."""
    return codes.zero is not None and bool((codes.zero != codes.middle).any())


def regrouped(codes: Codes, sizes: tuple[int, ...]) -> Codes:
    """The same numbers in groups of one of these sizes: the first that divides their own, with its scale repeated."""
    size = next(each for each in sizes if codes.group % each == 0)
    if size == codes.group:
        return codes
    times = codes.group // size
    zero = None if codes.zero is None else codes.zero.repeat_interleave(times, 1)
    return replace(codes, scale=codes.scale.repeat_interleave(times, 1), zero=zero, group=size)
