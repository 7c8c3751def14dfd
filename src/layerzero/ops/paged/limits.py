"""Limits that speak of a cache's new tokens alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from layerzero.core.facts import Facts
from layerzero.core.limit import Finding, Findings, Limit, Repair
from layerzero.core.reasons import Reason, ReasonCode


@dataclass(frozen=True, slots=True)
class DenseTokens(Limit):
    """What one token brings is dense in these tensors, however far tokens lie apart; repairable by a copy.

    Keys and values that are parts of one product of queries, keys and values are read where they lie.
    """

    tensors: tuple[str, ...]

    def check(self, facts: Facts) -> Findings:
        found = []
        for name in self.tensors:
            tensor = facts.tensors[name]
            wanted = 1
            for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.strides[1:]), strict=True):
                if size > 1 and stride != wanted:
                    reason = Reason(ReasonCode.NOT_CONTIGUOUS, name, "dense tokens", f"strides {tensor.strides}")
                    found.append(Finding(reason, Repair("copy", name)))
                    break
                wanted *= size
        return tuple(found)

    def gives_way(self, _: Collection[str], /) -> bool:
        return True

    def facts_named(self) -> tuple[str, ...]:
        return self.tensors

    def describe(self) -> str:
        return f"dense tokens: {', '.join(self.tensors)}"
