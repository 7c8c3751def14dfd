"""Axis letters of attention, and the rules that decide a layout nobody named.

B batch, S sequence, H heads, D head dim. ``BSHD`` is the layout that attention's schemas are written in.
"""

from __future__ import annotations

from collections.abc import Sequence

CANONICAL = "BSHD"
LAYOUTS = ("BSHD", "BHSD")

MAX_PLAUSIBLE_HEADS = 256
"""More heads than any published model has; a larger axis has to be the sequence."""


def heads_axis(layout: str) -> int:
    """Position of the head axis."""
    return layout.index("H")


def sequence_axis(layout: str) -> int:
    """Position of the sequence axis."""
    return layout.index("S")


def _heads_and_sequence(layout: str, shape: Sequence[int]) -> tuple[int, int]:
    return shape[heads_axis(layout)], shape[sequence_axis(layout)]


def _consistent(layout: str, query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> bool:
    """Whether the three shapes can be attention at all when read in this layout."""
    heads, _ = _heads_and_sequence(layout, query)
    kv_heads, seq_k = _heads_and_sequence(layout, key)
    value_heads, value_seq = _heads_and_sequence(layout, value)
    return kv_heads == value_heads and seq_k == value_seq and kv_heads > 0 and heads % kv_heads == 0


def _is_transposed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether axes 1 and 2 were swapped from the order in memory (a contiguous tensor tells nothing)."""
    return shape[1] > 1 and shape[2] > 1 and strides[1] < strides[2]


def resolve(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    query_strides: Sequence[int],
    key_strides: Sequence[int],
) -> tuple[str, bool]:
    """Decide a layout that nobody named; return it and whether it is only an assumption.

    In order: what the shapes prove (one reading divides heads, the other does not), what is plausible (one reading has
    at most 256 heads), what the strides of a transposed view say, else BSHD as an assumption. The larger of the two
    axes is never taken for the sequence: for a decode query of shape (B, 1, H, D) that would be wrong in silence.
    Shapes: all four-dimensional. Swapping both axes must give a different tensor to matter: when axes 1 and 2 of
    query, key and value are all 1 long, both readings are the same computation.
    """
    readings = [layout for layout in LAYOUTS if _consistent(layout, query, key, value)]
    if len(readings) == 1:
        return readings[0], False
    plausible = [
        layout
        for layout in (readings or LAYOUTS)
        if _heads_and_sequence(layout, query)[0] <= MAX_PLAUSIBLE_HEADS
        and _heads_and_sequence(layout, key)[0] <= MAX_PLAUSIBLE_HEADS
    ]
    if len(plausible) == 1:
        return plausible[0], False
    if _is_transposed(query, query_strides) or _is_transposed(key, key_strides):
        # A projection writes (B, S, H, D); a view with axes 1 and 2 swapped is therefore BHSD.
        return "BHSD", False
    trivial = all(shape[1] == 1 and shape[2] == 1 for shape in (query, key))
    return CANONICAL, bool(readings) and not trivial


def assumption(query: Sequence[int], key: Sequence[int]) -> str:
    """What is assumed, in words, where shapes do not tell the layout."""
    return (
        f"attention: query {tuple(query)} and key {tuple(key)} can be BSHD or BHSD; BSHD was assumed. "
        "Pass layout='BSHD' or layout='BHSD', or set `layout` in the configuration."
    )
