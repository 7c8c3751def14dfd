"""Sequences that begin with the same pages, for attention that reads these once: found in block tables."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences whose tables begin alike.

    Attributes:
        sequences: their names, in the order in which they were asked about.
        rows: their places in what was asked about.
        shared_blocks: how many first pages all of them share, each full; 0 for a sequence that shares none.
    """

    sequences: tuple[Hashable, ...]
    rows: tuple[int, ...]
    shared_blocks: int


def groups_of(names: Sequence[Hashable], tables: Sequence[Sequence[int]], full: Sequence[int]) -> list[PrefixGroup]:
    """Group sequences by their first page; each group shares what all of its members share.

    Args:
        tables: the pages of each sequence, in order.
        full: how many of them each sequence has filled.
    """
    by_first: dict[object, list[int]] = {}
    for row, table in enumerate(tables):
        first: object = table[0] if full[row] else ("alone", row)
        by_first.setdefault(first, []).append(row)
    return [
        PrefixGroup(
            tuple(names[row] for row in rows),
            tuple(rows),
            _common([tables[row][: full[row]] for row in rows]) if len(rows) > 1 else 0,
        )
        for rows in by_first.values()
    ]


def _common(tables: Sequence[Sequence[int]]) -> int:
    first, shortest = tables[0], min(map(len, tables))
    for place in range(shortest):
        if any(table[place] != first[place] for table in tables):
            return place
    return shortest
