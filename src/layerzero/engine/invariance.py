"""Bits that do not depend on the batch or on the number of ranks: which kernels the two settings leave.

A declared kernel is chosen by priority and id: of two of them, one for few rows and one for many would give a row two
results. What is exact needs no declaration, since its result is one number whatever computes it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from layerzero.core.facts import Facts
from layerzero.core.judge import Exact
from layerzero.core.kernel import Kernel
from layerzero.core.operation import Operation, OpKind
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.policy import Policy

_DEMANDS = {
    "batch_invariant": (ReasonCode.BATCH_INVARIANCE_REQUIRED, "the same bits in every batch"),
    "require_tp_invariant": (ReasonCode.TP_INVARIANCE_REQUIRED, "the same bits for every number of ranks"),
}
"""By setting, the reason and what is wanted."""


UNASKED = Reason(
    ReasonCode.POLICY_DENIED,
    "batch_invariant and require_tp_invariant: false",
    "a kernel that runs unasked",
    "one that a setting asks for",
)
"""Why a slower kernel with such bits is left out where no setting asks for them."""


_OTHER_ORDER = Reason(
    ReasonCode.REDUCTION_ORDER_MISMATCH,
    "require_tp_invariant",
    "sums of neighbours, as lz.tree_sum adds",
    "an order that follows from the number of ranks",
)


def exact(operation: Operation) -> bool:
    """Whether an operation's results are what they are, whatever computes them."""
    return operation.kind is OpKind.TOKENIZATION or all(isinstance(each, Exact) for each in operation.judges.values())


def in_batches(kernel: Kernel, facts: Facts) -> bool:
    """Whether a kernel declares that a row of such a call has the same bits in every batch."""
    return _declared(kernel.batch_invariant, facts)


def _declared(flag: bool | Callable[[Facts], bool], facts: Facts) -> bool:
    return flag if isinstance(flag, bool) else flag(facts)


def reasons(kernel: Kernel, facts: Facts, policy: Policy) -> list[Reason]:
    """Why the settings leave a kernel out."""
    if kernel.asked_for and not policy.invariant:
        return [UNASKED]
    if exact(facts.operation):
        return []
    apart = facts.operation.is_collective  # it knows no rows
    declared = {
        "batch_invariant": apart or in_batches(kernel, facts),
        "require_tp_invariant": _declared(kernel.tp_invariant, facts),
    }
    if apart and policy["require_tp_invariant"] and not declared["require_tp_invariant"]:
        return [_OTHER_ORDER]
    return [
        Reason(code, setting, wanted, "not declared to give them")
        for setting, (code, wanted) in _DEMANDS.items()
        if policy[setting] and not declared[setting]
    ]


def noted(report: Report, policy: Policy) -> Report:
    """The report, with what the settings made of the choice."""
    asked = [setting for setting in _DEMANDS if policy[setting]]
    note = f"{' and '.join(asked)}: chosen by priority, without times, of kernels that declare it"
    return msgspec.structs.replace(report, notes=(*report.notes, note))
