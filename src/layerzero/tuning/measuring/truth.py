"""Whether a kernel is right on a call that is about to be timed; nobody's time counts before.

Calls of ordinary size are compared whole with the reference in float64, as conformance does. A large attention would
not fit in memory: of it, some queries of two heads are compared, or two sequences of many over pages, whose results
depend on their own keys only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.ops.attention import layout as layouts
from layerzero.testing.compare import Expected, as_tuple, check, difference, expected, for_kernel
from layerzero.testing.generate import RandomCall

MAX_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
"""Scores, and elements of the keys for all heads, in float64: several tensors of 0.1 GB on a CPU, of 2 GB on a GPU."""

QUERIES = 32
_PARTS = frozenset({"query", "key", "value", "causal", "scale", "window", "softcap", "layout"})
"""Arguments of attention that can be cut out of a call; any other must be absent."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some queries of one key head: a call of its own, and where its result lies in the whole one."""

    call: RandomCall
    truth: Expected
    place: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Truth:
    """What a call should give, whole or in parts."""

    call: RandomCall
    whole: Expected | None
    parts: tuple[Part, ...] = ()

    def problems(self, kernel: Kernel, run: Callable[..., Any]) -> list[str]:
        """What is wrong with a kernel that runs the call's arguments."""
        if self.whole is not None:
            return check(self.call, run, for_kernel(self.whole, kernel))
        output = run(**self.call.arguments)
        found = []
        for part in self.parts:
            truth = for_kernel(part.truth, kernel)
            found.append(difference(part.place(output), truth.results[0], truth.dtypes[0], truth.tolerance))
        return [problem for problem in found if problem]

    def error(self, result: Any) -> float | None:
        """Largest distance from the truth in the first result; None where the call returns nothing."""
        results = as_tuple(result)
        if not results:
            return None
        pairs = [(results[0], self.whole.results[0])] if self.whole is not None else []
        pairs += [(part.place(results[0]), part.truth.results[0]) for part in self.parts]
        return max(float((got.double() - want.double()).abs().max()) for got, want in pairs)


def truth_of(call: RandomCall, facts: Facts) -> Truth:
    """Evaluate the reference in float64, for all of a call or for parts of it."""
    if _elements(facts) > MAX_ELEMENTS.get(facts.device.torch_type, MAX_ELEMENTS["cpu"]):
        if "block_tables" in call.arguments:
            return Truth(call, None, tuple(_sequences(call, facts)))
        if _divisible(call.arguments):
            return Truth(call, None, tuple(_parts(call, facts)))
    return Truth(call, expected(call))


def _elements(facts: Facts) -> int:
    """The larger of an attention's scores and its keys for every head; 0 for any other operation."""
    sizes = facts.sizes()
    if not {"batch", "heads", "seq_q"} <= set(sizes):
        return 0
    keys = sizes.get("seq_k", sizes.get("max_blocks", 0) * sizes.get("page_size", 0))
    return sizes["batch"] * sizes["heads"] * keys * max(sizes["seq_q"], sizes["head_dim"])


def _divisible(arguments: Mapping[str, Any]) -> bool:
    others = [value for name, value in arguments.items() if name not in _PARTS]
    return not any(isinstance(value, Tensor) or value for value in others)


def _parts(call: RandomCall, facts: Facts) -> list[Part]:
    """The last queries of the first sequence and head, and some in the middle of the last."""
    sizes, layout = facts.sizes(), facts.layout or layouts.CANONICAL
    group, queries, keys = sizes["heads"] // sizes["kv_heads"], sizes["seq_q"], sizes["seq_k"]
    causal, windowed = call.arguments.get("causal", True), call.arguments.get("window") is not None
    middle = min(queries, (queries + QUERIES) // 2) if causal or not windowed else queries
    found = []
    for batch, head, last in ((0, 0, queries), (sizes["batch"] - 1, sizes["kv_heads"] - 1, middle)):
        first = max(last - QUERIES, 0)
        hidden = queries - last if causal else 0  # bottom-right: keys in the future of the last of these queries
        heads = slice(head * group, head * group + group)
        place = _place(layout, slice(batch, batch + 1), heads, slice(first, last))
        of_keys = _place(layout, slice(batch, batch + 1), slice(head, head + 1), slice(0, keys - hidden))
        cut = {name: of_keys(call.arguments[name]) for name in ("key", "value")}
        arguments = {**call.arguments, **cut, "query": place(call.arguments["query"]), "layout": layout}
        part = RandomCall(call.function, arguments, f"{call.name}, queries {first} to {last - 1}")
        found.append(Part(part, expected(part), place))
    return found


def _sequences(call: RandomCall, facts: Facts) -> list[Part]:
    """The first and the last sequence of a batch over pages."""
    by_batch = [each.name for each in facts.operation.schema.inputs if each.shape_vars[:1] == ("batch",)]
    last = facts.size("batch") - 1
    found = []
    for row in dict.fromkeys((0, last)):
        rows = slice(row, row + 1)
        cut = {name: call.arguments[name][rows] for name in by_batch}
        part = RandomCall(call.function, {**call.arguments, **cut, "step": None}, f"{call.name}, sequence {row}")
        found.append(Part(part, expected(part), lambda tensor, rows=rows: tensor[rows]))  # type: ignore[misc]
    return found


def _place(layout: str, batch: slice, heads: slice, rows: slice) -> Callable[[Tensor], Tensor]:
    index = [batch, rows, heads] if layouts.heads_axis(layout) == 2 else [batch, heads, rows]
    return lambda tensor: tensor[tuple(index)]
