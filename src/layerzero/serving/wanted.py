"""Which kernel a call would choose if every one were built."""

from __future__ import annotations

from collections.abc import Callable

from layerzero.asking.answers import explain
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.engine.config import SCOPES
from layerzero.engine.jit import BUILT
from layerzero.serving.chosen import Chosen


def wanted(facts: Facts, failed: Callable[[Kernel, Facts], bool]) -> Chosen | None:
    """The kernel that would be chosen and is not built, with the report that says so; None if the winner is built.

    What failed to build is passed over.
    """
    with SCOPES.scope({"allow_jit_compile": True}):
        report = explain(facts)
    if report.chosen is None:
        return None
    for candidate in (report.chosen, *(each for each in report.candidates if each is not report.chosen)):
        if not candidate.legal:
            return None
        if not candidate.kernel.jit or BUILT.ready(candidate.kernel, facts):
            return None
        if not failed(candidate.kernel, facts):
            return Chosen(candidate, report)
        if report.locked:
            return None
    return None
