"""Vetting: a kernel proves itself on this machine, class by class, in a child process, before it is trusted.

    lz.vet()                                        what is refused until it is vetted, for its operations' cases
    lz.vet("norm.rms", kernels=["mine.*"], shapes=[(512, 1024)], dtype="bfloat16")
    lz.vet("tokenize", params={"tokenizer_id": "model/tokenizer.json"})       operations without tensors

A class is a kernel, operation, dtype, layout and the power of two of each size. The verdict is kept with the versions
of the kernel's library, of torch and of the device. Nothing of this runs in a request: only by order, in warmup, in a
tuning window, or in the background where the setting ``vet_in_background`` says so. There a kernel that a miss would
have liked to choose proves itself in a child, and the next miss may choose it: one thread, one child at a time, each
class once a process.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from layerzero.core.device import Device, device_here
from layerzero.core.dtypes import dtype_named
from layerzero.core.errors import InvalidCallError, LayerZeroWarning
from layerzero.core.facts import Facts
from layerzero.core.kernel import Kernel
from layerzero.core.ledger import Verdict, capture_text, class_text
from layerzero.core.operation import Case, Operation, Routed
from layerzero.core.reasons import ReasonCode
from layerzero.core.recipe import CallRecipe
from layerzero.core.system import forking, log, warn
from layerzero.core.system.resources import started
from layerzero.engine import legality, probe
from layerzero.engine.config import current_policy
from layerzero.engine.dispatch import ENGINE
from layerzero.engine.plain import plain_facts
from layerzero.engine.policy import names_any
from layerzero.engine.registry import REGISTRY
from layerzero.inspection.answers import taken
from layerzero.ops import function_of
from layerzero.ops.calls import as_shapes, case_of_shapes, listed
from layerzero.testing.children import BUILD_S, START_S, End, Task, run_apart
from layerzero.testing.process import apart_on, by_device
from layerzero.tuning.verification.child import ChildTask, Reply, homes

Pair = tuple[Kernel, Facts]

_ABSENT = frozenset({ReasonCode.NOT_INSTALLED, ReasonCode.BACKEND_IMPORT_FAILED, ReasonCode.PLATFORM_MISMATCH})


def plain_operations(pattern: str) -> list[Operation]:
    """Operations without tensors that a name, function or glob covers. Raises: KeyError for one that covers nothing."""
    found = [REGISTRY.operation(name) for name in REGISTRY.operations_named(pattern)]
    return [each for each in found if each.plain is not None]


def facts_of_case(operation: Operation, case: Case, params: Mapping[str, Any]) -> Facts:
    """The facts of one of its cases, with the place where another process finds what they name.

    Raises: InvalidCallError where ``params`` do not name it.
    """
    assert operation.plain is not None
    try:
        arguments = operation.plain.draw(case, params)
    except KeyError as error:
        wanted = f"params={{{error.args[0]!r}: ...}}, on the command line --param {error.args[0]}=..."
        raise InvalidCallError(operation.name, [f"wanted {wanted}, got {dict(params)}"]) from None
    return plain_facts(Routed(operation, {**operation.plain.portable(arguments)}))


def plain_pairs(
    pattern: str, params: Mapping[str, Any], named: Sequence[str] | None = None, *, again: bool = False
) -> Iterator[Pair]:
    """Kernels that are installed, take what ``params`` name, and have to prove themselves for it."""
    machine = probe.this_machine()
    for operation in plain_operations(pattern):
        facts = facts_of_case(operation, operation.cases[0], params)
        for kernel in REGISTRY.candidates(operation.name):
            if not kernel.needs_proof(facts) or (named and not names_any(named, kernel)):
                continue
            if not again and ENGINE.ledger.judgement(kernel, facts) is not None:
                continue
            library = legality.library_reason(kernel, facts, machine, None)
            absent = library is not None and library.code in _ABSENT
            denied = legality.policy_reasons(kernel, facts, current_policy())
            if not absent and not denied and not legality.limit_findings(kernel, facts):
                yield kernel, facts


TIMEOUT_S = START_S
"""How long one class may be silent before its process counts as hanging; for a kernel that compiles it is longer."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Vetted:
    """What was found about a kernel and a class.

    Attributes:
        verdict: None where it could not be tried, with the reason.
        reached: whether there was time for it; without it there is no verdict, and the class stays as it was.
    """

    kernel_id: str
    call_class: str
    verdict: Verdict | None
    detail: str
    reached: bool = True

    def to_dict(self) -> dict[str, object]:
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return f"{self.kernel_id} for {self.call_class}: {self.verdict or 'not vetted'}: {self.detail}"


def vet(
    operation: str = "*",
    *,
    kernels: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    params: Mapping[str, Any] | None = None,
    modules: Sequence[str] = (),
    graph: bool = False,
    again: bool = False,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> tuple[Vetted, ...]:
    """Check kernels on classes of calls in a child process, and remember the verdicts.

    Args:
        operation: an operation, function, alias or glob.
        kernels, backends: ids, globs or libraries. With neither, what may not run before it was vetted: plugins, and
            libraries at untested versions.
        shapes: shapes of the first tensor, as :func:`layerzero.warmup` takes them; the operations' own cases if None.
        dtype: dtype of the tensors; every one that operation and kernel know if None.
        device: where; the CPU, or the current CUDA device if there is one.
        params: of operations without tensors, what kernels have to prove themselves for: ``{"tokenizer_id": ...}``; no
            others are vetted then. InvalidCallError with shapes, dtype, device or graph.
        modules: modules that register kernels, imported in the child; those of entry points are found by themselves.
        graph: capture each call in a CUDA graph, and compare what replays with other values give. With neither kernels
            nor backends: all that are installed. What fails is taken by no capture of such calls any more.
        again: also check classes that have a verdict.
        timeout_s: seconds of silence after which a child counts as hanging.
        progress: called with a line for each class as it ends.
    Returns: what was found. A kernel that gave a wrong result is chosen for no call until its library has another
        version, or until it passes again. One that crashed or hung is chosen for no call of that class.
    Raises: KeyError for an unknown operation; ValueError for a name of no kernel, a dtype of no name, and a module that
        does not import.
    """
    if params is not None:
        given = {"shapes": shapes, "dtype": dtype, "device": device, "graph": graph}
        if unfit := [f"{name}={value!r}" for name, value in given.items() if value not in (None, False)]:
            raise InvalidCallError(
                "vet", [f"params: wanted none of {', '.join(given)} with it, got {', '.join(unfit)}"]
            )
        proofs = plain_pairs(operation, params, [*(kernels or ()), *(backends or ())], again=again)
        return vet_calls(proofs, modules=modules, timeout_s=timeout_s, progress=progress)
    for option, names in (("kernels", kernels), ("backends", backends)):
        REGISTRY.check_named(names or (), f"vet: {option}")
    target = Device.detect(device_here(device))
    chosen = [each for each in REGISTRY.kernels(operation) if is_named(each, kernels, backends, target, graph=graph)]
    dtypes = None if dtype is None else [dtype_named(dtype)]
    found = class_pairs(chosen, operation, target, shapes and listed(shapes), dtypes, graph=graph)
    pairs = [pair for pair in found if again or not is_known(*pair, graph=graph)]
    return vet_calls(pairs, modules=modules, timeout_s=timeout_s, progress=progress, graph=graph)


def is_known(kernel: Kernel, facts: Facts, *, graph: bool) -> bool:
    """Whether a class has a verdict."""
    return (ENGINE.ledger.capture if graph else ENGINE.ledger.judgement)(kernel, facts) is not None


def is_named(
    kernel: Kernel,
    kernels: Sequence[str] | None,
    backends: Sequence[str] | None,
    device: Device,
    *,
    graph: bool = False,
) -> bool:
    """Whether a kernel is vetted: by name, or where nothing is named because it may not run, or be captured, before.

    Raises: InvalidCallError for captures on a device without any.
    """
    if graph and not device.supports_graphs:
        raise InvalidCallError("vet", [f"graph: wanted a device whose launches can be captured, got {device.name}"])
    if graph and not (kernel.graph_safe and probe.this_machine().state(kernel.backend, device).reason is None):
        return False
    if kernel.is_reference and not graph:
        return False
    if kernels is None and backends is None:
        return graph or legality.untrusted(kernel, device)
    return all(names is None or names_any(names, kernel) for names in (kernels, backends))


def class_pairs(
    kernels: Iterable[Kernel],
    operation: str,
    device: Device,
    shapes: Sequence[Sequence[int] | Sequence[Sequence[int]]] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    *,
    graph: bool = False,
) -> Iterator[tuple[Kernel, Facts]]:
    """Kernels with calls that their limits allow, one for each class, in the operations' layouts."""
    names = set(REGISTRY.operations_named(operation))
    for kernel in kernels:
        for name in kernel.operations:
            if name in names:
                of_one = _classes(kernel, REGISTRY.operation(name), device, shapes, dtypes, graph=graph)
                yield from ((kernel, each) for each in of_one)


def _classes(
    kernel: Kernel,
    operation: Operation,
    device: Device,
    shapes: Sequence[Sequence[int] | Sequence[Sequence[int]]] | None,
    dtypes: Sequence[torch.dtype] | None,
    *,
    graph: bool,
) -> Iterator[Facts]:
    if function_of(operation.name) is None:
        return
    cases = operation.cases if shapes is None else [case_of_shapes(operation, as_shapes(each)) for each in shapes]
    seen = set()
    for case in cases:
        for dtype in dtypes or operation.dtypes:
            for layout in operation.layouts or (None,):
                if case is None:
                    continue
                try:
                    facts = taken(kernel, operation, case, dtype, device, layout, capturable=graph)
                except InvalidCallError:  # a case names another dtype, as of a result, that does not fit this one
                    continue
                if facts is not None and (text := _text(facts, graph=graph)) not in seen:
                    seen.add(text)
                    yield facts


def _text(facts: Facts, *, graph: bool) -> str:
    return capture_text(facts) if graph else class_text(facts)


def allows(kernel: Kernel, facts: Facts) -> bool:
    """Whether a kernel's limits allow a call, adapted where they say how."""
    found = legality.limit_findings(kernel, facts.seen_in(kernel.layout))
    return all(finding.repair is not None for finding in found)


def vet_calls(
    calls: Iterable[tuple[Kernel, Facts]],
    *,
    modules: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
    graph: bool = False,
    go_on: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Vetted, ...]:
    """Check the classes of calls, each once, in as few child processes as survive; remember the verdicts.

    Args:
        graph: check captures; their verdicts decide about captures alone.
        go_on: where no child gets to work, say of each class that is left that it was not vetted, and why; log it.
        stop: called all the while; once it is true, children are killed, and what is left has no verdict.
    Raises: RuntimeError or ValueError in that case otherwise.
    """
    unique: dict[tuple[str, str], tuple[Kernel, Facts]] = {}
    for kernel, facts in calls:
        unique.setdefault((kernel.id, _text(facts, graph=graph)), (kernel, facts))
    found: dict[tuple[str, str], Vetted] = {}

    def keep(name: tuple[str, str], verdict: Verdict | None, detail: str, *, reached: bool = True) -> None:
        each = found[name] = Vetted(*name, verdict, detail, reached)
        passed = verdict is Verdict.PASSED
        if verdict is not None and graph:
            ENGINE.ledger.record_capture(*unique[name], "" if passed else detail or str(verdict))
        elif verdict is not None:
            ENGINE.ledger.record_verdict(*unique[name], verdict, detail)
        if graph and verdict is not None and not passed:
            warn(f"no capture takes {each}", LayerZeroWarning, stacklevel=2)
        elif verdict is Verdict.WRONG and not unique[name][1].operation.class_facts:
            text = f"{each.kernel_id} is not chosen any more until its library has another version: {each}"
            warn(text, LayerZeroWarning, stacklevel=2)
        if progress is not None and reached:
            progress(str(each))

    def answered(task: Task, value: Any) -> None:
        reply = msgspec.convert(value, Reply)
        keep(task.about, reply.verdict, reply.detail)

    def ended(task: Task, end: End) -> None:
        if not end.started and end.kind != "stopped":
            left = len(unique) - len(found)
            raise RuntimeError(f"a vetting process did not get to work ({left} classes left): {end.reason}")
        keep(task.about, end.verdict, str(end), reached=end.kind != "stopped")

    named = homes((kernel for kernel, _ in unique.values()), modules)
    try:
        for of_one in by_device(((name, kernel), facts) for name, (kernel, facts) in unique.items()):
            run_apart(
                "layerzero.tuning.verification.child",
                deque(_task(name, kernel, facts, named, timeout_s, graph=graph) for (name, kernel), facts in of_one),
                found=answered,
                ended=ended,
                modules=named,
                environment=apart_on(of_one[0][1].device),
                stop=stop,
            )
    except (RuntimeError, ValueError) as error:
        if not go_on:
            raise
        log.warning("vetting ended early, and what was not vetted is not chosen: %s", error)
        for name in [each for each in unique if each not in found]:
            keep(name, None, f"not tried: {error}")
    finally:
        if unique:
            ENGINE.bump()
    return tuple(found[name] for name in unique)


def _task(
    name: tuple[str, str], kernel: Kernel, facts: Facts, modules: list[str], timeout_s: float, *, graph: bool
) -> Task:
    axes = facts.operation.cases[0].sizes if facts.operation.cases else {}
    sizes = {axis: size for axis, size in facts.sizes().items() if axis in axes}
    question = ChildTask(kernel.id, CallRecipe.of(facts), modules, sizes=None if graph else sizes, graph=graph)
    return Task(question, kernel.id, max(timeout_s, BUILD_S) if kernel.jit else timeout_s, about=name)


GATHER_S = 0.5
"""How long it waits for more classes before it starts a process for those that came."""


class Background:
    """The queue and its thread, which starts with the first class."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Ask about nothing and have no thread: at first, and in a process that was forked."""
        self._lock = forking.lock()
        self._asked: set[tuple[str, str]] = set()
        self._queue: queue.SimpleQueue[tuple[Kernel, Facts]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self.idle = threading.Event()
        self.idle.set()

    def add(self, kernel: Kernel, facts: Facts) -> None:
        """Ask about a class, once."""
        identity = (kernel.id, class_text(facts))
        with self._lock:
            if identity in self._asked:
                return
            self._asked.add(identity)
            self.idle.clear()
            self._queue.put((kernel, facts))
            if self._thread is None:
                self._thread = started("layerzero-vetting", self._work)
                if self._thread is None:
                    log.debug("nothing is vetted in the background: no thread could be started")
                    return
                atexit.register(self._ending.set)

    def _work(self) -> None:
        while not self._ending.is_set():
            batch = [self._queue.get()]
            self._ending.wait(GATHER_S)
            while not self._queue.empty():
                batch.append(self._queue.get())
            try:
                for found in vet_calls(batch):
                    log.info("vetted in the background: %s", found)
            except Exception:
                log.exception("vetting in the background failed for %d classes", len(batch))
            with self._lock:
                if self._queue.empty():
                    self.idle.set()


BACKGROUND = Background()
"""The one of this process."""

forking.in_child(BACKGROUND.begin)  # its thread exists in the parent only
