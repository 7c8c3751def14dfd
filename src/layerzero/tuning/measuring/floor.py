"""Who cannot win a call, so that nobody measures it: by what it must move at least, or by what its neighbours took.

*Memory.* Whatever a plan does, it reads and writes the operation's tensors, and what it copies besides. That takes at
least what this machine's measured copy takes, or, from a cache, a part of it. Who is above the best time that was seen
in the same contest is out, and so is, in later runs, who is above the best that is kept for the very call.

*Neighbours.* Calls of other sizes, measured on this machine, say about what each kernel takes here. Who is predicted to
be :data:`HOPELESS` times slower than the best, with little doubt, is out until somebody measures everything ``again``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from layerzero.core.evidence import Evidence, Provenance
from layerzero.core.facts import Facts
from layerzero.core.plan import Candidate
from layerzero.tuning.measuring.ceiling import copy_gb_s

CACHED = 4.0
"""How many times quicker data may come from a cache than from memory."""

MATTERS = 2**20
"""Bytes of copies below which nobody asks what the machine can do: the answer takes a part of a second, once."""

HOPELESS = 2.5
"""Times the best, as in :class:`layerzero.tuning.measuring.timing.Effort`."""

SURE = 0.95
"""Confidence from which on a prediction rules out: a claimed error of 37 %."""


def copied_bytes(candidate: Candidate, facts: Facts) -> int:
    """Bytes that the copies of a candidate's plan read and write at least."""
    moved = {each.argument for each in candidate.adaptations if each.kind in ("copy", "expand")}
    tensors = [tensor for name, tensor in facts.tensors.items() if name in moved]
    return sum(2 * math.prod(each.shape) * each.dtype.itemsize for each in tensors)


def least_us(candidate: Candidate, facts: Facts, device: torch.device) -> float:
    """Microseconds below which a candidate's plan cannot be done; 0 where it copies nothing that matters."""
    copied = copied_bytes(candidate, facts)
    if copied < MATTERS:
        return 0.0
    least = 0.0 if facts.operation.work is None else facts.operation.work(facts).bytes
    return (least + copied) / copy_gb_s(device) / 1e3 / CACHED


def outdone(
    candidates: Iterable[Candidate], evidence: Mapping[str, Evidence], facts: Facts, device: torch.device
) -> set[str]:
    """Ids of the candidates whose copies alone take longer than another one was measured to take for this very call.

    It is asked anew each time: whoever is quicker may be gone tomorrow.
    """
    own = {
        name: each.time_us
        for name, each in evidence.items()
        if each.provenance is Provenance.MEASURED and not each.stands_in
    }
    best = min(own.values(), default=math.inf)
    return {
        each.kernel.id
        for each in candidates
        if math.isfinite(best) and each.kernel.id not in own and least_us(each, facts, device) > best
    }


def hopeless(evidence: Mapping[str, Evidence]) -> set[str]:
    """Ids of the kernels that this machine's own times of other calls rule out."""
    own = {
        name: each
        for name, each in evidence.items()
        if each.provenance in (Provenance.MEASURED, Provenance.PREDICTED) and each.confidence >= SURE
    }
    best = min((each.cost_us for each in own.values()), default=math.inf)
    return {
        name for name, each in own.items() if each.provenance is Provenance.PREDICTED and each.cost_us > HOPELESS * best
    }
