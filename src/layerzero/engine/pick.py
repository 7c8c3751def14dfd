"""The choice among judged kernels, and the report that tells it.

Where nothing was measured, priority decides, and kernels of a lower one than a legal kernel's cannot win. They are not
judged on a miss, but when the report is read; what they are judged by is the facts of the call and the policy
that it was made under, which do not change. Nor are all reasons of a refused kernel found before they are read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar

import msgspec

from layerzero.core import emulation
from layerzero.core.errors import CudaGraphUnsafeError, NoKernelFoundError
from layerzero.core.evidence import Evidence
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger, Libraries
from layerzero.core.operation import Routed
from layerzero.core.plan import Candidate, Report
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine import fusion, isolation, legality, proofs
from layerzero.engine.judgements import Later
from layerzero.engine.order import EMULATED, order
from layerzero.engine.policy import Lock, Policy, names_kernel
from layerzero.engine.probe import Machine

NOT_MEASURED = (
    "no time is known for this call, so what torch's own function runs stays (unmeasured: stock); "
    "`layerzero tune` measures the others"
)

NOT_MEASURED_PLAIN = (
    "no time is known for this call, so the library that defines what it names stays (unmeasured: stock); "
    "`layerzero tune` measures the others"
)

NOT_WITHIN = (
    "no other kernel is known to be within max_error for this call, so what torch's own function runs stays; "
    "`layerzero tune` measures errors"
)


def ranked(
    judged: Sequence[Candidate], facts: Facts, policy: Policy, ledger: Ledger | None, libraries: Libraries | None = None
) -> list[Candidate]:
    """Order judged kernels by what the ledger knows of the legal ones.

    Args:
        judged: the candidates of a call.
        facts, policy: of the call.
        ledger: what knows times; None where times decide nothing, whatever another process writes meanwhile.
        libraries: those that a question is about; times hold for versions.
    """
    legal = [each.kernel for each in judged if not each.reasons]
    widening = quicker_than_emulated(legal, facts)
    extra_us = isolation.extra_us(legal, facts, policy) if policy.isolating else isolation.NO_MORE
    if ledger is None:
        return order(judged, facts, policy, {}, widening, extra_us)
    evidence = ledger.evidence(legal, facts) if libraries is None else ledger.evidence(legal, facts, libraries)
    if policy["max_error"]:
        judged = _within(judged, facts, evidence, policy["max_error"])
    return order(judged, facts, policy, evidence, widening, extra_us)


def _within(
    judged: Sequence[Candidate], facts: Facts, evidence: Mapping[str, Evidence], most: float
) -> list[Candidate]:
    """The candidates, those refused of which a larger error was measured in such a call.

    What torch's own function runs is what the caller had, and is never refused. Where that or a kernel within the bound
    may run, kernels of unknown error are refused, too: they must not win because others were measured.
    """
    errors = {name: each.error for name, each in evidence.items() if each.error is not None}
    legal = [each.kernel for each in judged if not each.reasons]
    sure = {each.id for each in legal if errors.get(each.id, math.inf) <= most or each.is_stock(facts)}
    code, wanted = ReasonCode.QUANT_ACCURACY_THRESHOLD_EXCEEDED, f"at most {most:g}, relative to the result"
    found = []
    for each in judged:
        error = errors.get(each.kernel.id)
        if each.reasons or each.kernel.id in sure or (error is None and not sure):
            found.append(each)
        else:
            got = "no error measured" if error is None else f"{error:.2g} measured"
            found.append(_refused(each, Reason(code, "max_error", wanted, got)))
    return found


def quicker_than_emulated(kernels: Sequence[Kernel], facts: Facts) -> frozenset[str]:
    """The kernels that are known to be faster than what torch emulates for such a call, by id; most calls have none."""
    if not emulation.lacks(facts.device, facts["dtype"]):
        return frozenset()
    found = frozenset([each.id for each in kernels if each.widens is not None and each.widens(facts)])
    return found if found and emulation.emulates(facts.device, facts["dtype"]) else frozenset()


def pick(
    ranked: list[Candidate],
    routed: Routed,
    facts: Facts,
    policy: Policy,
    lock: Lock | None,
    later: Later | None = None,
    *,
    timed: bool = False,
) -> Report:
    """Take the best legal candidate, or the one that a lock names; ``later`` judges those that cannot win.

    ``timed`` says whether calls like this one may have times, see :class:`layerzero.core.plan.Report`.
    """
    legal = [candidate for candidate in ranked if not candidate.reasons]
    chosen = legal[0] if legal else None
    notes: list[str] = []
    locked = ""
    if chosen is not None and any(term.name == EMULATED for term in chosen.terms):
        notes.append(f"{emulation.told(facts.device, [facts['dtype']])} (emulated)")
    untimed = chosen if chosen is not None and chosen.time_us is None else None
    if untimed is not None and policy["max_error"] and untimed.kernel.is_stock(facts):
        notes.append(NOT_WITHIN)
    elif untimed is not None and policy["unmeasured"] == "stock" and untimed.kernel.is_stock(facts):
        notes.append(NOT_MEASURED if facts.operation.plain is None else NOT_MEASURED_PLAIN)
    if facts.operation.fuses:
        notes.append(fusion.told())
    if lock is not None:
        locked = f"lock {lock.operation} = {lock.kernel}"
        held = next((candidate for candidate in legal if names_kernel(lock.kernel, candidate.kernel)), None)
        if held is not None and chosen is not None:
            notes += _cost_of_lock(held, chosen)
            chosen = held
        elif lock.otherwise == "select":
            notes.append(f"{locked} is not legal here and lets selection go on")
        elif _wants_elements(lock, ranked):
            notes.append(f"{locked} takes no tensors without elements and lets selection go on for them")
        else:
            reason = Reason(ReasonCode.POLICY_DENIED, locked, lock.kernel, "another kernel")
            ranked = [
                _refused(each, reason) if each.legal and not names_kernel(lock.kernel, each.kernel) else each
                for each in ranked
            ]
            ranked.sort(key=lambda each: not names_kernel(lock.kernel, each.kernel))  # the one that a user asks about
            chosen = None
    if policy.isolating and chosen is not None and isolation.isolated(chosen.kernel, policy):
        notes.append(isolation.told(chosen.kernel, facts, policy))
    if chosen is not None and ranked[0] is not chosen:
        ranked = [chosen, *(candidate for candidate in ranked if candidate is not chosen)]
    told = tuple(ranked) if later is None else functools.partial(_with_others, ranked, later, facts, policy)
    return Report(routed.operation.name, facts, told, chosen, locked, tuple(notes), routed.varies, timed, routed.equal)


def _wants_elements(lock: Lock, ranked: Sequence[Candidate]) -> bool:
    """Whether all that keeps a locked kernel from a call is an empty tensor, which is no mistake of the caller."""
    named = (each.reasons for each in ranked if names_kernel(lock.kernel, each.kernel))
    return any(reasons and all(each.wanted == legality.NOT_EMPTY for each in reasons) for reasons in named)


def with_every_reason(report: Report, policy: Policy, machine: Machine) -> Report:
    """The report of a choice, with every reason of the refused kernels once it is read.

    They are those found when the choice was made, and those that the call, the policy and the libraries give.
    """
    facts, told = report.facts, report.ranked

    def ranked() -> tuple[Candidate, ...]:
        short = told if isinstance(told, tuple) else told()
        return tuple([each if each.legal else legality.completed(each, facts, policy, machine) for each in short])

    return msgspec.structs.replace(report, ranked=ranked)


def priority_decides(kernels: Sequence[Kernel], facts: Facts, policy: Policy, ledger: Ledger) -> bool:
    """Whether no kernel scores more than its priority, and a legal one that moves no data scores just that.

    A kernel that is known to be faster than what torch emulates scores more.

    Under capture limits may ask what was made before, which changes; nothing is left for later there.
    """
    bent = policy.locks or policy.rules or policy.prefer_sources or policy.avoid_sources or policy.isolating
    if bent or policy["max_error"] or facts["capturing"] or not ledger.untimed(facts):
        return False
    return not (emulation.lacks(facts.device, facts["dtype"]) and any(each.widens is not None for each in kernels))


def _with_others(ranked: Sequence[Candidate], later: Later, facts: Facts, policy: Policy) -> tuple[Candidate, ...]:
    """The candidates of a call whose first one won, with those that were left out."""
    return tuple(order([*ranked, *later()], facts, policy, {}))


def _refused(candidate: Candidate, reason: Reason) -> Candidate:
    return msgspec.structs.replace(candidate, reasons=(*candidate.reasons, reason), terms=(), evidence=None)


def _cost_of_lock(held: Candidate, best: Candidate) -> list[str]:
    if held is best:
        return ["the lock costs nothing: it names the best kernel"]
    if held.evidence is not None and best.evidence is not None:
        factor = held.evidence.cost_us / best.evidence.cost_us
        return [
            (
                f"the lock costs a factor of {factor:.2f}: {best.kernel.id} takes {best.evidence.told}, "
                f"{held.kernel.id} {held.evidence.told}"
            )
        ]
    return [f"the lock costs {best.score - held.score:.1f} points: {best.kernel.id} would be chosen without it"]


def require(report: Report) -> Candidate:
    """The chosen candidate, or the error that tells why there is none."""
    if report.chosen is not None:
        return report.chosen
    if report.facts["capturing"]:
        unsafe = [
            kernel_id
            for kernel_id, reasons in report.failures.items()
            if {reason.code for reason in reasons} <= {ReasonCode.CUDA_GRAPH_UNSAFE, ReasonCode.JIT_DISABLED}
        ]
        told = {name: each for name in unsafe for each in report.failures[name] if proofs.is_verdict(each)}
        raise CudaGraphUnsafeError(report.operation, unsafe, told)
    advice = report.facts.operation.advice
    hint = "" if advice is None else advice(report.facts, report.failures)
    if report.locked:
        hint = f"the {report.locked} allows nothing else; unlock it or lock with otherwise='select'"
    raise NoKernelFoundError(report.operation, report.failures, hint, _bound(report))


def _bound(report: Report) -> tuple[str, ...]:
    """The kernel that a lock names, wherever it could run: the one that the user asks about comes first."""
    return tuple(each.kernel.id for each in report.candidates[:1]) if report.locked else ()


PLACE: ContextVar[str] = ContextVar("layerzero_place", default="")
"""The path of the module that a call is made in, as far as a model is followed (``lz.trace``)."""


SHAPES_ONLY = "shapes only: judged as on "
"""How the note begins of a call that nothing ran: its tensors have no memory."""


def why(report: Report) -> str:
    """Why the kernel of a report was chosen, in a few words."""
    chosen = report.chosen
    assert chosen is not None
    notes = "".join(f"; {note}" for note in report.notes if note.startswith(("frozen", SHAPES_ONLY)))
    if report.locked:
        return report.locked
    if chosen.kernel.is_reference:
        refused = [f"{each.kernel.id}: {each.reasons[0]}" for each in report.candidates if each.reasons]
        more = f"; and {len(refused) - 1} more" if len(refused) > 1 else ""
        return f"no kernel may run it ({refused[0]}{more})" if refused else "there is no kernel of it"
    if chosen.time_us is None and chosen.kernel.is_stock(report.facts):
        return f"what torch runs itself; not measured{notes}"
    if chosen.time_us is None:
        return f"{', '.join(f'{term.name} {term.points:+.0f}' for term in chosen.terms)}; not measured{notes}"
    assert chosen.evidence is not None
    return f"{chosen.evidence.told}{notes}"
