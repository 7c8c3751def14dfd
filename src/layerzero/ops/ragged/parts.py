"""Pieces of an attention of unlike sequences that is too large for float64: the last queries of some of them.

A reference pads queries to the longest sequence: 64 decodes beside 8 chunks of 512 at 4096 keys wanted 58 GB (H200,
2026-11-23). Queries end where their keys do, so that the last ones of a sequence are a call of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from layerzero.core.facts import Facts
from layerzero.core.operation import Part

MOST_SCORES = 2**24
"""Of a piece: 0.13 GB of scores in float64, of which a reference makes several."""


def of_pages(arguments: Mapping[str, Any], facts: Facts) -> Sequence[Part]:
    """Pieces of a call over pages."""
    keys = arguments["context_lens"].tolist()
    return [
        _piece(arguments, row, first, end, {name: arguments[name][row : row + 1] for name in _OF_PAGES})
        for row, first, end in _chosen(arguments, keys, facts.size("heads"))
    ]


def of_keys(arguments: Mapping[str, Any], facts: Facts) -> Sequence[Part]:
    """Pieces of a call whose keys lie one after the other."""
    starts = arguments["cu_seqlens_k"].tolist()
    keys = [after - before for before, after in itertools.pairwise(starts)]
    found = []
    for row, first, end in _chosen(arguments, keys, facts.size("heads")):
        rows = slice(starts[row], starts[row + 1])
        cut = {"key": arguments["key"][rows], "value": arguments["value"][rows]}
        cut["cu_seqlens_k"] = _starts(keys[row], arguments["cu_seqlens_k"])
        found.append(_piece(arguments, row, first, end, cut))
    return found


_OF_PAGES = ("block_tables", "context_lens")


def _chosen(arguments: Mapping[str, Any], keys: Sequence[int], heads: int) -> Iterator[tuple[int, int, int]]:
    """Sequences with queries, first and last and the first behind the decodes, each with its last queries: from, to."""
    starts = arguments["cu_seqlens_q"].tolist()
    rows = [row for row, count in enumerate(keys) if starts[row + 1] > starts[row]]
    behind = [row for row in rows if row >= (arguments.get("decodes") or 0)]
    for row in sorted({*rows[:1], *behind[:1], *rows[-1:]}):
        count = starts[row + 1] - starts[row]
        if arguments.get("tree_mask") is None:  # whose columns are all new tokens of a sequence
            count = min(count, max(MOST_SCORES // (heads * max(keys[row], 1)), 1))
        yield row, starts[row + 1] - count, starts[row + 1]


def _piece(arguments: Mapping[str, Any], row: int, first: int, end: int, cut: dict[str, Any]) -> Part:
    promises = dict.fromkeys(("step", "decodes") & arguments.keys())
    made = {**arguments, **cut, **promises, "query": arguments["query"][first:end]}
    made["cu_seqlens_q"] = _starts(end - first, arguments["cu_seqlens_q"])
    if arguments.get("max_seqlen_q") is not None:
        made["max_seqlen_q"] = end - first
    slopes, tree_mask = arguments.get("alibi_slopes"), arguments.get("tree_mask")
    if slopes is not None and slopes.ndim == 2:
        made["alibi_slopes"] = slopes[row : row + 1]
    if tree_mask is not None:
        made["tree_mask"] = tree_mask[first:end]

    def place(result: torch.Tensor) -> torch.Tensor:
        return result[first:end] if result.ndim == 3 else result[:, first:end]  # log-sum-exps are (H, T)

    return Part(f"queries {first} to {end - 1} of sequence {row}", made, place)


def _starts(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, count], dtype=like.dtype, device=like.device)
