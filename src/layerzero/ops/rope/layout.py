"""Which of four axes are tokens and which are heads, where nobody says."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerzero.ops.attention.layout import MAX_PLAUSIBLE_HEADS

HEADS_AXIS = {"BSHD": -2, "BHSD": -3}
"""Where heads are, counted from the last axis; three axes are read as BSHD without a batch."""


def resolve(query: Tensor, key: Tensor, positions: Tensor | None) -> tuple[str, bool]:
    """Decide the layout of a call of four axes, empty where both fit; and whether head counts alone proved it.

    In order: queries and keys have the same tokens and head counts that divide; positions have a size for each token;
    no model has more than 256 heads.
    """
    fitting = [each for each in HEADS_AXIS if _fits(each, query.shape, key.shape)]
    if len(fitting) == 1:
        return fitting[0], query.shape[HEADS_AXIS[fitting[0]]] != key.shape[HEADS_AXIS[fitting[0]]]
    named = [each for each in fitting if positions is not None and positions.shape[-1:] == (_tokens(each, query),)]
    readings = named if len(named) == 1 else fitting or list(HEADS_AXIS)
    plausible = [each for each in readings if query.shape[HEADS_AXIS[each]] <= MAX_PLAUSIBLE_HEADS]
    readings = plausible if len(plausible) == 1 else readings
    if len(readings) == 1:
        return readings[0], False
    same = query.shape[1:3] == (1, 1) and key.shape[1:3] == (1, 1)
    return "BSHD" if same or not fitting else "", False


def _tokens(layout: str, query: Tensor) -> int:
    return int(query.shape[-3 if layout == "BSHD" else -2])


def _fits(layout: str, query: Sequence[int], key: Sequence[int]) -> bool:
    heads, tokens = HEADS_AXIS[layout], -5 - HEADS_AXIS[layout]
    return query[tokens] == key[tokens] and key[heads] > 0 and query[heads] % key[heads] == 0
