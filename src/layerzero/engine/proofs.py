"""What a kernel has to prove: the commands that let it, and whether it may run in the capture of a CUDA graph.

The ledger knows verdicts, which ``layerzero vet --graph`` finds. Every choice in a capture asks it, also where torch or
an engine began the capture. A plan that was kept before may be called there without a choice: its text refuses where a
choice would.

Bits that do not depend on the batch or on the number of ranks: which kernels the two settings leave.

A declared kernel is chosen by priority and id: of two of them, one for few rows and one for many would give a row two
results. What is exact needs no declaration, since its result is one number whatever computes it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from msgspec.structs import replace

from layerzero.core.dtypes import dtype_name
from layerzero.core.facts import Facts
from layerzero.core.judge import Exact
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger, class_text, home_of
from layerzero.core.operation import Case, Operation, OpKind
from layerzero.core.plan import Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine.policy import Policy
from layerzero.ops.calls import case_of_shapes, facts_of

SETTING = "graph_strict_mode"

UNPROVED = "no capture of it was proved here, so that nothing says what its replays give"


_FACT = "a capture of "


def how_to_prove(facts: Facts) -> str:
    """What to type before the capture, for a reason's hint."""
    return (
        f"Prove it before the capture: `layerzero vet {facts.operation.name} --graph --manifest FILE` with what "
        f"lz.record wrote (or --shapes), or lz.warmup where {SETTING} is set"
    )


def capture_reasons(kernel: Kernel, facts: Facts, policy: Policy, ledger: Ledger) -> list[Reason]:
    """Why a capture may not have a kernel, by its verdict; one that says of itself that it is unsafe needs none.

    A collective's kernel has none: no child process is several ranks, and a verdict of one machine splits the ranks.
    """
    if not kernel.graph_safe or facts.operation.is_collective:
        return []
    why = ledger.capture(kernel, facts)
    if why:
        return [
            Reason(
                ReasonCode.CUDA_GRAPH_UNSAFE, f"{_FACT}{kernel.id}", "one whose captures are right", why,
                f"Another version of its library clears it, or `layerzero vet --graph --kernel {kernel.id} --again`",
            )
        ]  # fmt: skip
    if why is None and policy[SETTING]:
        return [
            Reason(
                ReasonCode.CUDA_GRAPH_UNSAFE, f"{_FACT}{kernel.id}", f"proved here ({SETTING})", "not proved",
                how_to_prove(facts),
            )
        ]  # fmt: skip
    return []


def is_verdict(reason: Reason) -> bool:
    """Whether a reason tells of a verdict about captures, or that there is none."""
    return reason.code is ReasonCode.CUDA_GRAPH_UNSAFE and reason.fact.startswith(_FACT)


def barred(kernel: Kernel, facts: Facts, policy: Policy, ledger: Ledger) -> bool:
    """Whether a plan that is made outside of a capture has to refuse to run in one: a hit asks nothing."""
    return not facts["capturing"] and bool(capture_reasons(kernel, facts, policy, ledger))


def noted(report: Report, ledger: Ledger) -> Report:
    """The report of a choice in a capture, which says so where the kernel's captures were not proved."""
    chosen, facts = report.chosen, report.facts
    if chosen is None or facts.operation.is_collective or ledger.capture(chosen.kernel, facts) is not None:
        return report
    return replace(report, notes=(*report.notes, UNPROVED))


def how_to_vet(kernel: Kernel, facts: Facts) -> str:
    """What to type, for a reason's hint. Calls whose class no shapes can say are vetted from a recorded workload."""
    dtype: object = facts["dtype"]
    if facts.typed is None:  # most kernels of a call want the same text
        facts.typed = _shapes(facts)
    shapes = facts.typed
    words = ["layerzero vet", f"--kernel {kernel.id}", f"--operation {facts.operation.name}"]
    words += [f"--shapes {shapes}", f"--dtype {dtype_name(dtype)}"] if shapes else ["--manifest FILE"]  # type: ignore[arg-type]
    words += ["--device cpu"] if facts.device.platform == "cpu" else []
    home = home_of(kernel)
    if kernel.backend.origin != "entry_point" and not home.startswith("layerzero."):
        words.append(f"--module {home}")
    origin = "or lz.warmup with these shapes" if shapes else "with a workload that lz.record wrote"
    return f"Vet it for these sizes: `{' '.join(words)}`, {origin}"


def _shapes(facts: Facts) -> str:
    """The call's shapes as the command takes them; empty where they would make a call of another class."""
    wanted = class_text(facts)
    shapes = [facts.tensors[each.name].shape for each in facts.operation.schema.required]
    for count in (1, 2):
        try:
            case = case_of_shapes(facts.operation, shapes[:count], facts.layout)
            if case is not None and class_text(_facts_of(case, facts)) == wanted:
                return case.name
        except KeyError:  # no function calls the operation: nothing that can be typed does
            return ""
    return ""


def _facts_of(case: Case, facts: Facts) -> Facts:
    dtype = facts["dtype"]
    assert isinstance(dtype, torch.dtype)
    return facts_of(facts.operation, case, dtype, facts.device, facts.layout)


_DEMANDS = {
    "batch_invariant": (ReasonCode.BATCH_INVARIANCE_REQUIRED, "the same bits in every batch"),
    "require_tp_invariant": (ReasonCode.TP_INVARIANCE_REQUIRED, "the same bits for every number of ranks"),
}
"""By setting, the reason and what is wanted."""


UNASKED = Reason(ReasonCode.POLICY_DENIED, "batch_invariant and require_tp_invariant", "one of them true", "both false")
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
    return declared(kernel.batch_invariant, facts)


def declared(flag: bool | Callable[[Facts], bool], facts: Facts) -> bool:
    """What a kernel's flag says of such a call."""
    return flag if isinstance(flag, bool) else flag(facts)


def reasons(kernel: Kernel, facts: Facts, policy: Policy) -> list[Reason]:
    """Why the settings leave a kernel out."""
    if kernel.asked_for and not policy.invariant:
        return [UNASKED]
    if exact(facts.operation):
        return []
    apart = facts.operation.is_collective  # it knows no rows
    found = {
        "batch_invariant": apart or in_batches(kernel, facts),
        "require_tp_invariant": declared(kernel.tp_invariant, facts),
    }
    if apart and policy["require_tp_invariant"] and not found["require_tp_invariant"]:
        return [_OTHER_ORDER]
    return [
        Reason(code, setting, wanted, "not declared to give them")
        for setting, (code, wanted) in _DEMANDS.items()
        if policy[setting] and not found[setting]
    ]


def invariance_noted(report: Report, policy: Policy) -> Report:
    """The report, with what the settings made of the choice."""
    asked = [setting for setting in _DEMANDS if policy[setting]]
    note = f"{' and '.join(asked)}: chosen by priority, without times, of kernels that declare it"
    return msgspec.structs.replace(report, notes=(*report.notes, note))
