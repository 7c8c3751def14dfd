"""What a call should give, in float64: the whole result, or pieces of it where the whole would not fit in memory.

Calls of ordinary size are compared whole, as conformance does. Others are compared in the pieces that their operation
cuts out of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.engine.reference import as_tuple
from layerzero.testing.compare import Expected, check, expected, for_kernel, problems
from layerzero.testing.generate import RandomCall
from layerzero.tuning.keeping.machine_state import bounded

MAX_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
"""What the reference may need besides the tensors, in float64: several of 0.1 GB on a CPU, of 2 GB on a GPU."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A call that is a piece of a larger one, its truth, and where its result lies in the whole one."""

    call: RandomCall
    truth: Expected
    place: Callable[[Tensor], Tensor]

    def problems(self, results: tuple[Any, ...], kernel: Kernel) -> list[str]:
        """What is wrong with this piece of a kernel's results: also with its log-sum-exps, by which others merge."""
        placed = tuple(self.place(each) if isinstance(each, Tensor) else each for each in results)
        return problems(placed, self.call.arguments, for_kernel(self.truth, kernel))


@dataclass(frozen=True, slots=True)
class Truth:
    """What a call should give, whole or in parts."""

    call: RandomCall
    whole: Expected | None
    parts: tuple[CallPiece, ...] = ()

    def problems(self, kernel: Kernel, run: Callable[..., Any]) -> list[str]:
        """What is wrong with a kernel that runs the call's arguments."""
        if self.whole is not None:
            return check(self.call, run, for_kernel(self.whole, kernel))
        results = as_tuple(run(**self.call.arguments))
        return [problem for part in self.parts for problem in part.problems(results, kernel)]

    def error(self, result: Any) -> float | None:
        """Largest distance from the truth in the first result; None where the call returns nothing."""
        results = as_tuple(result)
        if not results:
            return None
        pairs = [(results[0], self.whole.results[0])] if self.whole is not None else []
        pairs += [(part.place(results[0]), part.truth.results[0]) for part in self.parts]
        return max(float((got.double() - want.double()).abs().max()) for got, want in pairs)


def truth_of(call: RandomCall, facts: Facts) -> Truth:
    """Evaluate the reference in float64, for all of a call or for parts of it.

    Raises: RuntimeError or MemoryError where it would take more than its share of the memory.
    """
    with bounded(facts):
        return _truth_of(call, facts)


def _truth_of(call: RandomCall, facts: Facts) -> Truth:
    operation = facts.operation
    most = MAX_ELEMENTS.get(facts.device.torch_type, MAX_ELEMENTS["cpu"])
    if operation.parts is not None and operation.scratch is not None and operation.scratch(facts.sizes()) > most:
        found = operation.parts(call.arguments, facts)
        if found:  # none of a call without queries
            return Truth(call, None, tuple(_piece(call, each.text, each.arguments, each.place) for each in found))
    return Truth(call, expected(call))


def _piece(call: RandomCall, text: str, arguments: Any, place: Callable[[Tensor], Tensor]) -> CallPiece:
    piece = RandomCall(call.function, arguments, f"{call.name}, {text}")
    return CallPiece(piece, expected(piece), place)
