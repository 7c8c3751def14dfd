"""Axis letters, permutations between layouts, and the rules that decide a layout nobody named.

Letters: B batch, S sequence, H heads, D head dim. ``BSHD`` is the canonical layout of attention's schemas. A paged
cache has its pages first, and is named by the rest: ``NHD`` (tokens of a page, kv heads, head dim) or ``HND``.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Sequence

from layerzero.core.errors import LayerZeroLayoutWarning

CANONICAL = "BSHD"
LAYOUTS = ("BSHD", "BHSD")
CACHE_LAYOUTS = ("NHD", "HND")
FAMILIES = (LAYOUTS, CACHE_LAYOUTS)
"""Layouts that are views of each other; the first of a family is the one that schemas are written in."""

MAX_PLAUSIBLE_HEADS = 256
"""More heads than any published model has; a larger axis has to be the sequence."""

_WARN_EVERY_S = 60.0
_last_warning: dict[tuple[tuple[int, ...], ...], float] = {}
_warning_lock = threading.Lock()


def canonical(layout: str) -> str:
    """The layout of the same family that schemas are written in. Raises: KeyError for an unknown layout."""
    for family in FAMILIES:
        if layout in family:
            return family[0]
    raise KeyError(layout)


def permutation(source: str, target: str) -> tuple[int, ...]:
    """Say which source axis goes where: ``tensor.permute(permutation("BSHD", "BHSD"))``; the page axis stays."""
    return _PERMUTATIONS[source, target]


_PERMUTATIONS = {
    (source, target): (*range(4 - len(source)), *(4 - len(source) + source.index(letter) for letter in target))
    for family in FAMILIES
    for source in family
    for target in family
}


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


def forget_warnings() -> None:
    """Warn anew about every shape."""
    with _warning_lock:
        _last_warning.clear()


def warn_assumed(query: Sequence[int], key: Sequence[int]) -> bool:
    """Warn that BSHD was assumed, at most once a minute for the same shapes; return whether it warned."""
    identity = (tuple(query), tuple(key))
    now = time.monotonic()
    with _warning_lock:
        last = _last_warning.get(identity)
        if last is not None and now - last < _WARN_EVERY_S:
            return False
        if len(_last_warning) >= 1024:  # forget the oldest rather than grow with every new shape
            _last_warning.pop(next(iter(_last_warning)))
        _last_warning[identity] = now
    warnings.warn(
        f"attention: query {tuple(query)} and key {tuple(key)} can be BSHD or BHSD; BSHD was assumed. "
        "Pass layout='BSHD' or layout='BHSD', or set `layout` in the configuration.",
        LayerZeroLayoutWarning,
        stacklevel=2,
    )
    return True
