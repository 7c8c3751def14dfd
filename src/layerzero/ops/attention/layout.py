"""Axis letters of attention, the rules that decide an unnamed layout, and heads seen as queries.

B batch, S sequence, H heads, D head dim. ``BSHD`` is the layout that attention's schemas are written in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from layerzero.core.facts import Facts

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
    """Decide an unnamed layout; empty where both readings fit, since a guess would be wrong in silence.

    What the shapes prove (one reading divides heads, the other does not), then what is plausible (one reading has at
    most 256 heads). The larger of the two axes is never taken for the sequence: for a decode query of shape (B, 1, H,
    D) that would be wrong. Nor do strides decide: a view with swapped axes may have been dense in either layout before.
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


def by_group(run: Callable[..., Any], facts: Facts) -> Callable[..., Any]:
    """A kernel of BHSD tensors as it is; for one query of grouped heads, called with the group in the queries' axis.

    Kernels that take a block of queries at a time then read each key once for the group, and not once a head: torch's
    on a CPU takes 109 us in place of 1008 for bfloat16, 16 heads on 4, 576 keys, and zentorch's 67 in place of 161 at
    2048 (AMD EPYC with AVX512-BF16, one thread, 2026-11-22). Nothing is copied.
    """
    if facts["operation"] != "attention.gqa.decode":
        return run

    def folded(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **others: Any) -> Any:
        batch, heads, _, size = query.shape
        kv_heads = key.shape[1]
        if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[-3] == heads:
            attn_mask = attn_mask.reshape(*attn_mask.shape[:-3], kv_heads, -1, attn_mask.shape[-1])
        grouped = query.reshape(batch, kv_heads, -1, size)
        result = run(grouped, key, value, attn_mask=attn_mask, **others)
        if isinstance(result, tuple):
            output, lse = result
            return output.reshape(batch, heads, 1, -1), lse.reshape(batch, heads, 1)
        return result.reshape(batch, heads, 1, -1)

    return folded
