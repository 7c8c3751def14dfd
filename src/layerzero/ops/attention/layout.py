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


def resolve(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> str:
    """Decide a layout that nobody named; empty where both readings fit, since a guess would be wrong in silence.

    What the shapes prove (one reading divides heads, the other does not), then what is plausible (one reading has at
    most 256 heads). The larger of the two axes is never taken for the sequence: for a decode query of shape
    (B, 1, H, D) that would be wrong. Nor do strides decide: a view with swapped axes may have been dense in either
    layout before.
    Shapes: all four-dimensional. When axes 1 and 2 of query and key are all 1 long, both readings are one computation.
    """
    readings = [layout for layout in LAYOUTS if _consistent(layout, query, key, value)]
    if len(readings) == 1:
        return readings[0]
    plausible = [
        layout
        for layout in (readings or LAYOUTS)
        if _heads_and_sequence(layout, query)[0] <= MAX_PLAUSIBLE_HEADS
        and _heads_and_sequence(layout, key)[0] <= MAX_PLAUSIBLE_HEADS
    ]
    if len(plausible) == 1:
        return plausible[0]
    same = all(shape[1] == 1 and shape[2] == 1 for shape in (query, key))
    return CANONICAL if same or not readings else ""


def both_fit(name: str, shape: Sequence[int]) -> str:
    """The problem of a call whose shapes fit both layouts, with both readings and the next step."""
    first, second = shape[1], shape[2]
    return (
        f"layout: wanted layout='BSHD' or layout='BHSD', got neither, and both fit {name} {tuple(shape)}: BSHD reads "
        f"{first} tokens of {second} heads, BHSD {second} tokens of {first} heads. Pass layout=, or set `layout` in "
        "the configuration"
    )
