"""Which of four axes are tokens and which are heads, where nobody says."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerzero.ops.attention.layout import MAX_PLAUSIBLE_HEADS

HEADS_AXIS = {"BSHD": -2, "BHSD": -3}
"""Where heads are, counted from the last axis; three axes are read as BSHD without a batch."""


def resolve(query: Tensor, key: Tensor, positions: Tensor | None) -> tuple[str, str, bool]:
    """Decide the layout of a call of four axes: the layout, what was assumed, whether head counts alone proved it.

    In order: queries and keys have the same tokens and head counts that divide; positions have a size for each token;
    no model has more than 256 heads; a transposed view was written tokens first. Else tokens first, as an assumption.
    """
    readings = [each for each in HEADS_AXIS if _fits(each, query.shape, key.shape)]
    if len(readings) == 1:
        return readings[0], "", query.shape[HEADS_AXIS[readings[0]]] != key.shape[HEADS_AXIS[readings[0]]]
    named = [each for each in readings if positions is not None and positions.shape[-1:] == (_tokens(each, query),)]
    readings = named if len(named) == 1 else readings or list(HEADS_AXIS)
    plausible = [each for each in readings if query.shape[HEADS_AXIS[each]] <= MAX_PLAUSIBLE_HEADS]
    readings = plausible if len(plausible) == 1 else readings
    if len(readings) == 1:
        return readings[0], "", False
    if query.shape[1] > 1 and query.shape[2] > 1 and query.stride(1) < query.stride(2):
        return "BHSD", "", False
    trivial = query.shape[1:3] == (1, 1) and key.shape[1:3] == (1, 1)
    return "BSHD", "" if trivial else _assumption(query.shape, key.shape), False


def _tokens(layout: str, query: Tensor) -> int:
    return int(query.shape[-3 if layout == "BSHD" else -2])


def _fits(layout: str, query: Sequence[int], key: Sequence[int]) -> bool:
    heads, tokens = HEADS_AXIS[layout], -5 - HEADS_AXIS[layout]
    return query[tokens] == key[tokens] and key[heads] > 0 and query[heads] % key[heads] == 0


def _assumption(query: Sequence[int], key: Sequence[int]) -> str:
    return (
        f"rope: query {tuple(query)} and key {tuple(key)} can be BSHD or BHSD; BSHD was assumed. "
        "Pass layout='BSHD' or layout='BHSD', or set `layout` in the configuration."
    )
