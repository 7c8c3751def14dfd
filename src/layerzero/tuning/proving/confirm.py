"""Run every suspect in a child process of its own, and remember what was found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from layerzero.core.ledger import Verdict
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.registry import REGISTRY
from layerzero.testing.apart import START_S, End, Task, run_apart
from layerzero.testing.process import APART
from layerzero.tuning.proving.child import Question, Reply, homes

TIMEOUT_S = START_S
"""How long a kernel may run before it counts as hanging; compiling is part of it."""


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What a child found about a suspect; ``verdict`` is None where it could not be run, and it stays a suspect."""

    kernel_id: str
    call_class: str
    verdict: Verdict | None
    detail: str

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        verdict = "unknown" if self.verdict is None else str(self.verdict)
        return {
            "kernel_id": self.kernel_id, "call_class": self.call_class, "verdict": verdict, "detail": self.detail,
        }  # fmt: skip

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
            and what this process imported is known. What only a record names is not imported: whoever can write in the
            cache folder would have it run.
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
            own = homes([known[suspect.kernel_id]] if suspect.kernel_id in known else [])
            question = Question(suspect.kernel_id, suspect.call, list(dict.fromkeys([*modules, *own])))
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
        "layerzero.tuning.proving.child",
        deque(tasks),
        found=lambda task, value: told(task, msgspec.convert(value, Reply)),
        ended=ended,
        at_once=at_once,
        stop=stop,
        environment=environment,
        modules=[module for task in tasks for module in task.job.modules],
    )
