"""A kernel's first run on this machine, and which kernel is suspected where a process or a device context dies.

Before a library runs a class of calls for the first time, the ledger commits a marker; it is taken away when the first
result was accepted. A marker that a dead process left behind names the kernel that a segmentation fault, a division
error or a kill happened in. A class that was proved here once is never marked again, and hits know nothing of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Ledger, class_text
from layerzero.core.plan import Plan
from layerzero.core.system import forking

MAX_RECENT = 32
"""Classes that come under suspicion when a device's context dies: errors arise later than the launch that made them."""


def marked(kernel: Kernel) -> bool:
    """Whether a kernel's first run is marked: torch's own kernels and the references are as trusted as torch is."""
    return kernel.source not in ("torch", "reference")


_UNMARKED = nullcontext()


def first_run(plan: Plan, ledger: Ledger) -> AbstractContextManager[None]:
    """Mark what runs inside, until it ended in a result or in an exception.

    On a GPU the stream is synchronised before the marker goes, so that a fault shows itself here. A CUDA graph capture
    admits no synchronisation and proves nothing: it is not marked. Nor is a collective: a rank that ended while it
    waited for another would suspect a kernel that the others run.
    """
    facts = plan.report.facts
    marks = marked(plan.kernel) and not facts["capturing"] and not facts.operation.is_collective
    marker = ledger.begin(plan.kernel, facts) if marks else None
    return _UNMARKED if marker is None else _until_accepted(marker, facts, ledger)


@contextmanager
def _until_accepted(marker: object, facts: Facts, ledger: Ledger) -> Iterator[None]:
    try:
        yield
        if facts.device.torch_type == "cuda":
            torch.cuda.current_stream(facts.device.index).synchronize()
    except BaseException:
        ledger.withdraw(marker)
        raise
    ledger.accept(marker)


class Recent:
    """The plans that were chosen last on a device that fails asynchronously, one entry for each class.

    Launches themselves are not recorded: a hit would pay for it on every call. What was chosen last is the nearest
    thing that costs hits nothing.
    """

    def __init__(self) -> None:
        self._lock = forking.lock()
        self._chosen: deque[tuple[str, str, Kernel, Facts]] = deque(maxlen=MAX_RECENT)

    def add(self, plan: Plan) -> None:
        """Remember a plan that is about to run for the first time."""
        if plan.report.facts.device.torch_type == "cuda":
            self._add(plan)

    def _add(self, plan: Plan) -> None:
        if not marked(plan.kernel):
            return
        name = (plan.kernel.id, class_text(plan.report.facts))
        with self._lock:
            others = [each for each in self._chosen if each[:2] != name]
            self._chosen = deque([*others, (*name, plan.kernel, plan.report.facts)], MAX_RECENT)

    def accuse(self, plan: Plan, ledger: Ledger, error: BaseException) -> tuple[str, ...]:
        """Make suspects of them, and of the plan that raised; return their names with their classes."""
        self._add(plan)
        with self._lock:
            chosen = tuple(reversed(self._chosen))
        why = f"one of the last {len(chosen)} chosen when the device's context died: {str(error).strip()[:200]}"
        for _, _, kernel, facts in chosen:
            ledger.suspect(kernel, facts, why)
        return tuple(f"{kernel_id} for {text}" for kernel_id, text, _, _ in chosen)

    def clear(self) -> None:
        """Forget everything (for tests)."""
        with self._lock:
            self._chosen.clear()
