"""A kernel that a call would choose if it were built."""

from __future__ import annotations

from dataclasses import dataclass

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Candidate, Report
from layerzero.engine.jit import BUILT, BuildIdentity, build_of


@dataclass(frozen=True, slots=True)
class Chosen:
    """The candidate, and the report that would choose it."""

    candidate: Candidate
    report: Report

    @property
    def kernel(self) -> Kernel:
        """What is to be built."""
        return self.candidate.kernel

    @property
    def facts(self) -> Facts:
        """The call that it is built for."""
        return self.report.facts

    @property
    def identity(self) -> BuildIdentity:
        """What is built once."""
        return build_of(self.kernel, self.facts)

    def ready(self) -> bool:
        """Whether it was built meanwhile."""
        return BUILT.ready(self.kernel, self.facts)
