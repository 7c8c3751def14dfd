"""Run in a child process what never ran on this machine, so that whoever measures it afterwards survives it.

One child answers many questions, since most of its time goes into importing torch, loading libraries and compiling; a
kernel's calls go to the same child. Where one ends it, a new child goes on with the next. Results are not compared
here: whoever measures does that, and once is enough.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict, class_text
from layerzero.core.recipe import CallRecipe
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.first_run import marked
from layerzero.testing.apart import Task
from layerzero.testing.process import apart_on, by_device
from layerzero.tuning.proving.child import Question, Reply, homes
from layerzero.tuning.proving.confirm import TIMEOUT_S, ask

_MOST_CHILDREN = 6
_CORES_A_CHILD = 2
"""A child imports torch, and the compilers that it starts have threads of their own."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a child found about a kernel and a call.

    Attributes:
        verdict: None where it could not be asked.
        detail: a line about it.
        unsafe: whether it may end this process, too: without a verdict, the child that ran it was killed.
    """

    kernel: Kernel
    facts: Facts
    verdict: Verdict | None
    detail: str
    unsafe: bool = False

    @property
    def guilty(self) -> bool:
        """Whether the kernel must not run calls of this class here."""
        return self.verdict not in (None, Verdict.PASSED)


def is_new(kernel: Kernel, facts: Facts) -> bool:
    """Whether a kernel never ran a call's class on this machine, as far as the ledger remembers machines.

    torch's own kernels are as trusted as torch is. Without a folder to remember in, nothing counts as new.
    """
    if not marked(kernel) or ENGINE.ledger.verdict(kernel, facts) is not None:
        return False
    return ENGINE.ledger.unproved(kernel, facts)


def rehearse(
    pairs: Sequence[tuple[Kernel, Facts]],
    *,
    modules: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    stop: Callable[[], bool] = lambda: False,
) -> list[Rehearsed]:
    """Run each kernel on a call like its own in child processes; remember who was wrong, crashed or hung.

    Args:
        modules: modules that register kernels, imported in the child.
        timeout_s: seconds that one kernel may be silent, compiling included.
        stop: asked all the while; once it says so, children are killed, and what is left counts as unsafe.
    """
    classes = {(kernel.id, class_text(facts)): (kernel, facts) for kernel, facts in pairs}
    most = max(1, min(_MOST_CHILDREN, (os.cpu_count() or 1) // _CORES_A_CHILD))
    found: list[Rehearsed] = []

    def told(task: Task, reply: Reply) -> None:
        kernel, facts = task.about
        found.append(Rehearsed(kernel, facts, reply.verdict, reply.detail, reply.unsafe))
        if reply.verdict is not None and found[-1].guilty:
            ENGINE.ledger.record_verdict(kernel, facts, reply.verdict)

    for of_one in by_device(classes.values()):
        shares, tasks = _shares(of_one, most), []
        for lane, share in enumerate(shares):
            for kernel, facts in share:
                named = list(dict.fromkeys([*modules, *homes([kernel])]))
                question = Question(kernel.id, CallRecipe.of(facts), named, compare=False)
                tasks.append(Task(question, kernel.id, timeout_s, f"child {lane}", (kernel, facts)))
        ask(tasks, told, len(shares), stop, apart_on(of_one[0][1].device))
    if any(each.guilty for each in found):
        ENGINE.bump()
    return found


def _shares(pairs: Sequence[tuple[Kernel, Facts]], count: int) -> list[list[tuple[Kernel, Facts]]]:
    """One share for each child, as even as they get with every kernel's calls in one; what may compile comes last.

    A driver that compiled FlashAttention 2's PTX for half a minute a variant held up FlashAttention 3, of the same
    library and in the same child, until the time was over: 157 of 186 calls went without its times (H200, 2026-11-24).
    """
    kernels: dict[str, list[tuple[Kernel, Facts]]] = defaultdict(list)
    for kernel, facts in pairs:
        kernels[kernel.id].append((kernel, facts))
    shares: list[list[tuple[Kernel, Facts]]] = [[] for _ in range(count)]
    for each in sorted(kernels.values(), key=lambda calls: (calls[0][0].jit, -len(calls))):
        min(shares, key=len).extend(each)
    return [share for share in shares if share]
