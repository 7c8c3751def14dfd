"""Pieces of an attention that is too large to be computed in float64 as a whole.

Some queries of two heads are calls of their own: their results depend on the keys of their sequence and head only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from layerzero.core.facts import Facts
from layerzero.core.operation import Part
from layerzero.ops.attention.layout import CANONICAL, heads_axis

QUERIES = 32
_CUT = frozenset({"query", "key", "value", "causal", "scale", "window", "softcap", "layout"})
"""Arguments that can be cut out of a call; any other must be absent."""


def scratch(sizes: Mapping[str, int]) -> int:
    """The larger of the scores and of the keys for every head."""
    return sizes["batch"] * sizes["heads"] * sizes["seq_k"] * max(sizes["seq_q"], sizes["head_dim"])


def parts(arguments: Mapping[str, Any], facts: Facts) -> Sequence[Part] | None:
    """The last queries of the first sequence and head, and some in the middle of the last."""
    others = [value for name, value in arguments.items() if name not in _CUT]
    if any(isinstance(value, Tensor) or value for value in others):
        return None
    sizes, layout = facts.sizes(), facts.layout or CANONICAL
    group, queries, keys = sizes["heads"] // sizes["kv_heads"], sizes["seq_q"], sizes["seq_k"]
    causal, windowed = arguments.get("causal") in (True, None), arguments.get("window") is not None
    middle = min(queries, (queries + QUERIES) // 2) if causal or not windowed else queries
    found = []
    for batch, head, last in ((0, 0, queries), (sizes["batch"] - 1, sizes["kv_heads"] - 1, middle)):
        first = max(last - QUERIES, 0)
        hidden = queries - last if causal else 0  # bottom-right: keys in the future of the last of these queries
        heads = slice(head * group, head * group + group)
        place = _place(layout, slice(batch, batch + 1), heads, slice(first, last))
        of_keys = _place(layout, slice(batch, batch + 1), slice(head, head + 1), slice(0, keys - hidden))
        cut = {name: of_keys(arguments[name]) for name in ("key", "value")} | {"query": place(arguments["query"])}
        found.append(Part(f"queries {first} to {last - 1}", {**arguments, **cut, "layout": layout}, place))
    return found


def _place(layout: str, batch: slice, heads: slice, rows: slice) -> Callable[[Tensor], Tensor]:
    index = [batch, rows, heads] if heads_axis(layout) == 2 else [batch, heads, rows]
    return lambda tensor: tensor[tuple(index)]
