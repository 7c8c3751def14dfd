"""How much memory a kernel may take besides its results, and what runs where every kernel takes more.

A limit on memory must not make a call take more of it: a reference is no cheaper than what it stands in for. A T5
encoder in training (4 x 2100 tokens, 8 heads) took 20.9 s a step in the reference, which no limit had checked, where
the kernel that was refused for 1077 MiB took 13.3 (AMD EPYC, torch 2.13, 2026-11-24).
"""

from __future__ import annotations

import msgspec

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.plan import Adaptation, Candidate
from layerzero.core.reasons import Reason, ReasonCode
from layerzero.engine import foreign_errors
from layerzero.engine.policy import Lock, Policy, bound_by

SETTING = "memory_headroom_mb"

BEYOND = Adaptation(
    "beyond", SETTING, f"take more than {SETTING} allows: every other kernel that may run takes as much or more"
)
"""What a plan does where memory alone keeps every kernel from a call."""


def reasons(kernel: Kernel, facts: Facts, policy: Policy) -> list[Reason]:
    """Whether what the kernel needs besides its results is more than policy allows."""
    if kernel.workspace_bytes is None:
        return []
    found: list[Reason] = []
    try:
        workspace = int(kernel.workspace_bytes(facts))
    except Exception as error:  # noqa: BLE001  # as with limits: it refuses its kernel and nothing else
        foreign_errors.let_pass(error)
        got = f"{type(error).__name__}: {error}"
        found.append(Reason(ReasonCode.CONSTRAINT_FAILED, "workspace_bytes", "a number", got))
        workspace = 0
    if workspace > policy.memory_headroom_mb * 2**20:
        limit_text, need = f"{policy.memory_headroom_mb} MiB", f"{workspace / 2**20:.0f} MiB"
        found.append(Reason(ReasonCode.MEMORY_HEADROOM_EXCEEDED, SETTING, limit_text, need))
    return found


def last_resort(judged: list[Candidate], facts: Facts, policy: Policy, lock: Lock | None) -> list[Candidate]:
    """Where nothing is legal, make legal what memory alone keeps from the call and what takes least of it.

    Without ``fallback_enabled`` the limit is a bound, and nothing runs beyond it.
    """
    if not policy.fallback_enabled:
        return judged
    named = bound_by(lock, judged)
    if any(each.legal for each in named):
        return judged
    needs = {each.kernel.id: each.kernel.workspace_for(facts) for each in named if lacks_memory_alone(each)}
    least = min(needs.values(), default=0)
    return [_beyond(each) if needs.get(each.kernel.id) == least else each for each in judged]


def lacks_memory_alone(candidate: Candidate) -> bool:
    """Whether a kernel is refused for the memory that it takes, and for nothing else."""
    codes = {reason.code for reason in candidate.reasons}
    return codes == {ReasonCode.MEMORY_HEADROOM_EXCEEDED}


def _beyond(candidate: Candidate) -> Candidate:
    return msgspec.structs.replace(candidate, reasons=(), adaptations=(*candidate.adaptations, BEYOND))
