"""Build kernels in child processes, for libraries that keep what they compile where other processes find it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence

import msgspec

from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.recipe import CallRecipe
from layerzero.engine.jit import BUILT, BuildIdentity, BuildOutcome, build_of
from layerzero.testing.children import BUILD_S, End, Task, run_apart
from layerzero.testing.process import apart_on, by_device
from layerzero.tuning.proving.build_child import AT_ONCE, Build
from layerzero.tuning.proving.child import homes

Told = Callable[[Kernel, Facts, BuildOutcome], None]
"""Called with what became of a build."""


def build_apart(
    pairs: Sequence[tuple[Kernel, Facts]],
    told: Told,
    stop: Callable[[], bool],
    *,
    modules: Sequence[str] = (),
    at_once: int = AT_ONCE,
    begins: Callable[[Kernel, Facts], None] = lambda _kernel, _facts: None,
) -> None:
    """Build kernels for calls, each build once, in children that do one job after the other.

    Args:
        pairs: kernels that say ``prebuilt`` or ``cache_folder``, each with a call.
        told: called with each build that ended; not with those that were stopped.
        stop: called all the while; once it is true, the children are killed.
        modules: modules that register kernels, besides those that did so here.
        at_once: children that work at the same time.
        begins: called with each build that begins, for several are under way at once.
    """
    unique = {build_of(kernel, facts): (kernel, facts) for kernel, facts in pairs if not BUILT.ready(kernel, facts)}
    for of_one in by_device(unique.values()):
        _build(of_one, told, stop, modules, at_once, begins)


def _build(
    pairs: Sequence[tuple[Kernel, Facts]],
    told: Told,
    stop: Callable[[], bool],
    modules: Sequence[str],
    at_once: int,
    begins: Callable[[Kernel, Facts], None],
) -> None:
    """The same for calls of one device, each build being there once."""
    named = list(dict.fromkeys([*modules, *homes(kernel for kernel, _ in pairs)]))
    lanes = _lanes(pairs)
    tasks = deque(
        Task(
            Build(kernel.id, CallRecipe.of(facts), named),
            kernel.id,
            BUILD_S,
            lane=f"lane {lanes[build_of(kernel, facts)]}",
            about=(kernel, facts),
        )
        for kernel, facts in pairs
    )

    def ended(task: Task, end: End) -> None:
        if end.kind != "stopped":
            kernel, facts = task.about
            hangs = end.kind == "hung" and end.started  # wherever it is stuck, the next process would wait as long
            told(kernel, facts, BuildOutcome(str(end), lasting=hangs or end.verdict is not None))

    run_apart(
        "layerzero.tuning.proving.build_child",
        tasks,
        found=lambda task, value: told(task.about[0], task.about[1], msgspec.convert(value, BuildOutcome)),
        ended=ended,
        begins=lambda task: begins(*task.about),
        at_once=at_once,
        modules=named,
        environment=apart_on(pairs[0][1].device),
        stop=stop,
    )


def _lanes(pairs: Iterable[tuple[Kernel, Facts]]) -> dict[BuildIdentity, int]:
    """What is built after what: kernels of one library that depend on the same, by one child.

    They share what is compiled: FlashInfer's decoding by tensor cores, its tokens over pages and its ragged prompts are
    one module of 65 s, which a second child would wait for, or write at the same moment. A key that holds another one
    (FlashInfer's cascade takes the module for batches besides its own) is a lane of its own: the second one waits for
    the library's lock.

    All else goes to whichever child is free, and a child that has begun a lane does all of it first. Of two children
    that shared the builds out before they began, one had not come to half of its FlashAttention 4 after 90 s, behind a
    module of 46, and the other was done (tuning an H200, 2026-11-24).
    """
    found: dict[BuildIdentity, int] = {}
    shared: dict[Hashable, int] = {}
    for kernel, facts in pairs:
        identity = build_of(kernel, facts)
        whose = kernel.source if kernel.build_key is not None else kernel.id  # others share a class of calls, no more
        found[identity] = shared.setdefault((whose, identity[1:]), len(shared))
    return found
