"""What selection produces: an execution plan, the judged candidates, and the report that explains them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from layerzero.core.evidence import Evidence
from layerzero.core.fact_reads import EVERYTHING, NEGATED, Reads
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.reasons import Reason, ReasonCode


class Adaptation(msgspec.Struct, frozen=True, gc=False):
    """One thing the plan does to an argument so that a kernel becomes legal.

    Attributes:
        kind: ``view`` (no data moves), ``copy``, ``expand`` (kv heads repeated), ``fold`` (into the mask), ``negate``,
            ``cast`` (to another dtype), ``split`` (the batch runs in chunks), ``apart`` (its entries run one by one),
            ``beyond`` (it takes more memory than policy allows).
        argument: the argument it works on; empty for a cast of the result.
        text: what happens, for people.
        dtype: what a cast gives.
    """

    kind: str
    argument: str
    text: str
    dtype: torch.dtype | None = None

    @property
    def moves_data(self) -> bool:
        """Whether memory is written; strict mode refuses that."""
        return self.kind not in ("view", "beyond")


def moves_data(adaptations: Iterable[Adaptation]) -> bool:
    """Whether any of them writes memory."""
    for each in adaptations:  # noqa: SIM110  # any makes twice as many calls, three times each miss
        if each.moves_data:
            return True
    return False


def moved_bytes(adaptations: Iterable[Adaptation], facts: Facts) -> int:
    """Bytes of the arguments of a call that are copied, repeated or cast; results that are cast do not count."""
    moved = {each.argument for each in adaptations if each.moves_data} & set(facts.tensors)
    return sum(math.prod(facts.tensors[name].shape) * facts.tensors[name].dtype.itemsize for name in moved)


class Term(msgspec.Struct, frozen=True, gc=False):
    """One summand of a score."""

    name: str
    points: float


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A kernel as judged for one call.

    Attributes:
        kernel: the kernel.
        reasons: why it is refused; empty means legal.
        adaptations: what the plan would do for it.
        terms: summands of its score; empty unless legal.
        evidence: its time as measured, predicted or shipped, and the cost that decides; None where there is none.
        workspace: what it needs besides its results, declared, measured or unknown; empty in the report of a plan.
    """

    kernel: Kernel
    reasons: tuple[Reason, ...]
    adaptations: tuple[Adaptation, ...] = ()
    terms: tuple[Term, ...] = ()
    evidence: Evidence | None = None
    workspace: str = ""

    @property
    def time_us(self) -> float | None:
        """The time as measured, predicted or shipped; None where there is none."""
        return None if self.evidence is None else self.evidence.time_us

    @property
    def cost_us(self) -> float | None:
        """What it is compared with others by; None where there is no time."""
        return None if self.evidence is None else self.evidence.cost_us

    @property
    def provenance(self) -> str | None:
        """Where the time comes from."""
        return None if self.evidence is None else str(self.evidence.provenance)

    @property
    def confidence(self) -> float | None:
        """How much the time may decide, 0 to 1."""
        return None if self.evidence is None else self.evidence.confidence

    @property
    def noise(self) -> float:
        """Relative spread of what was measured; 0 where there is no time."""
        return 0.0 if self.evidence is None else self.evidence.noise

    @property
    def legal(self) -> bool:
        """Whether it may run."""
        return not self.reasons

    @property
    def score(self) -> float:
        """Sum of its terms."""
        return sum([term.points for term in self.terms])

    def to_dict(self) -> dict[str, object]:
        return {
            "kernel_id": self.kernel.id,
            "legal": self.legal,
            "score": round(self.score, 3) if self.legal else None,
            "terms": {term.name: round(term.points, 3) for term in self.terms},
            "time_us": self.time_us,
            "device_us": None if self.evidence is None else self.evidence.device_us,
            "noise": None if self.evidence is None else self.evidence.noise,
            "error": None if self.evidence is None else self.evidence.error,
            "cost_us": self.cost_us,
            "evidence": self.provenance,
            "confidence": self.confidence,
            "workspace": self.workspace,
            "adaptations": [adaptation.text for adaptation in self.adaptations],
            "reasons": [
                {
                    "code": str(reason.code),
                    "fact": reason.fact,
                    "wanted": str(reason.wanted),
                    "got": str(reason.got),
                    "message": reason.message,
                }
                for reason in self.reasons
            ],
        }


class Report(msgspec.Struct, frozen=True):
    """Why a kernel was, or would be, selected.

    Attributes:
        operation: the routed operation.
        facts: what was known about the call.
        ranked: the candidates, or what judges those that could not win, once they are read.
        chosen: the winner, None if nothing is legal.
        locked: the lock that decided, as ``pattern=kernel``.
        notes: what else a reader should know (an assumed layout, what a lock costs).
        varies: axes whose size the route did not depend on, within its bit length.
        equal: two of them that stay as long as each other; or none.
        timed: whether calls of this class may have times. How memory lies is part of the choice then: a call whose
            memory lies otherwise may have times where this one has none.
    """

    operation: str
    facts: Facts
    ranked: tuple[Candidate, ...] | Callable[[], tuple[Candidate, ...]]
    chosen: Candidate | None
    locked: str = ""
    notes: tuple[str, ...] = ()
    varies: tuple[str, ...] = ()
    timed: bool = False
    equal: tuple[str, ...] = ()

    def __reduce__(self) -> Any:
        """What is left to judge is judged first: what judges it is no value."""
        self.candidates  # noqa: B018
        return super().__reduce__()

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every candidate, the chosen first, then by score, then the refused; first of all those that a lock wants.

        ``lz.explain`` gives every reason; the report of a plan that runs has one for each refused kernel.
        """
        ranked = self.ranked
        if not isinstance(ranked, tuple):
            ranked = ranked()
            msgspec.structs.force_setattr(self, "ranked", ranked)
        return ranked

    @property
    def kernel_id(self) -> str | None:
        """Id of the winner."""
        return self.chosen.kernel.id if self.chosen else None

    @property
    def failures(self) -> dict[str, tuple[Reason, ...]]:
        """Refused kernels and why."""
        return {each.kernel.id: each.reasons for each in self.candidates if not each.legal}

    def reasons(self, kernel_id: str) -> tuple[Reason, ...]:
        """Why this kernel is refused; empty if it is legal. Raises KeyError for a kernel that is no candidate."""
        for candidate in self.candidates:
            if kernel_id == candidate.kernel.id or kernel_id in candidate.kernel.aliases:
                return candidate.reasons
        raise KeyError(f"{kernel_id!r} is no candidate of {self.operation}")

    def to_dict(self) -> dict[str, object]:
        return {
            "operation": self.operation,
            "chosen": self.kernel_id,
            "score": round(self.chosen.score, 3) if self.chosen else None,
            "transform_bytes": moved_bytes(self.chosen.adaptations, self.facts) if self.chosen else 0,
            "locked": self.locked or None,
            "notes": list(self.notes),
            "facts": self.facts.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }

    def __str__(self) -> str:
        locked = f"  ({self.locked})" if self.locked else ""
        lines = [f"{self.operation} -> {self.kernel_id or 'no legal kernel'}{locked}"]
        elsewhere = 0  # of other devices: three lines of each would hide those that could run here
        for candidate in self.candidates:
            if self.chosen and any(reason.code is ReasonCode.PLATFORM_MISMATCH for reason in candidate.reasons):
                elsewhere += 1
            elif candidate.legal:
                terms = "  ".join(f"{term.name} {term.points:+.1f}" for term in candidate.terms)
                told = "" if candidate.evidence is None else f"  ({candidate.evidence.told})"
                lines.append(f"  {candidate.kernel.id}: {candidate.score:.1f} = {terms}{told}")
                lines.extend(f"    adapts: {adaptation.text}" for adaptation in candidate.adaptations)
                lines.extend([f"    workspace: {candidate.workspace}"] if candidate.workspace else [])
            else:
                lines.append(f"  {candidate.kernel.id}: refused")
                lines.extend(f"    {reason}" for reason in candidate.reasons)
        if elsewhere:
            lines.append(f"  {elsewhere} more are not for this device; .failures says of each why")
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)


@dataclass(slots=True)
class Plan:
    """A bound callable, its adapters and its trace.

    Attributes:
        kernel: what runs.
        report: why.
        source: the straight-line Python that a call executes; what you read is what runs.
        adapt: from the function's arguments to the tensors the kernel gets; used to prove legality once.
        run: from the function's arguments to the results.
        proved: whether the limits were re-evaluated on the tensors themselves.
        used: reference bit for eviction.
        direct: the kernel with its constants in place, called like ``run``: what C calls where ``run`` would do nothing
            else; None elsewhere.
        reads: the facts that ``load`` read; other calls share the plan only where they agree in them.
        adapted: the call as the kernel gets it, where its limits were evaluated on other tensors than the caller's.
        keep: puts it where later calls find it, once its first run was accepted; None where it is not to be kept.
        instead: what runs where the kernel is not prepared for a call's handle, by the sizes of the call.
        gives: the dtype that the result is cast to; None where it is returned as the kernel gives it.
        reads_negated: whether the kernel reads tensors with the negative bit rightly; the hit path asks others for it.
    """

    kernel: Kernel
    report: Report
    source: str
    adapt: Callable[..., Mapping[str, Any]]
    run: Callable[..., Any]
    adaptations: tuple[Adaptation, ...] = ()
    proved: bool = False
    used: bool = False
    direct: Callable[..., Any] | None = None
    reads: Reads = frozenset({EVERYTHING})
    adapted: Facts | None = None
    keep: Callable[[Plan], None] | None = None
    instead: dict[Hashable, Plan] = field(default_factory=dict)
    gives: torch.dtype | None = field(init=False, default=None)
    reads_negated: bool = field(init=False)

    def __post_init__(self) -> None:
        for each in self.adaptations:
            if each.kind == "cast" and not each.argument:
                self.gives = each.dtype
        self.reads_negated = self.kernel.handles_negated and NEGATED not in self.reads

    def __deepcopy__(self, memo: object) -> Plan:
        """The plan itself: it holds code of this process, and no call changes what it computes."""
        return self

    def __copy__(self) -> Plan:
        """The plan itself, too."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"Plan: wanted something that another process can read, got the plan of {self.kernel.id}, which holds code "
            "of this one; pickle plan.report, or keep choices in a file with lz.freeze"
        )

    @property
    def kernel_id(self) -> str:
        """Id of the kernel."""
        return self.kernel.id

    @property
    def transforms(self) -> tuple[str, ...]:
        """What happens to the arguments."""
        return tuple(adaptation.text for adaptation in self.adaptations)

    @property
    def transforms_data(self) -> bool:
        """Whether any transform moves data."""
        return moves_data(self.adaptations)

    @property
    def transform_cost_total(self) -> int:
        """Number of transforms that move data."""
        return sum(adaptation.moves_data for adaptation in self.adaptations)

    @property
    def transform_bytes(self) -> int:
        """Bytes of the arguments that these transforms move, of the call that it was made for."""
        return moved_bytes(self.adaptations, self.report.facts)

    @property
    def uses_fallback(self) -> bool:
        """Whether the operation's reference runs."""
        return self.kernel.is_reference

    @property
    def debug_info(self) -> Report:
        """The report, under the specification's name."""
        return self.report


_LISTENERS: list[Callable[[], None]] = []


def when_outdated(listener: Callable[[], None]) -> None:
    """Call a function whenever kept plans are outdated, by something outside of calls."""
    _LISTENERS.append(listener)


def outdate() -> None:
    """Declare all kept plans outdated: calls choose anew."""
    for listener in _LISTENERS:
        listener()
