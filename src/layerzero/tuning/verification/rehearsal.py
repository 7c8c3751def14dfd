"""Run in child processes what never ran on this machine before it is measured, and what is a suspect of a crash.

In a rehearsal one child answers many questions, since most of its time goes into importing torch, loading libraries and
compiling; a kernel's calls go to the same child. Where one ends it, a new child goes on with the next. Results are not
compared: measuring does that, and once is enough. A suspect is run in a child of its own, and its result is compared.

Here, too, the proofs that a capture needs where ``graph_strict_mode`` is set.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict, capture_text, class_text
from layerzero.core.recipe import CallRecipe
from layerzero.core.system import log
from layerzero.engine.config import SCOPES
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.first_run import marked
from layerzero.engine.proofs import SETTING
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.answers import explain
from layerzero.testing.children import START_S, End, Task, run_apart
from layerzero.testing.process import APART, apart_on, by_device
from layerzero.tuning.verification.child import ChildTask, Reply, homes
from layerzero.tuning.verification.vetting import Vetted, vet_calls

TIMEOUT_S = START_S
"""How long a kernel may run before it counts as hanging; compiling is part of it."""


class Confirmation(Vetted):
    """What a child found about a suspect; ``verdict`` is None where it could not be run, and it stays a suspect."""

    def to_dict(self) -> dict[str, object]:
        told = super().to_dict()
        del told["reached"]
        return {**told, "verdict": told["verdict"] or "unknown"}

    def __str__(self) -> str:
        verdict = "still a suspect" if self.verdict is None else str(self.verdict)
        return f"{self.kernel_id} for {self.call_class}: {verdict}: {self.detail}"


def confirm_suspects(
    *, modules: Sequence[str] = (), again: bool = False, timeout_s: float = TIMEOUT_S
) -> tuple[Confirmation, ...]:
    """Run every suspect in a child process, with blocking launches, and compare its results with the reference's.

    One that passes may be chosen again. One that is wrong, crashes or hangs is banned, for calls with sizes like these
    and until its library or torch has another version.

    Args:
        modules: modules that register kernels, imported in the child; those of entry points are found by themselves,
            and what this process imported is known. What only a record names is not imported: write access to the cache
            folder would be enough to run it.
        again: run the banned as well, as after a repair that changed no version.
        timeout_s: seconds after which a kernel counts as hanging.
    """
    found: list[Confirmation] = []

    def told(task: Task, reply: Reply) -> None:
        suspect, detail = task.about, reply.detail
        if reply.verdict is not None:
            ENGINE.ledger.settle(suspect, reply.verdict, detail)
        elif suspect.kernel_id not in known and suspect.module.replace(".", "_").isidentifier():
            detail += f"; its record says that {suspect.module} registers it: name that with --module if you trust it"
        found.append(Confirmation(suspect.kernel_id, suspect.call_class, reply.verdict, detail))

    known = {kernel.id: kernel for kernel in REGISTRY.kernels()}
    tasks: list[Task] = []
    for suspect in ENGINE.ledger.suspects():
        if suspect.verdict is None or again:
            named = homes([known[suspect.kernel_id]] if suspect.kernel_id in known else [], modules)
            question = ChildTask(suspect.kernel_id, suspect.call, named)
            tasks.append(Task(question, suspect.kernel_id, timeout_s, f"child {len(tasks)}", suspect))
    ask(tasks, told)
    if found:
        ENGINE.bump()
    return tuple(found)


def ask(
    tasks: Sequence[Task],
    told: Callable[[Task, Reply], None],
    at_once: int = 1,
    stop: Callable[[], bool] = lambda: False,
    environment: Mapping[str, str] = APART,
) -> None:
    """Have questions answered by children, those of a lane by one of them."""

    def ended(task: Task, end: End) -> None:
        detail = f"it did not end within {end.how}" if end.verdict is Verdict.HUNG else str(end)
        unsafe = end.kind in ("given up", "stopped") or (end.kind in ("killed", "starved") and end.step is not None)
        told(task, Reply(end.verdict, detail, unsafe))

    run_apart(
        "layerzero.tuning.verification.child",
        deque(tasks),
        found=lambda task, value: told(task, msgspec.convert(value, Reply)),
        ended=ended,
        at_once=at_once,
        stop=stop,
        environment=environment,
        modules=[module for task in tasks for module in task.job.modules],
    )


_MOST_CHILDREN = 6
_CORES_A_CHILD = 2
"""A child imports torch, and the compilers that it starts have threads of their own."""


def is_new(kernel: Kernel, facts: Facts) -> bool:
    """Whether a kernel never ran a call's class on this machine, as far as the ledger remembers machines.

    torch's own kernels are as trusted as torch is. Without a folder to remember in, nothing counts as new.
    """
    if not marked(kernel) or ENGINE.ledger.verdict(kernel, facts) is not None:
        return False
    return ENGINE.ledger.unproved(kernel, facts)


def rehearse(
    pairs: Sequence[tuple[Kernel, Facts]], *, modules: Sequence[str] = (), stop: Callable[[], bool] = lambda: False
) -> list[tuple[Kernel, Facts, Reply]]:
    """Run each kernel on a call like its own in child processes; remember which were wrong, crashed or hung.

    Args:
        modules: modules that register kernels, imported in the child.
        stop: called all the while; once it is true, children are killed, and what is left counts as unsafe.
    """
    classes = {(kernel.id, class_text(facts)): (kernel, facts) for kernel, facts in pairs}
    most = max(1, min(_MOST_CHILDREN, (os.cpu_count() or 1) // _CORES_A_CHILD))
    found: list[tuple[Kernel, Facts, Reply]] = []

    def told(task: Task, reply: Reply) -> None:
        kernel, facts = task.about
        found.append((kernel, facts, reply))
        if reply.verdict is not None and reply.guilty:
            ENGINE.ledger.record_verdict(kernel, facts, reply.verdict)

    for of_one in by_device(classes.values()):
        shares, tasks = _shares(of_one, most), []
        for lane, share in enumerate(shares):
            for kernel, facts in share:
                question = ChildTask(kernel.id, CallRecipe.of(facts), homes([kernel], modules), compare=False)
                tasks.append(Task(question, kernel.id, TIMEOUT_S, f"child {lane}", (kernel, facts)))
        ask(tasks, told, len(shares), stop, apart_on(of_one[0][1].device))
    if any(reply.guilty for _, _, reply in found):
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


MOST_KERNELS = 4
"""How many kernels are tried for a call, one after the other: torch's own are among the first few."""


def prove_chosen(calls: Sequence[Facts]) -> tuple[Vetted, ...]:
    """Prove what calls would choose in a capture, and where that is unsafe, what they would choose then.

    Returns: what was found. What could not be tried has no verdict, and strict mode goes on refusing it; it is logged.
    """
    found: dict[tuple[str, str], Vetted] = {}
    for _ in range(MOST_KERNELS):
        unknown = [(each, facts) for facts in calls for each in _chosen(facts)]
        pairs = [(each, facts) for each, facts in unknown if (each.id, capture_text(facts)) not in found]
        if not pairs:
            break
        found |= {(each.kernel_id, each.call_class): each for each in vet_calls(pairs, graph=True, go_on=True)}
    for each in found.values():
        if each.verdict is None:
            log.warning("%s: no capture of it was proved, which %s asks for", each, SETTING)
    return tuple(found.values())


def _chosen(facts: Facts) -> Iterator[Kernel]:
    """What the call would run before the capture and in it, as far as nothing is known of its captures."""
    with SCOPES.scope({SETTING: False}):
        reports = [explain(facts), explain(facts.on(facts.device, capturing=True))]
    for report in reports:
        chosen = report.chosen
        if chosen is not None and chosen.kernel.graph_safe and ENGINE.ledger.capture(chosen.kernel, facts) is None:
            yield chosen.kernel
