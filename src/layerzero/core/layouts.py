"""Layouts: names for the order of axes, each letter an axis, and how to get from one to another.

A layout names the last axes of a tensor, so that leading ones (the pages of a cache) stay where they are: ``BSHD`` and
``BHSD`` of batch, sequence, heads and head dim; ``NHD`` and ``HND`` of a page's tokens, kv heads and head dim. The
first of an operation's layouts is the one that its schema is written in.
"""

from __future__ import annotations

import functools


@functools.cache
def permutation(source: str, target: str, ndim: int = 4) -> tuple[int, ...]:
    """Say which source axis goes where: ``tensor.permute(permutation("BSHD", "BHSD"))``.

    A tensor of fewer axes has the last ones of its layout: one sequence alone has those of ``SHD`` in ``BSHD``.

    Raises: ValueError for layouts that do not have the same axes.
    """
    if sorted(source) != sorted(target) or len(set(source)) != len(source):
        raise ValueError(f"layout: wanted the axes of {source} in another order, got {target}")
    if ndim < len(source):
        source = source[len(source) - ndim :]
        target = "".join(letter for letter in target if letter in source)
    leading = ndim - len(source)
    return (*range(leading), *(leading + source.index(letter) for letter in target))


@functools.cache
def moving(source: str, target: str, ndim: int = 4) -> str:
    """The call of a tensor's method that moves its axes: ``.transpose(1, 2)``; empty where nothing moves."""
    order = permutation(source, target, ndim)
    moved = [axis for axis, place in enumerate(order) if axis != place]
    if not moved:
        return ""
    if len(moved) == 2:
        return f".transpose({moved[0]}, {moved[1]})"
    return f".permute({', '.join(map(str, order))})"
