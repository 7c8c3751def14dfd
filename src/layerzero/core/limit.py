"""What a limit is: a demand of a kernel on the facts of a call, as data, with its violations and their repairs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from layerzero.core.facts import Facts, TensorFacts
from layerzero.core.reasons import Reason, ReasonCode


class Repair(NamedTuple):
    """What the plan could do about a violation: ``copy``, ``expand``, ``fold`` or ``split`` the named argument."""

    kind: str
    argument: str


class Finding(NamedTuple):
    """One violated limit and its repair, None where nothing helps."""

    reason: Reason
    repair: Repair | None = None


Findings = tuple[Finding, ...]
NOTHING: Findings = ()


class Limit(ABC):
    """Something that a kernel demands of the facts of a call."""

    __slots__ = ()

    @abstractmethod
    def check(self, facts: Facts) -> Findings:
        """List what this limit finds wrong; empty means legal. Facts are in the kernel's layout.

        It follows from the facts: calls that agree in what was read of them are not checked again. Under capture it may
        look at what earlier calls made, too.
        """

    def facts_named(self) -> tuple[str, ...]:
        """Names of facts and tensors in its declaration; registering refuses a kernel whose operations lack one."""
        return ()

    @abstractmethod
    def describe(self) -> str:
        """Write the limit for a table."""


@dataclass(frozen=True, slots=True)
class OfTensors(Limit):
    """A demand on how some tensors lie, which a copy meets."""

    tensors: tuple[str, ...]

    def problem(self, name: str, tensor: TensorFacts, facts: Facts, /) -> Reason | None:
        """What is wrong with one of them."""
        raise NotImplementedError

    def check(self, facts: Facts) -> Findings:
        given = [(name, facts.tensors[name]) for name in self.tensors if name in facts.tensors]
        found = [(name, self.problem(name, tensor, facts)) for name, tensor in given]
        return tuple([Finding(reason, Repair("copy", name)) for name, reason in found if reason is not None])

    def facts_named(self) -> tuple[str, ...]:
        return self.tensors


def violated(code: ReasonCode, fact: str, wanted: object, got: object, repair: Repair | None = None) -> Findings:
    """One violation."""
    return (Finding(Reason(code, fact, wanted, got), repair),)
